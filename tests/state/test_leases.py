"""Goal: what a lease, a claim or a name in the state protects is protected exactly as long as it says: at the
last moment of a lease still, a moment later no more."""

import pytest

import aiopersist as ap
from aiopersist.base.frontier import Antichain
from aiopersist.state.command import AHEAD_S, Commit, Context, Keep
from aiopersist.state.compaction import ClaimCollection, ReleaseClaim, TakeClaim, is_compact, plan
from aiopersist.state.consuming import MarkConsumed, Staged
from aiopersist.state.lifecycle import (
    AddRollup,
    Create,
    EndCollection,
    ExpireOverdue,
    Finalize,
    FinalizeUnused,
    MarkDeleted,
    first_expiry,
)
from aiopersist.state.model import COLLECTION, Claim, HollowBatch, Rollup
from aiopersist.state.reading import KeepReader, RegisterReader, RenewReader
from aiopersist.state.record import HollowPart
from aiopersist.state.writing import (
    Appended,
    AppendHollow,
    ExpireWriter,
    HeartbeatWriter,
    NoRoom,
    RegisterWriter,
    Write,
)
from tests.state.commands_kit import LEASE_S, History, created
from tests.state.test_commands import ROOM, batch
from tests.state.values import SHARD, ZERO


def written(*writers: str, batches: int = 0) -> History:
    """A shard with these writers and so many batches of one update; `w1` appended them."""
    history = created()
    for writer in writers:
        history.run(RegisterWriter(writer, LEASE_S))
    for at in range(batches):
        history.run(AppendHollow("w1", f"t{at}", batch(at, at + 1), {}, ROOM))
    return history


# --- leases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("late_s", "stays"), [(0.0, True), (0.1, False)])
def test_a_lease_ends_after_its_seconds(late_s: float, stays: bool) -> None:
    history = written("w1", "w2")
    history.run(RegisterReader("r1", ZERO, LEASE_S))
    assert first_expiry(history.live) == history.now + LEASE_S
    history.now += LEASE_S + late_s
    outcome = history.run(ExpireOverdue())
    assert isinstance(outcome, Keep) is stays
    assert bool(history.live.writers) is bool(history.live.readers) is stays


@pytest.mark.parametrize(("ahead_s", "is_wrong"), [(AHEAD_S, False), (AHEAD_S + 0.1, True)])
def test_a_heartbeat_in_the_future_becomes_one_of_now(ahead_s: float, is_wrong: bool) -> None:
    """Goal: a clock that was wrong for a moment makes no lease that never ends."""
    history = written("w1")
    history.run(RegisterReader("r1", ZERO, LEASE_S))
    before = history.now
    history.now -= ahead_s
    assert isinstance(history.run(ExpireOverdue()), Commit) is is_wrong
    expected = history.now if is_wrong else before
    assert history.live.writers["w1"].heartbeat == expected
    assert history.live.readers["r1"].heartbeat == expected


def test_the_first_lease_to_end() -> None:
    history = created()
    assert first_expiry(history.live) == float("inf")
    history.run(RegisterWriter("w1", 9.0))
    history.run(RegisterReader("r1", ZERO, 5.0))
    assert first_expiry(history.live) == history.now + 5.0


def test_an_open_snapshot_holds_its_version() -> None:
    """Goal: a reader holds the oldest version that its process reads; it never goes back, and one that only
    keeps its lease holds on."""
    history = written("w1", batches=3)
    state = history.live

    def registered(pinned: int | None) -> int | None:
        outcome = RegisterReader("r", ZERO, LEASE_S)(state, Context(now=history.now, pinned=pinned))
        assert isinstance(outcome, Commit)
        return outcome.changes.readers["r"].seqno_hold

    assert [registered(pinned) for pinned in (None, 2, 99)] == [state.seqno, 2, state.seqno]
    history.run(RegisterReader("r", ZERO, LEASE_S))
    held = history.live.readers["r"].seqno_hold
    assert held is not None
    history.run(HeartbeatWriter("w1"))
    history.run(KeepReader("r"))
    assert history.live.readers["r"].seqno_hold == held
    outcome = RenewReader("r")(history.live, Context(now=history.now, pinned=held - 1))
    assert isinstance(outcome, Commit) and outcome.changes.readers["r"].seqno_hold == held
    history.run(RenewReader("r"))
    assert history.live.readers["r"].seqno_hold == history.live.seqno - 1  # the version that it was made on


def test_what_proves_a_registration() -> None:
    history = written("w1")
    assert RegisterWriter("w1", LEASE_S).happened(history.live) is True
    assert RegisterWriter("w2", LEASE_S).happened(history.live) is None  # it may have expired since


