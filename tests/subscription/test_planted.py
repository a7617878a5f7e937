"""Goal: the game finds the bugs that subscriptions have when one rule is left out: each within a few games,
which hold without it.

Each plants one bug in the library, by replacing functions of it."""

from collections.abc import Callable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.frontier import Antichain
from aiopersist.shard.commit import commit_all
from aiopersist.state import subscriptions
from aiopersist.state.position import Position, SubscriptionRecord
from aiopersist.subscription import consumer, subscription
from aiopersist.subscription.joint import JointAcks
from aiopersist.write.append_many import append_to_many
from tests.subscription.game import play_brief

SEEDS = 40  # games until it must be found
FEW = 3
Plant = Callable[[pytest.MonkeyPatch], None]


def an_acknowledgement_that_goes_back(patch: pytest.MonkeyPatch) -> None:
    """The last one counts, not the greatest."""
    patch.setattr(Position, "is_before", lambda self, other: self != other)


def a_take_over_that_does_not_fence(patch: pytest.MonkeyPatch) -> None:
    """Any opening of the name may move the position."""
    for module in (subscriptions, consumer):
        patch.setattr(module, "refused", lambda ack, found: None)


def a_forgotten_hold(patch: pytest.MonkeyPatch) -> None:
    """Positions do not keep since."""
    patch.setattr(SubscriptionRecord, "hold", property(lambda self: Antichain()))


def an_ack_that_transactions_leave_out(patch: pytest.MonkeyPatch) -> None:
    class Forgetful(JointAcks):
        def to(self, shard: Any) -> tuple[Any, ...]:
            return ()

        async def intents(self, *args: Any) -> list[Any]:
            return []

    patch.setattr("aiopersist.table.commit.plan.JointAcks", Forgetful)


def an_ack_that_commits_leave_out(patch: pytest.MonkeyPatch) -> None:
    """It follows in a commit of its own."""

    async def apart(appends: Any, shard: Any, ack: Any, intent: Any) -> None:
        await append_to_many(appends, shard.stack)
        await commit_all([intent])

    patch.setattr(subscription, "append_with", apart)


def an_ack_that_is_told_too_early(patch: pytest.MonkeyPatch) -> None:
    async def flush(self: Any) -> None:
        pass

    patch.setattr(consumer.Consumer, "flush", flush)


def a_step_that_is_skipped(patch: pytest.MonkeyPatch) -> None:
    """Who takes over begins behind what there is now."""
    begun = consumer.Consumer.__init__

    def further(self: Any, shard: Any, record: Any) -> None:
        begun(self, shard, record)
        if record.last_ack:
            self.begins_at = Position(frontier=shard.state.upper)

    patch.setattr(consumer.Consumer, "__init__", further)


def shares_that_overlap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(subscription, "within_share", lambda updates, share: updates)


BUGS: list[Plant] = [
    an_acknowledgement_that_goes_back,
    a_take_over_that_does_not_fence,
    a_forgotten_hold,
    an_ack_that_transactions_leave_out,
    an_ack_that_commits_leave_out,
    an_ack_that_is_told_too_early,
    a_step_that_is_skipped,
    shares_that_overlap,
]


def searched(bug: Plant, patch: pytest.MonkeyPatch) -> tuple[int, BaseException]:
    """The number of games until it was found, and what was found: by the check, or by the library itself."""
    bug(patch)
    for seed in range(SEEDS):
        found: BaseExceptionGroup[Any] | None = None
        try:
            play_brief(seed)
        except* (AssertionError, ap.Error) as errors:
            found = errors
        if found is not None:
            return seed, found
    raise LookupError(f"not found in {SEEDS} games")


def test_without_a_bug_nothing_is_found() -> None:
    for seed in range(FEW):
        play_brief(seed)


RARE = (a_step_that_is_skipped,)  # it takes many games


@pytest.mark.long
@pytest.mark.timeout(600)
def test_without_a_bug_nothing_is_found_in_any_game() -> None:
    for seed in range(SEEDS):
        play_brief(seed)


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=[pytest.mark.long] if bug in RARE else []) for bug in BUGS],
    ids=lambda bug: bug.__name__,
)
def test_it_is_found(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    number, error = searched(bug, monkeypatch)
    print(number, repr(error)[:600])
