"""Which of the planted bugs the worlds have shown, from the first seed on that may show it: the first world
that fails, and how many were played until then. `python -m tests.worlds.test_planted` finds these figures
again."""

from typing import NamedTuple


class Shown(NamedTuple):
    """The first world that fails."""

    seed: int
    played: int
    """Worlds until then; others have no program that could show the bug."""


SHOWN = {
    "a_lost_answer_is_a_refusal": Shown(9, 10),
    "a_lost_answer_is_a_success": Shown(0, 1),
    "the_second_sending_decides": Shown(38, 39),
    "any_version_is_ours": Shown(6, 7),
    "a_version_is_never_ours": Shown(12, 13),
    "a_statement_for_each_shard": Shown(6, 7),
    "an_append_that_came_late_is_told_as_done": Shown(6, 7),
    "a_vacant_version_stays_vacant": Shown(198, 199),
    "a_cancelled_append_did_not_happen": Shown(25, 4),
    "parts_in_doubt_are_deleted": Shown(25, 4),
    "leases_by_the_own_clock": Shown(10, 11),
    "a_batch_that_is_never_spent": Shown(0, 1),
    "numbers_of_transactions_are_not_compared": Shown(470, 82),
    "ids_are_not_looked_up": Shown(26, 10),
    "a_call_that_its_group_leaves_out": Shown(2, 1),
    "replicas_append_what_is_there": Shown(14, 1),
    "an_owner_that_is_not_compared": Shown(186, 9),
    "an_append_in_memory_only": Shown(6, 1),
    "an_append_without_an_answer_begins_anew": Shown(24, 7),
    "the_upper_of_an_append_is_not_compared": Shown(26, 8),
    "collection_beside_readers": Shown(128, 47),
    "truncation_to_any_version": Shown(0, 1),
    "collection_of_what_is_named": Shown(0, 1),
    "collection_of_what_is_dropped_later": Shown(521, 198),
    "rollups_go_before_their_versions": Shown(9, 5),
    "a_sweep_that_reads_the_head_first": Shown(63, 28),
    "a_sweep_beside_writers": Shown(10, 6),
    "a_sweep_of_earlier_versions": Shown(136, 52),
    "critical_holds_hold_nothing": Shown(76, 8),
    "leased_holds_hold_nothing": Shown(78, 32),
    "a_named_hold_begins_anew": Shown(740, 72),
    "leases_that_end_early": Shown(9, 10),
    "any_inputs_are_replaced": Shown(220, 87),
    "times_that_advance_beyond_since": Shown(4, 2),
    "a_compaction_that_leaves_rows_out": Shown(0, 1),
    "a_piece_that_is_left_out": Shown(4, 2),
    "a_compaction_that_drops_retractions": Shown(3, 4),
    "a_sweep_that_finds_nothing": Shown(10, 11),
    "a_rollup_that_forgets_holds": Shown(1, 2),
    "a_hold_that_is_never_released": Shown(0, 1),
    "a_lost_update": Shown(99, 29),
    "a_write_skew": Shown(37, 13),
    "a_stale_get": Shown(130, 42),
    "a_shared_val": Shown(13, 4),
    "a_take_over_that_does_not_fence": Shown(44, 8),
    "an_ack_that_transactions_leave_out": Shown(31, 5),
    "an_ack_that_commits_leave_out": Shown(63, 13),
    "an_ack_that_is_told_too_early": Shown(544, 114),
    "a_step_that_is_skipped": Shown(64, 14),
    "shares_that_overlap": Shown(6, 1),
    "a_subscription_that_begins_behind_the_contents": Shown(6, 1),
    "a_cursor_that_is_too_far": Shown(146, 7),
    "a_write_before_the_seal": Shown(26, 2),
    "revisions_of_a_stash_are_not_compared": Shown(3, 1),
    "a_status_that_decides": Shown(1071, 72),
    "a_date_that_counts_alone": Shown(1228, 42),
    "a_collection_that_ignores_tags": Shown(3022, 9),
    "a_tag_of_what_was_replaced": Shown(3121, 63),
    "a_sweep_that_ignores_tags": Shown(3007, 4),
    "a_rollup_that_forgets_tags": Shown(3007, 4),
    "a_tag_without_its_last_batch": Shown(3007, 4),
    "a_publication_that_pins_nothing": Shown(4008, 6),
}
