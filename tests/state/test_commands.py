"""Goal: after any sequence of commands, the state that a reader makes of the bytes is the state that the
writer has; invariants hold; since moves by its rule alone; an expiry only removes a record."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiopersist as ap
from aiopersist.base.frontier import Antichain
from aiopersist.state import diff as diffs
from aiopersist.state import rollup_file
from aiopersist.state.command import Command, Commit, Keep
from aiopersist.state.compaction import Replace, Total, largest_inline_run
from aiopersist.state.lifecycle import AddRollup, EvolveSchema, Finalize, ForgetTransactions
from aiopersist.state.model import HollowBatch, Rollup, State
from aiopersist.state.reading import ExpireReader, RegisterReader, RenewReader, TakeNamedHold, named_reader
from aiopersist.state.record import HollowPart
from aiopersist.state.writing import (
    AppendHollow,
    ExpireWriter,
    HeartbeatWriter,
    Occupy,
    RegisterWriter,
    Write,
    truncate,
)
from tests.state.commands_kit import LEASE_S, READERS, WRITERS, History, created
from tests.state.values import SHARD, ZERO

ROOM = 2**20  # for inline parts


def batch(
    lower: int, upper: int, *, rows: int = 1, writer: str | None = None, inline: bytes = b"xx"
) -> HollowBatch:
    """A batch with one part (or none): in the blob store under `writer`, or inline."""
    part = HollowPart(
        key=f"{SHARD}/{writer}/p.parquet" if writer else None,
        inline=None if writer else inline,
        size=len(inline),
        rows=rows,
        checksum="c",
        key_lower={"é": [1, None]},
        stats={"key": {"min": "a", "max": "b", "nulls": 0}},
    )
    return HollowBatch(
        lower=Antichain(lower), upper=Antichain(upper), since=ZERO, parts=(part,) if rows else ()
    )


STEPS = st.lists(
    st.tuples(st.integers(0, 17), st.sampled_from(WRITERS), st.sampled_from(READERS), st.integers(0, 9)),
    max_size=60,
)


def replacing(state: State, writer: str, ordinals: tuple[int, ...], merged: HollowBatch) -> Replace:
    """A compaction of these batches, with any contents."""
    inputs = {ordinal: state.batches[ordinal] for ordinal in ordinals}
    return Replace(writer, inputs, merged, Total(100, 7), Total(100, 7))


def command_of(kind: int, writer: str, reader: str, n: int, history: History) -> Command | None:
    """The command of one step; `None` when it only lets time pass."""
    state = history.live
    upper = state.upper.time if isinstance(state.upper.time, int) else 0
    since = state.since.time if isinstance(state.since.time, int) else 0
    blob = writer if n % 2 else None
    token = f"t{len(history.versions)}"
    match kind:
        case 0:
            history.now += n * 1.5
            return None
        case 1 | 2:
            return RegisterWriter(writer, LEASE_S)
        case 3 | 4:
            new = batch(upper, upper + n, rows=min(n, 1), writer=blob)
            return AppendHollow(writer, token, new, {"app": n} if n == 5 else {}, ROOM)
        case 5:
            low = max(upper - n, 0)
            return AppendHollow(
                writer, token, batch(low, low + n, rows=min(n, 1), writer=blob), {}, ROOM, replica=True
            )
        case 6 | 7:
            return Write(writer, token, batch(max(upper - n, 0), upper + 1, writer=blob), {}, ROOM)
        case 8:
            return HeartbeatWriter(writer)
        case 9:
            return ExpireWriter(writer)
        case 10:
            return RegisterReader(reader, Antichain(since + n) if n < 8 else Antichain(), LEASE_S)
        case 11 | 12:
            return RenewReader(reader, advance_to=Antichain(since + n))
        case 13:
            return RenewReader(reader)
        case 14:
            return RenewReader(reader, hold=Antichain(since + n))
        case 15:
            owner = f"o{n % 2}"
            return TakeNamedHold("nightly", owner, Antichain(since + n) if n else None, LEASE_S)
        case 16:
            if n < 3:
                return EvolveSchema(state.schema_id, {"key": f"str{n}"})
            key = f"{SHARD}/{writer}/{n}.rollup"
            return AddRollup(writer, state.seqno, Rollup(key=key, checksum="c", size=1))
        case _:
            if n < 5:
                return ExpireReader(reader)
            ordinals = largest_inline_run(state)
            if not ordinals:
                return Occupy(writer)
            first, last = state.batches[ordinals[0]], state.batches[ordinals[-1]]
            merged = batch(0, 1, rows=3, writer=writer).replace(lower=first.lower, upper=last.upper)
            return replacing(state, writer, ordinals, merged)


def check_since(before: State, after: State, command: Command) -> None:
    """An oracle of its own, on plain ints: since is the least hold, in a commit of a live moving hold."""
    moves = isinstance(command, RenewReader) and after.readers[command.reader].moving
    holds = [r.since.time for r in after.readers.values() if r.since.time is not None]
    old = before.since.time
    if not moves or old is None:
        assert after.since == before.since
    elif not holds:
        assert after.since == Antichain()
    else:
        assert after.since == Antichain(max(old, min(holds)))  # type: ignore[type-var]


def check_expiry(before: State, after: State, command: Command, now: float) -> None:
    """A record that vanished was overdue, or was asked to go; no other record changed."""
    for name in ("readers", "writers"):
        was, now_is = getattr(before, name), getattr(after, name)
        asked = getattr(command, name[:-1], None)
        if isinstance(command, TakeNamedHold):
            asked = named_reader(command.name)
        for key, record in was.items():
            if key not in now_is:
                expired = isinstance(command, ExpireReader | ExpireWriter) and key == asked
                assert expired or record.heartbeat + record.lease_s < now
            elif key != asked:
                assert now_is[key] == record
    if isinstance(command, AppendHollow | Write | HeartbeatWriter | Replace | AddRollup):
        assert after.writers[command.writer].heartbeat == now


@settings(max_examples=300)
@given(steps=STEPS)
def test_the_state_of_the_bytes_is_the_state(steps: list[Any]) -> None:
    """Goal: encode, decode, apply: the same at every version; since and expiry by their rules."""
    history = created()
    for kind, writer, reader, n in steps:
        command = command_of(kind, writer, reader, n, history)
        if command is None:
            continue
        before = history.live
        outcome = history.run(command)
        if isinstance(outcome, Commit):
            check_since(before, history.live, command)
            check_expiry(before, history.live, command, history.now)
        else:
            assert history.live is before
    data = rollup_file.encode_rollup(history.live)
    assert rollup_file.decode_rollup(data, rollup_file.checksum_of(data)) == history.live


@settings(max_examples=100)
@given(steps=STEPS, at=st.integers(0, 60))
def test_a_rollup_and_the_diffs_after_it_are_the_state(steps: list[Any], at: int) -> None:
    history = created()
    for kind, writer, reader, n in steps:
        command = command_of(kind, writer, reader, n, history)
        if command is not None:
            history.run(command)
    at = min(at, len(history.states) - 1)
    data = rollup_file.encode_rollup(history.states[at])
    state: State | None = rollup_file.decode_rollup(data, rollup_file.checksum_of(data))
    for version in history.versions[at + 1 :]:
        state = diffs.apply(diffs.decode_diff(version), state)
    assert state == history.live


def test_expiry_moves_no_since() -> None:
    """Goal: the story of design.md: a process held 10 in one reader and 100 in another and crashed; they
    expired one after the other; its restart reads at 10."""
    history = created()
    history.run(RegisterWriter("w", 1e6))
    history.run(AppendHollow("w", "t", batch(0, 200), {}, ROOM))
    holds = (("r10", 10, 20.0), ("r100", 100, 30.0))
    for reader, _, lease_s in holds:
        history.run(RegisterReader(reader, ZERO, lease_s))
    for reader, hold, _ in holds:
        history.run(RenewReader(reader, advance_to=Antichain(hold)))
    assert history.live.since == Antichain(10)
    history.now += 25.0  # the one that held 10 is overdue
    history.run(HeartbeatWriter("w"))
    assert list(history.live.readers) == ["r100"]
    assert history.live.since == Antichain(10)
    history.now += 10.0
    history.run(HeartbeatWriter("w"))
    assert history.live.readers == {}
    assert history.live.since == Antichain(10)
    assert isinstance(history.run(RegisterReader("again", Antichain(10), 20.0)), Commit)


def test_a_hold_that_only_keeps_never_moves_since() -> None:
    """Goal: opening and renewing keep it back; the one that was downgraded goes on moving it, as others let
    go."""
    history = created()
    history.run(RegisterReader("r1", Antichain(5), LEASE_S))
    history.run(RegisterReader("r2", Antichain(7), LEASE_S))
    for reader in ("r1", "r2"):
        history.run(RenewReader(reader))
        history.run(RenewReader(reader, hold=Antichain(9)))
    assert history.live.since == ZERO
    history.run(RenewReader("r1", advance_to=Antichain(20)))
    assert history.live.since == Antichain(9)
    history.run(ExpireReader("r2"))
    assert history.live.since == Antichain(9)
    history.run(RenewReader("r1"))
    assert history.live.since == Antichain(20)


def test_a_blob_of_a_writer_that_is_gone_is_refused() -> None:
    """Goal: rule 7: every command that adds a blob key checks it in the very state it is applied to."""
    history = created()
    history.run(RegisterWriter("w1", LEASE_S))
    rollup = Rollup(key=f"{SHARD}/w1/r.rollup", checksum="c", size=1)
    history.run(AppendHollow("w1", "t", batch(0, 1), {}, ROOM))
    ordinals = largest_inline_run(history.live)
    history.run(ExpireWriter("w1"))
    for command in (
        AppendHollow("w1", "t", batch(1, 2, writer="w1"), {}, ROOM),
        Write("w1", "t", batch(1, 2, writer="w1"), {}, ROOM),
        replacing(history.live, "w1", ordinals, batch(0, 1, writer="w1")),
        AddRollup("w1", 1, rollup),
    ):
        outcome = history.run(command)
        assert isinstance(outcome, Keep)
        assert isinstance(outcome.error, ap.BatchExpired)
    inline = history.run(AppendHollow("w1", "t", batch(1, 2), {}, ROOM))
    assert isinstance(inline, Keep) and isinstance(inline.error, ap.LeaseExpired)


@pytest.mark.parametrize("kind", ["append", "write", "rollup", "flush", "heartbeat"])
def test_a_commit_renews_its_own_handle_before_it_expires_others(kind: str) -> None:
    """Goal: an overdue writer that no commit has expired yet goes on, and expires the other overdue one."""
    history = created()
    for writer in ("w1", "w2"):
        history.run(RegisterWriter(writer, LEASE_S))
    history.run(AppendHollow("w1", "t", batch(0, 1), {}, ROOM))
    history.now += LEASE_S + 1
    rollup = Rollup(key=f"{SHARD}/w1/r.rollup", checksum="c", size=1)
    command: Command = {
        "append": AppendHollow("w1", "t", batch(1, 2, writer="w1"), {}, ROOM),
        "write": Write("w1", "t", batch(1, 2, writer="w1"), {}, ROOM),
        "rollup": AddRollup("w1", 1, rollup),
        "flush": replacing(history.live, "w1", largest_inline_run(history.live), batch(0, 1, writer="w1")),
        "heartbeat": HeartbeatWriter("w1"),
    }[kind]
    assert isinstance(history.run(command), Commit)
    assert list(history.live.writers) == ["w1"]


# --- what a later state proves ------------------------------------------------------------------------


def test_a_rollup_is_proved_by_its_name() -> None:
    """Goal: of a rollup that may have been named and replaced nothing can be told: it is never deleted."""
    history = created()
    history.run(RegisterWriter("w1", LEASE_S))
    add = AddRollup("w1", 1, Rollup(key=f"{SHARD}/w1/a.rollup", checksum="c", size=1))
    assert add.happened(history.live) is False
    history.run(add)
    assert add.happened(history.live) is True
    history.run(AddRollup("w1", 2, Rollup(key=f"{SHARD}/w1/b.rollup", checksum="c", size=1)))
    collected = history.live.replace(rollups={2: history.live.rollups[2]})
    assert add.happened(collected) is None


def test_the_version_that_adds_a_rollup_names_it() -> None:
    """Goal: older versions may be truncated at once: the head alone must lead to the state."""
    history = created()
    history.run(RegisterWriter("w1", LEASE_S))
    history.run(AddRollup("w1", 1, Rollup(key=f"{SHARD}/w1/a.rollup", checksum="c1", size=1)))
    named = diffs.decode_diff(history.versions[-1]).rollup
    assert named is not None
    assert (named.seqno, named.key, named.checksum) == (1, f"{SHARD}/w1/a.rollup", "c1")


def test_a_flush_is_proved_by_its_batch() -> None:
    history = created()
    history.run(RegisterWriter("w1", LEASE_S))
    for upper in (1, 2):
        history.run(AppendHollow("w1", "t", batch(upper - 1, upper), {}, ROOM))
    ordinals = largest_inline_run(history.live)
    assert len(ordinals) == 2
    flush = replacing(history.live, "w1", ordinals, batch(0, 2, writer="w1"))
    assert flush.happened(history.live) is False
    history.run(flush)
    assert flush.happened(history.live) is True
    assert history.run(flush) == Keep(result=False)  # what was read is no longer there
    merged = history.live.replace(batches={9: next(iter(history.live.batches.values()))})
    assert flush.happened(merged) is None


def test_an_evolution_is_proved_by_the_next_schema() -> None:
    history = created()
    evolve = EvolveSchema(0, {"key": "new"})
    assert evolve.happened(history.live) is False
    history.run(evolve)
    assert evolve.happened(history.live) is True
    assert EvolveSchema(0, {"key": "other"}).happened(history.live) is False


# --- appends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("upper", "lower", "new", "wrote", "enters_at"),
    [
        pytest.param(0, 0, 5, True, 0, id="all_of_it"),
        pytest.param(3, 0, 5, True, 3, id="a_part"),
        pytest.param(5, 0, 5, False, None, id="nothing_is_new"),
        pytest.param(7, 0, 5, False, None, id="beyond"),
        pytest.param(0, 1, 5, None, None, id="a_gap"),
    ],
)
def test_what_a_replica_appends(
    upper: int, lower: int, new: int, wrote: bool | None, enters_at: int | None
) -> None:
    history = created()
    history.run(RegisterWriter("w1", LEASE_S))
    history.run(AppendHollow("w1", "t0", batch(0, upper, rows=0), {}, ROOM))
    outcome = history.run(AppendHollow("w1", "t1", batch(lower, new), {}, ROOM, replica=True))
    if wrote is None:
        assert isinstance(outcome, Keep) and isinstance(outcome.error, ap.UpperMismatch)
        return
    assert outcome.result.wrote is wrote
    assert outcome.result.upper == Antichain(max(upper, new))
    if enters_at is not None:
        last = next(reversed(history.live.batches.values()))
        assert last.lower == Antichain(enters_at)
        cut = (Antichain(enters_at), last.upper) if enters_at > lower else None
        assert [part.truncated for part in last.parts] == [cut]


def test_truncation_marks_every_part() -> None:
    whole = batch(0, 9)
    assert truncate(whole, Antichain(0)) is whole
    cut = (Antichain(4), whole.upper)
    assert all(part.truncated == cut for part in truncate(whole, Antichain(4)).parts)


def test_finalize_forgets_everything() -> None:
    history = created()
    history.run(RegisterWriter("w1", LEASE_S))
    history.run(RegisterReader("r1", ZERO, LEASE_S))
    history.run(AppendHollow("w1", "t", batch(0, 5, writer="w1"), {"app": 1}, ROOM))
    history.run(AppendHollow("w1", "t", batch(5, 6), {}, ROOM))
    history.run(Finalize("s"))
    state = history.live
    assert state.finalized
    assert (state.since, state.upper, state.inline_bytes) == (Antichain(), Antichain(), 0)
    assert not any((state.batches, state.writers, state.readers, state.transactions))
    assert history.run(Finalize("s")) == Keep()
    for command in (RegisterWriter("w2", 1.0), HeartbeatWriter("w1"), RegisterReader("r2", ZERO, 1.0)):
        with pytest.raises(ap.ShardFinalized):
            history.run(command)


def test_transaction_numbers_are_forgotten_after_their_time() -> None:
    history = created()
    history.run(RegisterWriter("w1", 1e6))
    history.run(AppendHollow("w1", "t", batch(0, 1), {"old": 1}, ROOM))
    history.now += 100
    history.run(AppendHollow("w1", "t", batch(1, 2), {"new": 1}, ROOM))
    history.run(ForgetTransactions(["old", "new", "none"], history.now - 50.0))
    assert list(history.live.transactions) == ["new"]
    assert history.run(ForgetTransactions(["old", "new"], history.now - 50.0)) == Keep()
