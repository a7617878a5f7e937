"""Goal: the same changes lead to the same streams for writers and readers; the sums that the state keeps
are sums; and parts that no live batch names any more are known as dropped."""

from typing import Any

import pytest

from aiopersist.base.errors import Corruption
from aiopersist.base.frontier import Antichain
from aiopersist.state.diff import Changes, apply, decode_diff, diff_of, encode_diff
from aiopersist.state.invariants import check_state, check_version
from aiopersist.state.model import State, Writer
from aiopersist.state.names import live_parts, registered
from aiopersist.state.record import HollowPart
from aiopersist.state.rollup_file import checksum_of, decode_rollup, encode_rollup
from aiopersist.state.streams import (
    Arrangement,
    Rearrangement,
    Streams,
    StreamsChanges,
    TraceBatch,
    UnsealedBatch,
    difference,
    gone_parts,
    rearranged,
)
from aiopersist.state.trail import Trail

OWNER = "w-owner"


def blob(name: str) -> HollowPart:
    return HollowPart(key=f"i/{OWNER}/{name}.parquet", size=100, rows=1, checksum="c")


def inline(size: int = 10) -> HollowPart:
    return HollowPart(inline=b"x" * size, size=size, rows=1, checksum="c")


def unsealed(lower: int, upper: int, *parts: HollowPart, least: int = 0, greatest: int = 0) -> UnsealedBatch:
    return UnsealedBatch(
        seqno_lower=lower, seqno_upper=upper, time_least=least, time_greatest=greatest, parts=parts
    )


def trace(lower: int, upper: int, *parts: HollowPart) -> TraceBatch:
    return TraceBatch(lower=lower, upper=upper, since=0, level=0, updates=len(parts), parts=parts)


class Log:
    """Versions, the state after each, and what they have named."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.trail = Trail()
        self.data: list[bytes] = []
        least = Antichain(0)
        self.commit(shard="i1", since=least, upper=least, streams=StreamsChanges(owner=OWNER))

    def commit(self, **changes: Any) -> State:
        diff = diff_of(Changes(**changes), self.state, commit=f"c{len(self.data)}", at=0.0)
        self.data.append(encode_diff(diff))
        read = decode_diff(self.data[-1])
        after = apply(read, self.state)
        check_version(read, self.state, after)
        check_state(after)
        self.trail.add([self.data[-1]], "i1")
        self.state = after
        return after

    def change(self, name: str, **changes: Any) -> State:
        return self.commit(streams=StreamsChanges(arrangements={name: Rearrangement(**changes)}))


def test_a_life_of_streams() -> None:
    log = Log()
    log.commit(
        schemas={0: {"key": "string"}},
        streams=StreamsChanges(
            seqno=2,
            names={"a": 0, "b": 0},
            arrangements={"a": Rearrangement(seqno=2, unsealed={0: unsealed(0, 2, blob("1"), inline(7))})},
        ),
    )
    state = log.change("b", seqno=3, unsealed={0: unsealed(0, 3, inline(20), least=4, greatest=9)})
    assert state.inline_bytes == 27
    assert state.dropped_at == 0
    assert state.streams is not None
    assert live_parts(state) == {blob("1").key}
    assert registered(state) == {OWNER}
    state = log.change("a", seal=5, trace={0: trace(0, 5, blob("2"))}, drop_unsealed=(0,))
    assert (state.inline_bytes, state.dropped_at) == (20, 3)
    assert log.trail.dropped == {blob("1").key}
    state = log.change("b", seal=5, unsealed={0: unsealed(0, 3, inline(6), least=5, greatest=9)})  # trimmed
    assert (state.inline_bytes, state.dropped_at) == (6, 3)
    rolled = encode_rollup(state)
    assert decode_rollup(rolled, checksum_of(rolled)) == state
    later = Trail(state)
    state = log.commit(streams=StreamsChanges(destroyed=("a",), revision=9))
    later.add(log.data[-1:], "i1")
    assert (state.dropped_at, live_parts(state)) == (5, set())
    assert log.trail.dropped == {blob("1").key, blob("2").key}
    assert later.dropped == {blob("2").key}
    assert state.streams is not None
    assert (state.streams.destroyed, list(state.streams.arrangements)) == (frozenset({"a"}), ["b"])
    assert state.streams.revision == 9


def test_a_version_without_changes_of_streams_keeps_them() -> None:
    log = Log()
    log.commit(schemas={0: {}}, streams=StreamsChanges(names={"a": 0}))
    before = log.change("a", seqno=1, unsealed={0: unsealed(0, 1, blob("1"))})
    after = log.commit(writers={"w": Writer(heartbeat=1.0, lease_s=9.0)})
    assert (after.streams, after.dropped_at) == (before.streams, before.dropped_at)
    assert log.trail.dropped == set()
    assert gone_parts(None, after.streams) == []
    made = StreamsChanges(owner=OWNER, arrangements={"a": Rearrangement(seqno=1)})
    assert gone_parts(made, None) == []


def test_a_reader_of_the_log_sees_the_same_as_who_wrote_it() -> None:
    log = Log()
    log.commit(schemas={0: {}}, streams=StreamsChanges(names={"a": 0}))
    log.change("a", seqno=1, unsealed={0: unsealed(0, 1, blob("1"))})
    log.change("a", since=4)
    state = None
    for data in log.data:
        state = apply(decode_diff(data), state)
    assert state == log.state


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"unsealed": {1: unsealed(1, 2, blob("1"))}}, id="beyond the stream's seqno"),
        pytest.param({"trace": {0: trace(0, 9)}}, id="a trace beyond the seal"),
        pytest.param(
            {"seqno": 2, "unsealed": {0: unsealed(0, 2, blob("1").replace(key="i/w-other/1.parquet"))}},
            id="a blob of an unregistered writer",
        ),
    ],
)
def test_what_must_not_be_written_is_not(changes: dict[str, Any]) -> None:
    log = Log()
    log.commit(schemas={0: {}}, streams=StreamsChanges(names={"a": 0}))
    with pytest.raises(AssertionError):
        log.change("a", **changes)


@pytest.mark.parametrize(
    "streams",
    [
        Streams(owner="", names={"a": 0}),
        Streams(owner="", names={"a": 0}, arrangements={"a": Arrangement()}, destroyed=frozenset("a")),
        Streams(owner="", names={"a": 0}, arrangements={"a": Arrangement(trace={1: trace(1, 2)}, seal=3)}),
    ],
)
def test_a_damaged_state_is_not_served(streams: Streams) -> None:
    state = Log().state
    assert state is not None
    with pytest.raises(Corruption, match="streams_hold"):
        check_state(state.replace(streams=streams))


def test_the_difference_is_what_was_changed() -> None:
    before = Arrangement(seal=3, seqno=4, unsealed={n: unsealed(n, n + 1, inline(n + 1)) for n in range(4)})
    changes = Rearrangement(
        since=2,
        seqno=5,
        unsealed={2: unsealed(2, 3, inline(99)), 4: unsealed(4, 5, inline())},
        drop_unsealed=(0,),
    )
    after = rearranged(changes, before)
    assert difference(before, after) == changes
    assert rearranged(difference(before, after) or Rearrangement(), before) == after
    assert difference(before, before) is None
    assert difference(before, before.replace(seal=3)) is None
