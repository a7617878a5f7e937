"""Goal: maps of many ids: the bytes that a commit writes and copies do not grow with them; bytes that
earlier versions of the library wrote keep their meaning."""

import gzip
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aiopersist.base.frontier import Antichain
from aiopersist.state import diff as diffs
from aiopersist.state import rollup_file
from aiopersist.state.command import Context
from aiopersist.state.consuming import Staged, is_consumed
from aiopersist.state.ids import PAGE_IDS, Ids
from aiopersist.state.invariants import check_state
from aiopersist.state.lifecycle import Create
from aiopersist.state.model import HollowBatch, State, TransactionRecord
from aiopersist.state.reading import ExpireReader, RegisterReader, RenewReader, TakeNamedHold, named_reader
from aiopersist.state.record import HollowPart
from aiopersist.state.writing import (
    AppendHollow,
    ExpireWriter,
    HeartbeatWriter,
    RegisterWriter,
    Write,
)
from tests.state.values import SHARD

MANY = 3 * PAGE_IDS

KEYS = st.integers(0, 2 * PAGE_IDS).map(str)
CHANGES = st.lists(st.tuples(st.dictionaries(KEYS, st.integers()), st.lists(KEYS)), max_size=5)


@given(first=st.integers(0, 2 * PAGE_IDS), changes=CHANGES)
def test_ids_are_a_map(first: int, changes: list[tuple[dict[str, int], list[str]]]) -> None:
    """Goal: as a dict after the same changes; the map before each change stays what it was."""
    plain = {str(n): n for n in range(first)}
    ids = Ids(plain)
    for added, dropped in changes:
        before, was = ids, dict(plain)
        ids = ids.changed(added, dropped)
        plain.update(added)
        for key in dropped:
            plain.pop(key, None)
        assert dict(before) == was
        assert (len(ids), dict(ids)) == (len(plain), plain)
        assert ids == Ids(plain)
        assert {k: v for page in ids.pages() for k, v in page.items()} == plain
    assert all(ids[key] == value for key, value in plain.items())
    assert ids.get("none") is None


def test_a_change_copies_little() -> None:
    """Goal: of a map of many ids all but the bucket of the id is shared, and comparing looks at no more."""
    before = Ids({f"app-{n}": n for n in range(50_000)})
    after = before.changed({"new": 1})
    mine = [bucket for bucket, was in zip(after._buckets, before._buckets, strict=True) if bucket is not was]
    assert len(mine) == 1
    assert len(mine[0]) < 200
    assert before != after
    assert after == after.changed({"new": 1})


# --- diffs and rollups -------------------------------------------------------------------------------


def of(*commands: Any, state: State | None = None) -> tuple[State, list[bytes]]:
    """The state after the commands, as a reader makes it of the bytes, and these."""
    written = []
    for command in commands:
        changes = command(state, Context(now=100.0)).changes
        data = diffs.encode_diff(diffs.diff_of(changes, state, commit=f"c{len(written)}", at=100.0))
        state = diffs.apply(diffs.decode_diff(data), state)
        written.append(data)
    assert state is not None
    return check_state(state), written


def append(n: int, **values: Any) -> AppendHollow:
    lower = Antichain(n)
    inline = HollowPart(inline=b"x", size=1, rows=1, checksum="c")
    batch = HollowBatch(lower=lower, upper=Antichain(n + 1), since=Antichain(0), parts=(inline,))
    return AppendHollow("w1", "t", batch, values.pop("transactions", {}), 2**20, **values)


BEGIN = (Create(SHARD, {"key": "string"}, Antichain(0)), RegisterWriter("w1", 10.0))


def test_a_diff_holds_only_the_ids_that_are_new() -> None:
    """Goal: with any ids spent or recorded before, by any writer."""
    state, _ = of(*BEGIN, *(append(n, staged=(Staged("w1", f"batch-{n}", True),)) for n in range(50)))
    few, (first,) = of(
        append(50, staged=(Staged("w1", "batch-50", True),), transactions={"a": 1}), state=state
    )
    consumed = {"w1": Ids({f"batch-{n}": None for n in range(MANY)})}
    apps = {f"app-{n}": TransactionRecord(1, 100.0) for n in range(MANY)}
    full = few.replace(consumed=consumed, transactions=Ids(apps))
    many, (second,) = of(
        append(51, staged=(Staged("w1", "batch-new", True),), transactions={"b": 1}), state=full
    )
    assert len(second) < len(first) + 20
    assert len(many.consumed["w1"]) == MANY + 1
    assert len(many.transactions) == MANY + 1
    assert is_consumed(many, "w1", "batch-new") and is_consumed(many, "w1", "batch-7")
    for command in (HeartbeatWriter("w1"), append(52)):
        _, (other,) = of(command, state=many)
        assert b"batch-" not in other
        assert b"app-" not in other
        assert diffs.decode_diff(other).format == 1  # earlier versions read what has nothing new in it


