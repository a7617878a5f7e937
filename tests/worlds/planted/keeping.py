"""Bugs of what keeps shards small: collection, sweep, holds and compaction."""

from typing import Any

import pytest

from aiopersist.base.frontier import Antichain
from aiopersist.gc import collect, rollup, sweep
from aiopersist.parts import sorted_parts
from aiopersist.shard import hold
from aiopersist.state import command, compaction, drops, reading, retention, trail
from aiopersist.state.names import live_parts
from aiopersist.state.position import SubscriptionRecord
from tests.worlds.planted import Bug

KEEPER = "keeper"
FAR = 2**62  # a version that is never reached
READERS = "reader listener holder owner biller sharer relay"


def collection_beside_readers(patch: pytest.MonkeyPatch) -> None:
    """No reader's versions are kept."""
    patch.setattr(collect, "oldest_held", lambda state: state.seqno)


def truncation_to_any_version(patch: pytest.MonkeyPatch) -> None:
    """Versions are truncated up to one without a rollup."""
    patch.setattr(collect, "horizon", lambda state: state.seqno if state.rollups else None)


def collection_of_what_is_named(patch: pytest.MonkeyPatch) -> None:
    """Parts that a later version still names are deleted."""
    patch.setattr(trail.Trail, "dropped", property(lambda self: set(self.parts)))
    patch.setattr(drops, "_gone", lambda before, after: live_parts(before))


def collection_of_what_is_dropped_later(patch: pytest.MonkeyPatch) -> None:
    """What was dropped after the horizon is deleted, too."""
    trail_from = collect.trail_from

    async def further(stack: Any, state: Any, earliest: int, last: int) -> Any:
        return await trail_from(stack, state, earliest, state.seqno)

    between = drops.Drops.between
    patch.setattr(collect, "trail_from", further)
    patch.setattr(drops.Drops, "between", lambda self, first, last: between(self, first, FAR))


def rollups_go_before_their_versions(patch: pytest.MonkeyPatch) -> None:
    """A crash in between leaves versions that nobody can read."""
    original = collect._collect

    async def rollups_first(shard: Any, writer: Any) -> Any:
        state = await shard.register.refresh()
        if state is not None and (last := collect.horizon(state)) is not None:
            old = [rollup.key for seqno, rollup in state.rollups.items() if seqno < last]
            await shard.stack.blob.delete(old)
        return await original(shard, writer)

    patch.setattr(collect, "_collect", rollups_first)


def a_sweep_that_reads_the_head_first(patch: pytest.MonkeyPatch) -> None:
    """A writer may register, upload and commit before the blobs are listed."""

    async def leaks_of(stack: Any, shard: str, *, expire: bool) -> dict[str, int]:
        named = await sweep._named(stack, shard, expire=expire)
        listed = await sweep._listed(stack, shard)
        if named is None:
            return {}
        kept = named.referenced
        return {k: n for k, n in listed.items() if k not in kept and sweep.writer_of(k) not in named.writers}

    patch.setattr(sweep, "leaks_of", leaks_of)


def a_sweep_beside_writers(patch: pytest.MonkeyPatch) -> None:
    """What a registered writer has uploaded is swept before its commit."""
    patch.setattr(sweep, "registered", lambda state: frozenset())


def a_sweep_of_earlier_versions(patch: pytest.MonkeyPatch) -> None:
    """Only what the head names is kept, not what a reader holds."""

    async def head_only(stack: Any, state: Any, earliest: int, last: int) -> Any:
        return trail.Trail()

    patch.setattr(sweep, "trail_from", head_only)


def _holds_without(kind: str) -> Any:
    meet = command.meet_of_holds

    def fewer(state: Any, dropped: Any, changes: Any) -> Any:
        return meet(state.replace(**{kind: {}}), dropped, {k: v for k, v in changes.items() if k != kind})

    return fewer


def _plant_holds(patch: pytest.MonkeyPatch, kind: str) -> None:
    fewer = _holds_without(kind)
    for module in (command, retention):
        patch.setattr(module, "meet_of_holds", fewer)


def critical_holds_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    _plant_holds(patch, "critical")


def leased_holds_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    _plant_holds(patch, "readers")


def subscriptions_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionRecord, "hold", property(lambda self: Antichain()))


def a_named_hold_begins_anew(patch: pytest.MonkeyPatch) -> None:
    """Who takes it over gets the shard's since."""
    call = reading.TakeNamedHold.__call__

    def anew(self: Any, state: Any, context: Any) -> Any:
        left = {key: record for key, record in state.readers.items() if record.name != self.name}
        return call(self, state.replace(readers=left), context)

    patch.setattr(reading.TakeNamedHold, "__call__", anew)


def a_need_that_is_not_committed(patch: pytest.MonkeyPatch) -> None:
    """An opening believes that older history is held."""

    async def need(self: Any, frontier: Any) -> Any:
        async with self._turn:
            await self._ensure()
            self._add(frontier)
            return hold.HistoryPin(frontier, self.reader)

    patch.setattr(hold.SharedHold, "need", need)
    patch.setattr(hold.SharedHold, "since", property(lambda self: Antichain()))


def a_heartbeat_that_forgets_versions(patch: pytest.MonkeyPatch) -> None:
    """It gives up the versions that open snapshots read."""
    for module in (command, reading):
        patch.setattr(module, "seqno_hold_of", lambda state, context: state.seqno)


