"""The commands of subscriptions: who may move a position, what it holds, and when it expires."""

from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.frontier import Antichain
from aiopersist.state import rollup_file
from aiopersist.state.command import Commit, Keep
from aiopersist.state.compaction import Replace, Total
from aiopersist.state.diff import decode_diff
from aiopersist.state.lifecycle import ExpireOverdue, Finalize, FinalizeUnused, first_expiry
from aiopersist.state.position import Position, SubscriptionRecord, WithinContents
from aiopersist.state.retention import ApplyRetention, SetRetention
from aiopersist.state.subscriptions import (
    Ack,
    Acknowledge,
    Beginning,
    DropSubscription,
    LeaveSubscription,
    OpenSubscription,
)
from aiopersist.state.writing import AppendHollow, CloseTo, RegisterWriter
from tests.state.commands_kit import LEASE_S, History, created
from tests.state.test_commands import ROOM, batch
from tests.state.values import SHARD


def at(time: int, rows: int | None = None) -> Position:
    within = None if rows is None else WithinContents(as_of=time, rows=rows)
    return Position(frontier=Antichain(time), contents=within)


def opening(owner: str = "o", start: Any = Beginning.NOW, **given: Any) -> OpenSubscription:
    given = {"name": "s", "share": None, "lease_s": 1e9, "expire_after_s": None, **given}
    return OpenSubscription(owner=owner, start=start, **given)


def append(history: History, upper: int, rows: int = 1, acks: tuple[Ack, ...] = ()) -> Commit | Keep:
    lower = history.live.upper.time
    assert isinstance(lower, int)
    token = f"t{len(history.versions)}"
    return history.run(AppendHollow("w1", token, batch(lower, upper, rows=rows), {}, ROOM, acks=acks))


def begun(upper: int = 10) -> History:
    history = created()
    history.run(RegisterWriter("w1", 1e9))
    append(history, upper)
    return history


def ack(history: History, position: Position, owner: str = "o", *, strict: bool = False) -> Commit | Keep:
    return history.run(Acknowledge((Ack("s", owner, position),), f"t{len(history.versions)}", strict))


def record(history: History, key: str = "s") -> SubscriptionRecord:
    return history.live.subscriptions[key]


def refusal(outcome: Commit | Keep) -> ap.Error:
    assert isinstance(outcome, Keep)
    assert outcome.error is not None
    return outcome.error


def test_where_a_new_one_begins() -> None:
    """With the contents of now, at the upper, or at a position; of an empty shard at its upper."""
    history = begun()
    history.run(opening(start=None))
    assert record(history).position == at(10 - 1, rows=0)
    history.run(opening(name="now"))
    assert record(history, "now").position == at(10)
    history.run(opening(name="at", start=at(4)))
    assert record(history, "at").position == at(4)
    empty = created()
    empty.run(opening(start=None))
    assert record(empty).position == at(0)


def test_positions_are_ordered() -> None:
    """The places within the contents lie between the frontiers, in the order of rows."""
    places = [at(3), at(4), at(4, rows=0), at(4, rows=7), at(5), Position(frontier=Antichain())]
    for number, place in enumerate(places):
        assert [place.is_before(other) for other in places] == [n > number for n in range(len(places))]


def test_the_owner_moves_it_forward_only() -> None:
    """An older position changes nothing; a strict one is told that it was consumed."""
    history = begun()
    history.run(opening())
    assert isinstance(ack(history, at(20)), Commit)
    for position in (at(20), at(15)):
        assert ack(history, position) == Keep()
        error = refusal(ack(history, position, strict=True))
        assert isinstance(error, ap.InvalidUsage)
        assert error.kind is ap.UsageKind.CONSUMED
    assert record(history).position == at(20)


def test_a_take_over_fences() -> None:
    """It goes on where the position is, whatever `start` says; the earlier owner can do nothing more."""
    history = begun()
    history.run(opening())
    ack(history, at(12))
    history.run(opening("p", start=None))
    assert record(history).position == at(12)
    error = refusal(ack(history, at(20)))
    assert isinstance(error, ap.OpaqueMismatch)
    assert (error.expected, error.actual) == ("o", "p")
    leaving = LeaveSubscription(Ack("s", "o", at(20)), "t")
    assert history.run(leaving) == Keep()
    assert isinstance(refusal(append(history, 20, acks=(Ack("s", "o", at(20)),))), ap.OpaqueMismatch)
    assert (record(history).position, record(history).owner) == (at(12), "p")