def test_spent_ids_go_with_their_writer() -> None:
    state, _ = of(*BEGIN, append(0, staged=(Staged("w1", "batch", True),)))
    assert is_consumed(state, "w1", "batch")
    after, (written,) = of(ExpireWriter("w1"), state=state)
    assert after.consumed == {}
    assert b"batch" not in written


def test_a_rollup_of_many_ids_is_read_page_by_page() -> None:
    """Goal: no line holds more than a page; all of it comes back; few ids are written as ever."""
    state, _ = of(*BEGIN, append(0, staged=(Staged("w1", "batch", True),)))
    full = state.replace(
        consumed={**state.consumed, "w2": Ids({f"batch-{n}": None for n in range(MANY)})},
        transactions=Ids({f"app-{n}": TransactionRecord(n, 100.0) for n in range(MANY)}),
    )
    data = rollup_file.encode_rollup(full)
    lines = [json.loads(line) for line in gzip.decompress(data).splitlines()]
    assert lines[0]["format"] == 2
    assert max(len(line.get("transactions", ())) for line in lines[1:]) <= PAGE_IDS
    assert rollup_file.decode_rollup(data, rollup_file.checksum_of(data)) == full
    few, _ = of(*BEGIN, append(0, transactions={"app": 3}))
    data = rollup_file.encode_rollup(few)
    (line,) = gzip.decompress(data).splitlines()
    assert json.loads(line)["format"] == 1
    assert "spent" not in json.loads(line)["state"]
    assert rollup_file.decode_rollup(data, rollup_file.checksum_of(data)) == few


def test_a_hold_of_no_versions_has_a_format_that_earlier_versions_refuse() -> None:
    """Goal: they would take its versions for damaged; they read all others, and go on once it ended."""
    reader = RegisterReader("r1", Antichain(0), 10.0)
    own = RegisterReader("r2", Antichain(0), 10.0, reads=False)
    named = TakeNamedHold("n", "owner", None, 10.0)
    state, written = of(*BEGIN, reader, own, named, RenewReader("r2"), append(0))
    assert [diffs.decode_diff(data).format for data in written] == [1, 1, 1, 2, 2, 2, 1]
    assert _format_of_rollup(state) == 2
    state, written = of(ExpireReader("r2"), ExpireReader(named_reader("n"), "owner"), state=state)
    assert [diffs.decode_diff(data).format for data in written] == [1, 1]
    assert _format_of_rollup(state) == 1


def _format_of_rollup(state: State) -> int:
    data = rollup_file.encode_rollup(state)
    assert rollup_file.decode_rollup(data, rollup_file.checksum_of(data)) == state
    return int(json.loads(gzip.decompress(data).splitlines()[0])["format"])


# --- what earlier versions wrote ---------------------------------------------------------------------

OLD = Path(__file__).with_name("before_ids.jsonl").read_text().splitlines()
*OLD_DIFFS, OLD_END, OLD_ROLLUP = OLD


def replayed(*versions: str) -> State:
    state: State | None = None
    for version in versions:
        state = diffs.apply(diffs.decode_diff(version.encode()), state)
    assert state is not None
    return check_state(state)


def test_versions_and_rollups_of_earlier_versions_are_read() -> None:
    """Goal: batches that they spent stay spent, numbers recorded; the next diff holds the new id alone."""
    data = gzip.compress(OLD_ROLLUP.encode())
    rolled = check_state(rollup_file.decode_rollup(data, rollup_file.checksum_of(data)))
    state = replayed(*OLD_DIFFS)
    assert rolled == state
    assert dict(state.consumed["w33c"]) == {"5969": None, "937e": None}
    assert state.transactions["app"].number == 1
    assert all(is_consumed(replayed(*OLD_DIFFS[: n + 1]), "w33c", "5969") is (n >= 2) for n in range(4))
    part = HollowPart(inline=b"x", size=1, rows=1, checksum="c")
    new = HollowBatch(lower=Antichain(2), upper=Antichain(3), since=Antichain(0), parts=(part,))
    old = AppendHollow("w33c", "t", new, {}, 2**20, staged=(Staged("w33c", "5969", True),))
    assert "AlreadyAppended" in repr(old(state, Context(now=96.0)))
    repeat = Write("w33c", "t", new, {"app": 1}, 2**20)
    assert repeat(state, Context(now=96.0)).result.repeats == {"app"}  # type: ignore[union-attr]
    after, (written,) = of(
        AppendHollow("w33c", "t", new, {}, 2**20, staged=(Staged("w33c", "b787", True),)), state=state
    )
    assert b"5969" not in written
    assert set(after.consumed["w33c"]) == {"5969", "937e", "b787"}
    assert replayed(*OLD_DIFFS, OLD_END).consumed == {}
