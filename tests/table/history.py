"""What the calls of a game were told, and the check of it against the updates of the shard.

The updates give the state of each key at each time. The check shares nothing with the library.

- Every version of a key is what one call wrote, and each val comes once.
- A call that was told a time: its val is there at that time, unless a later call of the same client, which
  waited at the same moment, replaced it in the same commit.
- An update has seen the val before its time, or one of its own group.
- A read saw the state at one time. Times can be given to all reads so that they follow real time: not before
  a write or a read that had ended when it began, not after a write that began when it had ended.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

READS = ("get", "get_many")
BOTH = "both"  # the client of a call that two clients make with one id
WRITES = ("put", "put_many", "insert", "update", "delete")


@dataclass(eq=False)
class Op:
    """One call. `time` and `result` are what it was told; `end` is `None` if it was told nothing."""

    id: int
    client: str
    table: str
    kind: str
    keys: tuple[str, ...]
    start: int
    end: int | None = None
    time: int | None = None
    result: Any = None
    old: str | None = None

    def val(self, key: str, old: str | None = None) -> str:
        """The val that this call puts. It says which val an update saw."""
        if self.kind == "update":
            self.old = old
            return f"{self.id}:{key}<{'' if old is None else old.partition('<')[0]}"
        return f"{self.id}:{key}"


@dataclass
class History:
    """See the header."""

    ops: list[Op] = field(default_factory=list)
    _now: int = 0

    def begin(self, client: str, table: str, kind: str, keys: tuple[str, ...]) -> Op:
        self._now += 1
        op = Op(len(self.ops), client, table, kind, keys, self._now)
        self.ops.append(op)
        return op

    def end(self, op: Op) -> None:
        self._now += 1
        op.end = self._now

    def check(self, table: str, updates: Iterable[Any], contents: Iterable[Any]) -> None:
        """Raise `AssertionError` unless all calls on `table` are explained by its updates."""
        ops = [op for op in self.ops if op.table == table]
        versions = _versions(updates)
        assert {key: val for key, val, diff in contents if diff == 1} == _at(versions, 2**63)
        assert all(diff == 1 for _, _, diff in contents)
        written = _check_versions(versions, ops)
        for op in ops:
            if op.end is not None and op.kind in WRITES and op.result != "there":
                _check_write(op, ops, versions, written)
        _check_reads(ops, versions, written)


Versions = dict[str, list[tuple[int, str | None]]]


def _versions(updates: Iterable[Any]) -> Versions:
    """The vals of each key by time; each update fits the one before it."""
    sides: dict[tuple[str, int], dict[int, str]] = {}
    for key, val, time, diff in updates:
        side = sides.setdefault((key, time), {})
        assert diff in (-1, 1), (key, val, time, diff)
        assert diff not in side, ("two vals of a key at a time", key, time)
        side[diff] = val
    versions: Versions = {}
    for (key, time), side in sorted(sides.items(), key=lambda item: item[0][1]):
        found = versions.setdefault(key, [])
        before = found[-1][1] if found else None
        assert side.get(-1) == before, ("a retraction of what is not there", key, time, side, before)
        assert side.get(1) != before, ("a change of nothing", key, time)
        found.append((time, side.get(1)))
    return versions


def _val(versions: Versions, key: str, time: int) -> str | None:
    found = [val for at, val in versions.get(key, ()) if at <= time]
    return found[-1] if found else None


def _at(versions: Versions, time: int) -> dict[str, str]:
    return {key: val for key in versions if (val := _val(versions, key, time)) is not None}


def _check_versions(versions: Versions, ops: list[Op]) -> dict[str, int]:
    """Each val is of one call, and comes once; what an update saw was there. The times of the vals."""
    by_id = {op.id: op for op in ops}
    written: dict[str, int] = {}
    for key, found in versions.items():
        for number, (time, val) in enumerate(found):
            if val is None:
                continue
            name, _, seen = val.partition("<")
            assert name not in written, ("written twice", val, time)
            written[name] = time
            op = by_id[int(name.partition(":")[0])]
            if op.kind == "update":
                before = found[number - 1][1] if number else None
                is_before = seen == ("" if before is None else before.partition("<")[0])
                # Or a call of its group, which wrote no version: told this time, or nothing.
                group = [
                    o
                    for o in ops
                    if _same_client(o, op) and key in o.keys and o.kind in WRITES and o is not op
                ]
                assert is_before or any(_is_seen(o, key, seen) for o in group if _together(o, op)), (
                    "an update of what was not there",
                    val,
                    before,
                )
    return written


def _same_client(one: Op, other: Op) -> bool:
    return one.client == other.client or BOTH in (one.client, other.client)


def _is_seen(op: Op, key: str, seen: str) -> bool:
    return seen == f"{op.id}:{key}" if seen else op.kind == "delete"


def _together(one: Op, other: Op) -> bool:
    """Whether two calls may have waited at the same moment."""
    return (one.end is None or one.end > other.start) and (other.end is None or other.end > one.start)


def _check_write(op: Op, ops: list[Op], versions: Versions, written: dict[str, int]) -> None:
    """It is in at the time that it was told, or a call of the same group replaced it."""
    for key in op.keys:
        name = f"{op.id}:{key}"
        if op.kind != "delete" and name in written:
            assert op.time in (None, written[name]), ("told another time", op, written[name])
            op.time = written[name]
            continue
        if op.kind == "delete" and op.time is not None and _val(versions, key, op.time) is None:
            continue
        replaced = (
            o
            for o in ops
            if o is not op
            and _same_client(o, op)
            and key in o.keys
            and o.kind in WRITES
            and o.result != "there"
            and _together(o, op)
        )
        assert any(replaced), ("acknowledged, and not there", op, versions.get(key))


def _check_reads(ops: list[Op], versions: Versions, written: dict[str, int]) -> None:
    """Give times to reads, the least ones that are possible."""
    moments = sorted({0, *(time for found in versions.values() for time, _ in found)})
    ended: list[tuple[int, int, str]] = [
        (op.end, op.time, op.client)
        for op in ops
        if op.kind in WRITES and op.end is not None and op.time is not None
    ]
    begun = [
        (op.start, written[f"{op.id}:{key}"], op)
        for op in ops
        for key in op.keys
        if f"{op.id}:{key}" in written
    ]
    for end, time, _ in ended:  # writes follow real time, too
        late = [op for start, at, op in begun if start > end and at <= time]
        assert not late, ("written before what had ended", time, late)
    for op in sorted((op for op in ops if op.end is not None), key=lambda op: op.end or 0):
        if op.kind == "as_of" and op.time is not None and op.time > 0:
            assert op.result == {key: _val(versions, key, op.time) for key in op.keys}, ("as of", op)
        if op.kind not in (*READS, "stale") or op.end is None:
            continue
        known = [
            time for end, time, by in ended if end < op.start and (op.kind != "stale" or by == op.client)
        ]
        least = max(known, default=0)
        fitting = (
            max(time, least)
            for time, following in zip(moments, [*moments[1:], 2**63], strict=True)
            if following > least and all(_val(versions, key, time) == op.result[key] for key in op.keys)
        )
        found = next(fitting, None)
        assert found is not None, ("a read of no moment", op, least, versions)
        future = [o for start, time, o in begun if start > op.end and time <= found]
        assert not future, ("a read of what had not begun", op, found, future)
        if op.kind != "stale":
            ended.append((op.end, found, op.client))