def leases_that_end_early(patch: pytest.MonkeyPatch) -> None:
    """A commit drops who has not been heard of for a tenth of its lease."""
    overdue = command.overdue

    def early(state: Any, context: Any, changes: Any) -> Any:
        short = {
            name: {
                key: record.replace(lease_s=record.lease_s / 10)
                for key, record in getattr(state, name).items()
            }
            for name in ("readers", "writers")
        }
        return overdue(state.replace(**short), context, changes)

    patch.setattr(command, "overdue", early)


def any_inputs_are_replaced(patch: pytest.MonkeyPatch) -> None:
    """A result takes the place of batches that are not what it was made of, and claims are no matter."""
    patch.setattr(compaction, "_overlaps", lambda ranges, first, last: False)
    patch.setattr(compaction, "_unchanged", lambda inputs, state: next(iter(inputs)) in state.batches)


def times_that_advance_beyond_since(patch: pytest.MonkeyPatch) -> None:
    """Compaction advances times to the upper of its inputs."""
    from aiopersist.compact import local

    selection = local.Selection

    def further(advance_to: Any) -> Any:
        time = advance_to.time
        return selection(advance_to=Antichain(time + 2))

    patch.setattr(local, "Selection", further)


def a_compaction_that_leaves_rows_out(patch: pytest.MonkeyPatch) -> None:
    """The last part that it reads is missing, and the sums are not compared."""
    from aiopersist.compact import local

    rewrite = local.rewrite

    async def fewer(shard: Any, runs: Any, *more: Any) -> Any:
        return await rewrite(shard, runs[:-1] or runs, *more)

    patch.setattr(local, "rewrite", fewer)
    patch.setattr(compaction.Replace, "_fits", lambda self, state: compaction._unchanged(self.inputs, state))


def a_piece_that_is_left_out(patch: pytest.MonkeyPatch) -> None:
    """A shared compaction is applied without its last piece."""
    from aiopersist.compact import shared_compaction

    in_order = shared_compaction._in_order
    patch.setattr(shared_compaction, "_in_order", lambda *args: in_order(*args)[:1])
    patch.setattr(shared_compaction.SharedCompaction, "_check", lambda self, read: None)
    patch.setattr(compaction.Replace, "_fits", lambda self, state: compaction._unchanged(self.inputs, state))


def a_policy_that_passes_the_contents(patch: pytest.MonkeyPatch) -> None:
    """`retain` moves since to the upper itself: the newest contents cannot be read."""
    target = retention._target

    def beyond(record: Any, state: Any, now: float, *, exact: bool) -> Any:
        found, marks = target(record, state, now, exact=exact)
        return (state.upper if record.times == 0 else found), marks

    patch.setattr(retention, "_target", beyond)


def a_hold_that_is_never_released(patch: pytest.MonkeyPatch) -> None:
    async def release(self: Any) -> None:
        self._users -= 1

    patch.setattr(hold.SharedHold, "release", release)


def a_rollup_that_forgets_holds(patch: pytest.MonkeyPatch) -> None:
    encode = rollup.encode_rollup
    patch.setattr(rollup, "encode_rollup", lambda state: encode(state.replace(critical={}, readers={})))


def a_sweep_that_finds_nothing(patch: pytest.MonkeyPatch) -> None:
    async def leaks_of(stack: Any, shard: str, *, expire: bool) -> dict[str, int]:
        return {}

    patch.setattr(sweep, "leaks_of", leaks_of)


def a_compaction_that_drops_retractions(patch: pytest.MonkeyPatch) -> None:
    consolidated = sorted_parts.sort_and_consolidate

    def fewer(table: Any) -> Any:
        found = consolidated(table)
        return found.filter([diff > 0 for diff in found.column("diff").to_pylist()])

    patch.setattr(sorted_parts, "sort_and_consolidate", fewer)
    patch.setattr(compaction.Replace, "_fits", lambda self, state: compaction._unchanged(self.inputs, state))


BUGS = [
    Bug("collection", collection_beside_readers, KEEPER),
    Bug("collection", truncation_to_any_version, ""),
    Bug("collection", collection_of_what_is_named, ""),
    Bug("collection", collection_of_what_is_dropped_later, KEEPER),
    Bug("collection", rollups_go_before_their_versions, KEEPER),
    Bug("sweep", a_sweep_that_reads_the_head_first, KEEPER),
    Bug("sweep", a_sweep_beside_writers, KEEPER),
    Bug("sweep", a_sweep_of_earlier_versions, KEEPER),
    Bug("holds", critical_holds_hold_nothing, "owner"),
    Bug("holds", leased_holds_hold_nothing, READERS),
    Bug("holds", subscriptions_hold_nothing, READERS),
    Bug("holds", a_named_hold_begins_anew, "holder listener"),
    Bug("holds", a_need_that_is_not_committed, READERS),
    Bug("holds", a_heartbeat_that_forgets_versions, READERS),
    Bug("holds", leases_that_end_early, ""),
    Bug("compaction", any_inputs_are_replaced, KEEPER),
    Bug("compaction", times_that_advance_beyond_since, KEEPER),
    Bug("compaction", a_compaction_that_leaves_rows_out, ""),
    Bug("compaction", a_piece_that_is_left_out, KEEPER),
    Bug("compaction", a_compaction_that_drops_retractions, ""),
    Bug("sweep", a_sweep_that_finds_nothing, ""),
    Bug("rollups", a_rollup_that_forgets_holds, ""),
    Bug("holds", a_hold_that_is_never_released, ""),
    Bug("retention", a_policy_that_passes_the_contents, ""),
]
