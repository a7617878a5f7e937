"""Reads a shard, or an `Indexed`, from end to end, and reports every fault.

- The newest state satisfies the invariants, and follows from its versions and rollups.
- Every rollup and every blob that it names exists, with the named checksum and size; those of tags, too.
- Every part is sorted and consolidated, within itself and along its run. It has the row count of the state.
  Its diffs have the sum that the writer of a blob computed before it encoded them (an inline part has only a
  checksum). Its times lie in the bounds of its batch. If a compaction has advanced times, they may be at or
  past the upper.
- The parts of an unsealed batch of a stream have no order; all other rules hold for them, too. A batch of a
  trace has the number of updates in its description.

It changes nothing; a reader holds the data meanwhile. One row group at a time is in memory.

If a store is unavailable, there is no report, but `StorageUnavailable`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from pydantic import BaseModel

from aiopersist.base.errors import (
    Corruption,
    Error,
    Indeterminate,
    LeaseExpired,
    ShardFinalized,
    StorageUnavailable,
)
from aiopersist.base.progress import progress
from aiopersist.base.supervisor import RELEASE_DEADLINE_S
from aiopersist.data.lazy import pa
from aiopersist.data.updates.consolidate import diff_sum, sort_and_consolidate
from aiopersist.data.updates.order import row_key, row_keys
from aiopersist.data.updates.times import advance, filter_times
from aiopersist.parts.fetch import Fetch, Named
from aiopersist.parts.named_parts import of_trace, of_unsealed
from aiopersist.parts.runs import plan_runs
from aiopersist.read.tagged import read_tag
from aiopersist.shard.log import consensus_key, load, read_rollup
from aiopersist.shard.shard import Shard
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.record import HollowPart
from aiopersist.state.streams import Arrangement, TraceBatch

ROW = ("key", "val", "time")


class FsckReport(BaseModel, frozen=True):
    """The findings of `fsck`."""

    shard_id: str
    """Of a shard, a table or an `Indexed`."""
    problems: list[str]
    """Empty if all data is intact."""
    parts: int
    """Parts that were read."""
    updates: int
    """Updates in them."""

    @property
    def ok(self) -> bool:
        return not self.problems


async def fsck(shard: Shard) -> FsckReport:
    """Check everything. One request for each rollup and row group, two for each part. `LeaseExpired` if the
    process stood still for so long that the data may be gone, `ShardFinalized` if the shard was dropped
    meanwhile, `StorageUnavailable` if a store did not answer."""
    try:
        if await load(shard.stack, shard.id) is not None:
            await shard.open()
    except Corruption as error:
        return FsckReport(shard_id=shard.id, problems=[str(error)], parts=0, updates=0)
    await shard.open()  # `UnknownShard`, `ShardFinalized`
    await shard.hold.acquire()  # the data stays while it is read
    release = shard.register.pin(shard.state.seqno)
    try:
        return await _checked(shard, shard.state)
    finally:
        release()
        await asyncio.wait([shard.hold.release_soon()], timeout=RELEASE_DEADLINE_S)


class _CheckedRun(NamedTuple):
    """Consecutive parts of a batch."""

    place: str
    """The name of the batch for reports."""
    batch: HollowBatch
    """It has the bounds of their times."""
    parts: Sequence[HollowPart]
    is_sorted: bool = True


async def _checked(shard: Shard, state: State) -> FsckReport:
    problems = [problem async for problem in _history(shard, state)]
    runs = [*_runs_of_shard(state), *_runs_of_streams(state)]
    checked = set().union(*map(_ids, runs))
    async for name, contents, faults in _tags(shard, state):
        problems += faults
        kept = () if contents is None else _runs_of_shard(contents, f" of tag {name!r}")
        runs += (new := [run for run in kept if not checked.issuperset(_ids(run))])
        checked.update(*map(_ids, new))
    problems += _wrong_counts(state)
    parts = updates = 0
    with progress("fsck", sum(part.rows for run in runs for part in run.parts), "rows") as step:
        async for part, rows, faults in _parts(shard, runs):
            problems += faults
            if rows is not None:
                parts, updates = parts + 1, updates + rows
            step.advance(part.rows)
    return FsckReport(shard_id=shard.id, problems=problems, parts=parts, updates=updates)


def _ids(run: _CheckedRun) -> set[str]:
    """What its parts are known by: many tags have the same ones."""
    return {part.key or part.checksum for part in run.parts}


def _runs_of_shard(state: State, of: str = "") -> Iterator[_CheckedRun]:
    for ordinal, batch in state.batches.items():
        for run in plan_runs([(batch, part) for part in batch.parts]):
            yield _CheckedRun(f"batch {ordinal}{of}", batch, [part for _, part in run])


async def _tags(shard: Shard, state: State) -> AsyncIterator[tuple[str, State | None, list[str]]]:
    """Every tag, the state that it keeps, if that can be read, and its faults."""
    for name, tag in state.tags.items():
        try:
            contents = (await read_tag(shard, state, name)).contents
        except Corruption as error:
            yield name, None, [f"tag {name!r}: {error}"]
        else:
            is_named = {part.key for part in contents.parts if part.key} == {*tag.parts}
            yield name, contents, [] if is_named else [f"tag {name!r} does not name the parts of its rollup"]


def _arrangements(state: State) -> Mapping[str, Arrangement]:
    return {} if state.streams is None else state.streams.arrangements


def _runs_of_streams(state: State) -> Iterator[_CheckedRun]:
    for name, arrangement in _arrangements(state).items():
        for traced in arrangement.trace.values():
            place = _place(name, traced)
            yield from (_CheckedRun(place, *run) for run in _batches(of_trace([traced])))
        for unsealed in arrangement.unsealed.values():
            place = f"unsealed batch [{unsealed.seqno_lower}, {unsealed.seqno_upper}) of stream {name!r}"
            yield from (
                _CheckedRun(place, *run, is_sorted=False) for run in _batches(of_unsealed([unsealed]))
            )


def _place(name: str, batch: TraceBatch) -> str:
    return f"trace batch [{batch.lower}, {batch.upper}) of stream {name!r}"


def _batches(named: Sequence[Named]) -> list[tuple[HollowBatch, list[HollowPart]]]:
    """The one batch of `named` and its parts, if it has any."""
    return [(named[0][0], [part for _, part in named])] if named else []


def _wrong_counts(state: State) -> Iterator[str]:
    for name, arrangement in _arrangements(state).items():
        for batch in arrangement.trace.values():
            if (rows := sum(part.rows for part in batch.parts)) != batch.updates:
                yield f"{_place(name, batch)} has parts of {rows} updates, but should have {batch.updates}"


async def _parts(
    shard: Shard, runs: Sequence[_CheckedRun]
) -> AsyncIterator[tuple[HollowPart, int | None, list[str]]]:
    """Every part, its row count (`None` if it cannot be read to its end), and its faults."""
    reader = shard.hold.reader
    for run in runs:
        last: Any = None
        for part in run.parts:
            name = f"{part.key or 'an inline part'} of {run.place}"
            try:
                last, rows, faults = await _part(shard, reader, run, part, last)
            except (LeaseExpired, ShardFinalized, StorageUnavailable, Indeterminate):  # cannot be read
                raise
            except Error as error:
                yield part, None, [f"{name}: {error}"]
            else:
                yield part, rows, [f"{name}: {fault}" for fault in faults]


async def _history(shard: Shard, state: State) -> AsyncIterator[str]:
    stack = shard.stack
    first = await stack.consensus.scan(consensus_key(shard.id), 0, 1)
    earliest = first[0].seqno if first else state.seqno
    if earliest and earliest not in state.rollups and earliest not in (await shard.open()).rollups:
        yield f"the earliest version {earliest} has no rollup"
    for seqno, rollup in state.rollups.items():
        if seqno < earliest:  # a collection stopped halfway: the next one removes this name
            continue
        try:
            stored = await read_rollup(stack, rollup.key, rollup.checksum)
        except Corruption as error:
            yield f"rollup {rollup.key}: {error}"
            continue
        if stored is None:
            first = await stack.consensus.scan(consensus_key(shard.id), 0, 1)  # collected meanwhile?
            if first and seqno >= first[0].seqno and seqno in (await shard.open()).rollups:
                yield f"rollup {rollup.key} is named and is missing"
        elif stored.seqno != seqno or stored.shard != state.shard:
            yield f"rollup {rollup.key} is of version {stored.seqno} of {stored.shard}"


async def _part(
    shard: Shard, reader: str, run: _CheckedRun, part: HollowPart, last: Any
) -> tuple[Any, int, list[str]]:
    """The greatest row of the part, if it is sorted, its row count, and its faults; `last` is the greatest
    row of its run before it."""
    schema = shard.schema(part.schema_id)
    fetch = Fetch(shard, schema, cached=False)
    rows, diffs, faults = 0, 0, set[str]()
    async with aclosing(fetch.raw_slabs(part, reader)) as slabs:
        async for table in slabs:
            rows, diffs = rows + table.num_rows, (diffs + diff_sum(table)) % 2**64
            if run.is_sorted:
                faults |= await shard.stack.compute(_faults_of_order, table, last)
                last = row_key(table, -1) if table.num_rows else last
            faults |= await shard.stack.compute(_faults_of_times, table, run.batch, part)
    if rows != part.rows:
        faults.add(f"it has {rows} rows, the state says {part.rows}")
    written = (await fetch.index(part, reader)).diffs if part.key is not None else None
    if written not in (None, diffs):
        faults.add(f"its diffs sum to {diffs} modulo 2**64, not to {written}")
    return last, rows, sorted(faults)


def _faults_of_order(table: "pa.Table", last: Any) -> set[str]:
    faults = set()
    if not _is_consolidated(table):
        faults.add("its rows are not sorted and consolidated")
    if last is not None and table.num_rows and row_key(table, 0) < last:
        faults.add("it does not continue its run")
    return faults


def _is_consolidated(table: "pa.Table") -> bool:
    """Whether its rows are sorted and summed. A sum beyond 64 bits is several rows, made anew each time."""
    sums = sort_and_consolidate(table)
    return sums is table or (
        sums.column("diff").equals(table.column("diff")) and row_keys(sums, ROW) == row_keys(table, ROW)
    )


def _faults_of_times(table: "pa.Table", batch: HollowBatch, part: HollowPart) -> set[str]:
    faults = set()
    if part.rewrite is not None:
        table = advance(table, part.rewrite)
    if part.truncated is not None:
        table = filter_times(table, lower=part.truncated[0], upper=part.truncated[1])
    if filter_times(table, lower=batch.lower).num_rows < table.num_rows:
        faults.add(f"it has times before its lower {batch.lower}")
    is_bounded = batch.since <= batch.lower  # else compaction may have advanced times past the upper
    if is_bounded and filter_times(table, upper=batch.upper).num_rows < table.num_rows:
        faults.add(f"it has times at or beyond its upper {batch.upper}")
    return faults
