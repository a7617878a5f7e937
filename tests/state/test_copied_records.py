"""Goal: a field that a record gains later is not lost where commands make a record of one that is there, nor
where a copy is made; and a format that comes later changes nothing about what was there before it."""

import gzip
import json

import pytest

from aiopersist.base.frontier import Antichain
from aiopersist.state import diff as diffs
from aiopersist.state import model, rollup_file
from aiopersist.state.command import Command, Commit, Context
from aiopersist.state.copying import CopyMark, CreateCopy, mark_of, opaque_of
from aiopersist.state.diff import Changes
from aiopersist.state.model import Clock, CriticalReader, LeasedReader, Mark, Retention, State, Writer
from aiopersist.state.once import OnceChanges
from aiopersist.state.position import Position, SubscriptionRecord, subscription_key
from aiopersist.state.reading import KeepReader, RenewReader, TakeNamedHold, named_reader
from aiopersist.state.record import HollowPart, InlineBytes, to_builtins
from aiopersist.state.retention import ApplyRetention, DowngradeCritical, SetRetention
from aiopersist.state.rollup_file import checksum_of, decode_rollup, encode_rollup
from aiopersist.state.subscriptions import OpenSubscription
from aiopersist.state.writing import HeartbeatWriter
from tests.state.commands_kit import created
from tests.state.values import SHARD, ZERO

NOW = 1000.0
UPPER = Antichain(5)
LATER = "a field of a later version"


class LaterReader(LeasedReader):
    later: str = ""


class LaterCritical(CriticalReader):
    later: str = ""


class LaterRetention(Retention):
    later: str = ""


class LaterWriter(Writer):
    later: str = ""


class LaterSubscription(SubscriptionRecord):
    later: str = ""


LEASE = {"heartbeat": NOW - 1, "lease_s": 60.0, "later": LATER}
SOURCE = "s11111111-0000-4000-8000-000000000000"


def full() -> State:
    """A state with a record of each kind, each with all of its fields set, and one that comes later."""
    found = created().live
    subscription = LaterSubscription(
        name="bill",
        share=(0, 2),
        position=Position(frontier=ZERO),
        owner="me",
        token="proof",
        last_ack=1.0,
        expire_after_s=3600.0,
        waits_since=NOW,
        expired=False,
        **LEASE,
    )
    marks = (Mark(at=1.0, upper=Antichain(3)),)
    return found.replace(
        upper=UPPER,
        readers={
            "r": LaterReader(since=ZERO, moving=True, seqno_hold=0, name=None, owner=None, **LEASE),
            named_reader("n"): LaterReader(
                since=ZERO, moving=True, seqno_hold=None, name="n", owner="me", **LEASE
            ),
        },
        critical={
            "c": LaterCritical(since=ZERO, opaque=1, later=LATER),
            mark_of(SOURCE): LaterCritical(since=ZERO, opaque=opaque_of(ZERO), later=LATER),
        },
        retention={0: LaterRetention(times=None, seconds=60.0, hold=ZERO, marks=marks, later=LATER)},
        writers={"w": LaterWriter(token="t", upper=ZERO, consumed=(), **LEASE)},
        subscriptions={subscription_key("bill", (0, 2)): subscription},
    )


ON_RECORDS: dict[str, tuple[Command, str, str | int]] = {
    "hold renewed": (RenewReader("r"), "readers", "r"),
    "lease kept": (KeepReader("r"), "readers", "r"),
    "named hold taken over": (
        TakeNamedHold("n", "another", None, 60.0),
        "readers",
        named_reader("n"),
    ),
    "critical hold moved": (DowngradeCritical("c", 1, 2, ZERO), "critical", "c"),
    "policy replaced": (SetRetention(None, 30.0), "retention", 0),
    "policy applied": (ApplyRetention(exact=True), "retention", 0),
    "writer renewed": (HeartbeatWriter("w"), "writers", "w"),
    "subscription taken over": (
        OpenSubscription("bill", (0, 2), "another", 60.0, 7200.0, None),
        "subscriptions",
        subscription_key("bill", (0, 2)),
    ),
}


@pytest.mark.parametrize("case", ON_RECORDS)
def test_a_record_keeps_the_fields_that_a_command_does_not_know(case: str) -> None:
    command, records, key = ON_RECORDS[case]
    state = full()
    outcome = command(state, Context(now=NOW))
    assert isinstance(outcome, Commit), outcome
    before, after = getattr(state, records)[key], getattr(outcome.changes, records)[key]
    assert after != before
    assert (type(after), after.later) == (type(before), LATER)