# --- claims -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "last", "free"),
    [(0, 1, True), (1, 2, False), (2, 3, False), (3, 4, False), (4, 5, True), (0, 5, False)],
)
def test_two_claims_share_no_batch(first: int, last: int, free: bool) -> None:
    """Goal: not one batch at either end."""
    history = written("w1", "w2", batches=6)
    ordinals = list(history.live.batches)

    def inputs(first: int, last: int) -> dict[int, HollowBatch]:
        return {ordinal: history.live.batches[ordinal] for ordinal in ordinals[first : last + 1]}

    taken = history.run(TakeClaim("w2", inputs(2, 3)))
    assert isinstance(taken, Commit) and taken.result is True
    assert history.live.claims == {
        ordinals[2]: Claim(writer="w2", first=ordinals[2], last=ordinals[3]),
    }
    outcome = history.run(TakeClaim("w1", inputs(first, last)))
    assert outcome.result is free
    assert (ordinals[first] in history.live.claims) is (free or first == 2)


@pytest.mark.parametrize(("late_s", "free"), [(0.0, False), (0.1, True)])
def test_a_claim_ends_with_the_lease_of_its_writer(late_s: float, free: bool) -> None:
    history = written("w1", "w2", batches=8)
    spec = plan(history.live, 2, history.now)
    assert spec is not None
    history.now += 1.0
    history.run(HeartbeatWriter("w1"))
    history.run(TakeClaim("w2", spec.inputs))
    history.now += LEASE_S + late_s
    assert (plan(history.live, 2, history.now) == spec) is free
    history.run(HeartbeatWriter("w1"))
    assert bool(history.live.claims) is not free


def test_only_its_writer_releases_a_claim() -> None:
    history = written("w1", "w2", batches=2)
    inputs = dict(history.live.batches)
    first = next(iter(inputs))
    take = TakeClaim("w2", inputs)
    assert take.happened(history.live) is False
    history.run(take)
    assert take.happened(history.live) is True
    assert TakeClaim("w1", inputs).happened(history.live) is False
    assert history.run(ReleaseClaim("w1", first)) == Keep()
    assert history.run(ReleaseClaim("w2", first + 1)) == Keep()
    assert isinstance(history.run(ReleaseClaim("w2", first)), Commit)
    assert history.live.claims == {}


def test_a_writer_that_ends_takes_its_claims_along() -> None:
    history = written("w1", "w2", batches=2)
    history.run(TakeClaim("w2", dict(history.live.batches)))
    history.run(ClaimCollection("w1", None, 0))
    history.run(ExpireWriter("w2"))
    assert list(history.live.claims) == [COLLECTION]
    assert history.run(ExpireWriter("w2")) == Keep()


def compacted(**marks: tuple[Antichain, Antichain] | Antichain) -> HollowBatch:
    return HollowBatch(
        lower=ZERO,
        upper=Antichain(5),
        since=Antichain(3),
        parts=(HollowPart(key=f"{SHARD}/w/1", size=1, rows=1, checksum="c", **marks),),
    )


@pytest.mark.parametrize(
    ("found", "since", "expected"),
    [
        (compacted(), 3, True),
        (compacted(), 4, False),
        (compacted(), 2, True),
        (compacted().replace(runs=(1,)), 3, False),
        (compacted(truncated=(ZERO, Antichain(4))), 3, False),
        (compacted(rewrite=Antichain(4)), 3, False),
        (compacted().replace(parts=()), 4, True),
    ],
)
def test_what_a_compaction_would_gain_nothing_from(found: HollowBatch, since: int, expected: bool) -> None:
    assert is_compact(found, Antichain(since)) is expected


# --- what may be deleted ------------------------------------------------------------------------------


def rollup(seqno: int) -> Rollup:
    return Rollup(key=f"{SHARD}/w1/{seqno}.rollup", checksum="c", size=1)


def rolled_up(*seqnos: int) -> History:
    history = written("w1", "w2", batches=6)
    for seqno in seqnos:
        history.run(AddRollup("w1", seqno, rollup(seqno)))
    return history


def test_a_rollup_is_named_once_and_only_forward() -> None:
    history = rolled_up(4)
    for older in (3, 4):
        assert history.run(AddRollup("w1", older, rollup(older).replace(checksum="d"))) == Keep(result=False)
        assert AddRollup("w1", older, rollup(9)).happened(history.live) is None
    added = history.run(AddRollup("w1", 5, rollup(5)))
    assert isinstance(added, Commit) and added.result is True
    assert history.live.rollups == {4: rollup(4), 5: rollup(5)}


@pytest.mark.parametrize(
    ("upto", "left"), [(2, [2, 4, 5]), (3, [4, 5]), (4, [4, 5]), (5, [5]), (9, [5])], ids=str
)
def test_a_collection_forgets_the_rollups_before_it(upto: int, left: list[int]) -> None:
    """Goal: never the rollup of the version that it ends at, and never the latest."""
    history = rolled_up(2, 4, 5)
    assert isinstance(history.run(EndCollection(upto, None)), Commit)
    assert (history.live.collected, list(history.live.rollups)) == (upto, left)