def test_leaving_acknowledges_and_names_no_owner() -> None:
    history = begun()
    history.run(opening())
    history.run(LeaveSubscription(Ack("s", "o", at(11)), "t"))
    assert (record(history).position, record(history).owner) == (at(11), None)
    assert isinstance(refusal(ack(history, at(12))), ap.OpaqueMismatch)


def test_resume() -> None:
    """Behind the position, or at it; not before. One that is not there begins there."""
    history = begun()
    history.run(opening(start=at(5)))
    history.run(opening("p", start=None, resume=at(8)))
    assert record(history).position == at(8)
    error = refusal(history.run(opening("q", start=None, resume=at(7))))
    assert isinstance(error, ap.SinceViolation)
    assert (error.as_of, error.since) == (6, Antichain(7))
    history.run(opening("p", start=None, resume=at(3), name="new"))
    assert record(history, "new").position == at(3)


def test_it_keeps_since_and_never_moves_it() -> None:
    """A policy moves since as far as the position; an acknowledgement alone moves nothing."""
    history = begun(100)
    history.run(opening(start=at(51)))
    history.run(SetRetention(1, None))
    history.run(ApplyRetention(exact=True))
    assert history.live.since == Antichain(50)
    ack(history, at(71))
    assert history.live.since == Antichain(50)
    history.run(ApplyRetention(exact=True))
    assert history.live.since == Antichain(70)
    ack(history, at(90, rows=5))  # within the contents at 90
    history.run(ApplyRetention(exact=True))
    assert history.live.since == Antichain(90)
    history.run(DropSubscription("s"))
    history.run(ApplyRetention(exact=True))
    assert history.live.since == Antichain(99)


def test_it_begins_where_history_is_held() -> None:
    history = begun(100)
    history.run(SetRetention(10, None))
    history.run(ApplyRetention(exact=True))
    error = refusal(history.run(opening(start=at(90))))
    assert isinstance(error, ap.SinceViolation)
    assert (error.as_of, error.since) == (89, Antichain(90))
    assert isinstance(history.run(opening(start=at(91))), Commit)


def test_shares_have_positions_of_their_own() -> None:
    """Another number of shares is refused while positions are there; a drop ends all."""
    history = begun()
    for i in range(2):
        history.run(opening(f"o{i}", share=(i, 2)))
    history.run(Acknowledge((Ack("s[1/2]", "o1", at(12)),), "t"))
    assert [record(history, f"s[{i}/2]").position for i in range(2)] == [at(10), at(12)]
    for share in (None, (0, 3)):
        error = refusal(history.run(opening(share=share)))
        assert isinstance(error, ap.InvalidUsage)
        assert error.kind is ap.UsageKind.INVALID_SHARE
    history.run(DropSubscription("s"))
    assert not history.live.subscriptions
    assert isinstance(history.run(opening(share=(0, 3))), Commit)


@pytest.mark.parametrize("waits", [True, False])
def test_it_expires_while_it_waits(waits: bool) -> None:
    """Only with something to acknowledge; then any commit ends it, or that of maintenance. It holds nothing,
    and begins anew where an opening says."""
    history = begun(100)
    history.run(opening(expire_after_s=50.0))
    history.run(SetRetention(1, None))
    append(history, 150, rows=1 if waits else 0)
    expires_at = history.now + 50.0
    assert first_expiry(history.live) == (expires_at if waits else 1e9 + 1000.0)
    history.now += 49.0
    assert history.run(ExpireOverdue()) == Keep()
    history.now += 2.0
    outcome = history.run(ExpireOverdue())
    assert isinstance(outcome, Commit if waits else Keep)
    assert record(history).expired is waits
    history.run(ApplyRetention(exact=True))
    assert history.live.since == Antichain(149 if waits else 99)
    if waits:
        assert isinstance(refusal(ack(history, at(150))), ap.SubscriptionExpired)
        assert isinstance(refusal(history.run(opening("p", start=None))), ap.SubscriptionExpired)
    history.run(opening("p", start=Beginning.NOW))
    assert record(history).position == at(150 if waits else 100)