def test_a_copied_policy_and_mark_keep_the_fields_that_are_not_known() -> None:
    state = full()
    outcome = CreateCopy("s" + SHARD[1:-1] + "1", state, ZERO)(None, Context(now=NOW))
    assert isinstance(outcome, Commit)
    policy = outcome.changes.retention[0]
    assert policy == state.retention[0].replace(hold=ZERO, marks=(Mark(at=NOW, upper=ZERO),))
    assert policy.later == LATER  # type: ignore[attr-defined]  # of the class above
    moved = CopyMark(mark_of(SOURCE), Antichain(3), is_exact=True).moved(state, Antichain(4))
    assert moved["critical"][mark_of(SOURCE)].later == LATER
    assert moved["retention"][0].later == LATER


OF_A_VERSION = {"shard", "seqno", "commit", "at", "finalized"}  # each shard has its own
OF_USERS = {"readers", "writers", "subscriptions", "claims", "transactions", "once", "consumed", "tags"}
OF_CONTENTS = {"since", "upper", "batches", "levels", "fuel", "inline_bytes", "streams"}  # appends bring them
OF_UPKEEP = {"rollups", "dropped_at", "collected"}
COPIED = {"clock", "table", "schemas", "retention", "critical"}  # of the last the mark alone


def test_a_copy_is_of_the_kind_of_its_source() -> None:
    """Goal: whoever adds a field to the state decides here whether a copy has it."""
    fields = set(State.__struct_fields__)
    assert fields == OF_A_VERSION | OF_USERS | OF_CONTENTS | OF_UPKEEP | COPIED
    source = full().replace(clock=Clock.WALL, table=True)
    outcome = CreateCopy("s" + SHARD[1:-1] + "1", source, ZERO)(None, Context(now=NOW))
    assert isinstance(outcome, Commit)
    copied = diffs.apply(diffs.diff_of(outcome.changes, None, commit="c", at=NOW), None)
    written = to_builtins(copied).keys()
    assert written - {"since", "upper"} == COPIED | (OF_A_VERSION - {"finalized"})
    assert (copied.clock, copied.table, copied.schemas) == (Clock.WALL, True, source.schemas)


def test_a_first_version_loses_no_change() -> None:
    """Goal: version 0 is made as each later one: of all that the diff says."""
    part = HollowPart(inline=InlineBytes(b"xyz"), size=3, rows=1, checksum="c", schema_id=0)
    batch = model.HollowBatch(lower=ZERO, upper=Antichain(1), since=ZERO, parts=(part,))
    known = Changes(
        shard=SHARD,
        clock=Clock.WALL,
        table=True,
        since=ZERO,
        upper=Antichain(1),
        schemas={0: {"key": "str"}},
        writers={"w": Writer(heartbeat=NOW, lease_s=1.0)},
        consumed={"w": ["b"]},
        transactions={"app": model.TransactionRecord(number=7, at=NOW)},
        once=OnceChanges(times={"0" * 32: 3}, oldest=0.0),
        batches={0: batch},
        levels={},
        fuel=5,
        collected=2,
    )
    state = diffs.apply(diffs.diff_of(known, None, commit="c", at=NOW), None)
    assert (state.seqno, state.commit, state.at) == (0, "c", NOW)
    assert (state.clock, state.table, state.fuel, state.collected) == (Clock.WALL, True, 5, 2)
    assert state.inline_bytes == part.size
    assert "b" in state.consumed["w"]
    assert state.transactions["app"].number == 7
    assert state.once.time_of("0" * 32, 0.0) == 3


def test_a_later_format_changes_nothing_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: `FORMAT` is the latest number, no feature's: with one more, subscriptions are written as before,
    and none is lost with a rollup."""
    for module in (model, diffs, rollup_file):
        if hasattr(module, "FORMAT"):
            monkeypatch.setattr(module, "FORMAT", model.FORMAT + 1)
    state = created().live
    record = SubscriptionRecord(
        name="bill", position=Position(frontier=ZERO), owner="me", heartbeat=NOW, lease_s=1.0
    )
    state = state.replace(subscriptions={"bill": record})
    assert diffs.format_of(state) == 4
    data = encode_rollup(state)
    assert decode_rollup(data, checksum_of(data)) == state


def test_a_rollup_leaves_out_what_its_format_has_not() -> None:
    """Goal: older releases, which refuse names that they do not know, read what needs no later format."""
    plain = created().live
    data = encode_rollup(plain)
    assert {"once", "clock", "table", "subscriptions"}.isdisjoint(json.loads(gzip.decompress(data))["state"])
    assert decode_rollup(data, checksum_of(data)) == plain