def test_a_collection_never_goes_back() -> None:
    history = rolled_up(2, 4)
    history.run(EndCollection(4, None))
    assert history.run(EndCollection(3, None)) == Keep()
    assert history.run(EndCollection(4, None)) == Keep()
    assert history.live.collected == 4
    history.run(ClaimCollection("w1", 4, 4))
    assert isinstance(history.run(EndCollection(4, "w1")), Commit)  # nothing to forget but the claim
    assert (history.live.collected, history.live.claims) == (4, {})


@pytest.mark.parametrize(("writer", "released"), [("w1", True), ("w2", False), (None, False)])
def test_a_collection_releases_its_own_claim(writer: str | None, released: bool) -> None:
    history = rolled_up(2)
    claim = ClaimCollection("w1", 2, 0)
    assert claim.happened(history.live) is False
    assert history.run(claim).result is True
    assert claim.happened(history.live) is True
    assert history.run(ClaimCollection("w2", 2, 0)) == Keep(result=False)
    history.run(EndCollection(2, writer))
    assert (COLLECTION in history.live.claims) is not released


@pytest.mark.parametrize(("latest", "collected", "taken"), [(2, 0, True), (None, 0, False), (2, 1, False)])
def test_a_collection_is_claimed_on_what_was_seen(latest: int | None, collected: int, taken: bool) -> None:
    """Goal: if another process rolled up or collected meanwhile, the plan is void."""
    assert rolled_up(2).run(ClaimCollection("w1", latest, collected)).result is taken


def test_a_shard_is_marked_deleted_once_and_only_at_its_end() -> None:
    history = written("w1")
    assert history.run(MarkDeleted()) == Keep()
    history.run(Finalize(SHARD))
    assert history.run(EndCollection(1, None)) == Keep()
    assert isinstance(history.run(MarkDeleted()), Commit)
    assert history.live.collected == history.live.seqno
    assert history.run(MarkDeleted()) == Keep()


def test_only_a_shard_without_use_is_given_up() -> None:
    unused = created()
    assert FinalizeUnused(SHARD)(None, Context(now=0.0)) == Keep(result=False)
    assert unused.run(FinalizeUnused(SHARD)).result is True
    assert unused.run(FinalizeUnused(SHARD)) == Keep(result=True)
    held = created()
    held.run(RegisterReader("r", ZERO, LEASE_S))
    for used in (written("w1"), held):
        assert used.run(FinalizeUnused(SHARD)) == Keep(result=False)
    assert held.run(Create(SHARD, {"key": "other"}, ZERO)) == Keep()


def test_a_state_has_room_for_so_many_inline_bytes() -> None:
    """Goal: always fewer than the limit; blobs need no room."""
    history = written("w1", batches=2)  # of two bytes each
    for room, fits in ((6, False), (7, True)):
        outcome = AppendHollow("w1", "t", batch(2, 3), {}, room)(history.live, Context(now=history.now))
        assert isinstance(outcome, Commit) is fits
        assert fits or (isinstance(outcome, Keep) and isinstance(outcome.error, NoRoom))
    assert isinstance(history.run(AppendHollow("w1", "t", batch(2, 3, writer="w1"), {}, 0)), Commit)


@pytest.mark.parametrize(("number", "repeats"), [(4, True), (5, True), (6, False)])
def test_a_transaction_number_is_taken_once(number: int, repeats: bool) -> None:
    """Goal: with its append, and then neither it nor an earlier one again."""
    history = written("w1")
    history.run(AppendHollow("w1", "t", batch(0, 1), {"app": 5}, ROOM))
    before = history.live.upper
    for command in (
        AppendHollow("w1", "u", batch(1, 2), {"app": number}, ROOM),
        Write("w1", "u", batch(1, 2), {"app": number}, ROOM),
    ):
        outcome = command(history.live, Context(now=history.now))
        expected = Appended(before, wrote=False, repeats=frozenset({"app"}))
        assert (outcome == Keep(result=expected)) is repeats
        assert isinstance(outcome, Keep) is repeats


def test_a_batch_is_spent_once() -> None:
    """Goal: only what was neither appended nor spent may be deleted; afterwards nobody can append it."""
    history = written("w1", "w2")
    one, other = (Staged("w2", name, handed_over=True) for name in ("one", "other"))
    history.run(AppendHollow("w1", "t", batch(0, 1), {}, ROOM, staged=(one,)))
    fresh = history.run(MarkConsumed((one, other)))
    assert isinstance(fresh, Commit) and fresh.result == frozenset({"other"})
    assert history.run(MarkConsumed((one, other))) == Keep(result=frozenset())
    late = history.run(AppendHollow("w1", "t", batch(1, 2), {}, ROOM, staged=(other,)))
    assert isinstance(late, Keep) and isinstance(late.error, ap.AlreadyAppended)
    history.run(ExpireWriter("w2"))
    gone = history.run(AppendHollow("w1", "t", batch(1, 2), {}, ROOM, staged=(other,)))
    assert isinstance(gone, Keep) and isinstance(gone.error, ap.BatchExpired)