def test_a_batch_of_both_does_not_make_it_wait() -> None:
    """Goal: an earlier version of the library has made one batch of what it has passed and what is empty."""
    history = begun(100)
    history.run(opening(expire_after_s=50.0))
    append(history, 150, rows=0)
    (first, full), (last, empty) = history.live.batches.items()
    whole = full.replace(upper=empty.upper)
    total = Total(full.len, 0)
    assert history.run(Replace("w1", {first: full, last: empty}, whole, total, total)) != Keep(result=False)
    assert len(history.live.batches) == 1
    history.run(opening("p", expire_after_s=50.0))
    history.now += 60.0
    assert history.run(ExpireOverdue()) == Keep()
    append(history, 160)
    history.now += 60.0
    assert isinstance(history.run(ExpireOverdue()), Commit)


def test_an_acknowledgement_begins_the_time_anew() -> None:
    history = begun(100)
    history.run(opening(expire_after_s=50.0))
    append(history, 150)
    append(history, 200)
    for position in (110, 120, 130):
        history.now += 40.0
        assert isinstance(ack(history, at(position)), Commit)
    ack(history, at(200))
    history.now += 1000.0
    assert history.run(ExpireOverdue()) == Keep()  # nothing waits
    append(history, 250, rows=0)
    history.now += 1000.0
    assert history.run(ExpireOverdue()) == Keep()
    append(history, 300)
    history.now += 60.0
    assert isinstance(history.run(ExpireOverdue()), Commit)


def test_a_position_and_an_append_in_one_version() -> None:
    """Into the same shard: both, or none; a repeat is told so, also where the upper has moved."""
    history = begun()
    history.run(opening())
    assert isinstance(append(history, 20, acks=(Ack("s", "o", at(10, rows=1)),)), Commit)
    assert (record(history).position, history.live.upper) == (at(10, rows=1), Antichain(20))
    again = AppendHollow("w1", "t", batch(10, 20), {}, ROOM, acks=(Ack("s", "o", at(10, rows=1)),))
    error = refusal(history.run(again))
    assert isinstance(error, ap.InvalidUsage)
    assert error.kind is ap.UsageKind.CONSUMED
    assert history.live.upper == Antichain(20)
    late = AppendHollow("w1", "t", batch(10, 20), {}, ROOM, acks=(Ack("s", "o", at(20)),))
    assert isinstance(refusal(history.run(late)), ap.UpperMismatch)
    assert record(history).position == at(10, rows=1)


def test_proofs_of_lost_answers() -> None:
    """The token proves it. The owner's own position proves the contrary; another owner's nothing."""
    history = begun()
    history.run(opening())
    sent = Acknowledge((Ack("s", "o", at(20)),), "mine", is_strict=True)
    assert sent.happened(history.live) is False
    history.run(sent)
    assert sent.happened(history.live) is True
    ack(history, at(30))
    assert sent.happened(history.live) is None
    assert Acknowledge(sent.acks, "mine").happened(history.live) is True
    history.run(opening("p"))
    assert Acknowledge(sent.acks, "mine").happened(history.live) is None
    assert opening("p").happened(history.live) is True
    assert opening("o").happened(history.live) is None


def test_only_shards_with_subscriptions_have_the_new_format() -> None:
    """Older versions of the library read the others, and say that they cannot read these. A rollup has the
    records."""
    history = begun()
    assert decode_diff(history.versions[-1]).format == 1
    history.run(opening())
    ack(history, at(20, rows=3))
    assert decode_diff(history.versions[-1]).format == 4
    append(history, 20)
    assert decode_diff(history.versions[-1]).format == 1
    data = rollup_file.encode_rollup(history.live)
    assert rollup_file.decode_rollup(data, rollup_file.checksum_of(data)) == history.live
    history.run(DropSubscription("s"))
    assert decode_diff(history.versions[-1]).format == 4


def test_the_end_of_the_shard_ends_it() -> None:
    history = created()
    history.run(opening(start=None))
    assert history.run(FinalizeUnused(SHARD)) == Keep(result=False)
    history.run(Finalize(SHARD))
    assert not history.live.subscriptions
    with pytest.raises(ap.ShardFinalized):
        ack(history, at(20))
    assert history.run(LeaveSubscription(Ack("s", "o", at(20)), "t")) == Keep()


def test_a_wrong_clock_ends_nothing_for_ever() -> None:
    """Moments in the future become moments of now, so that it expires in time."""
    history = begun(100)
    history.now += 1e6
    history.run(opening(expire_after_s=50.0, lease_s=LEASE_S))
    append(history, 150)
    history.now -= 1e6
    history.run(CloseTo(Antichain(151)))
    assert (record(history).heartbeat, record(history).waits_since) == (history.now, history.now)
    history.now += 60.0
    assert isinstance(history.run(ExpireOverdue()), Commit)
    assert record(history).expired
