"""Divides many parts into pieces of about equal size, each of which any process can read.

A piece is a range of rows (`data/part/key_range.py`) and, run by run, the parts that may have some of them.
Inline parts are small: they are read here, and each piece carries its rows of them. The reader of a piece
merges its runs and keeps the rows of its range, so all pieces together have each row once, in sorted order.

The statistics of row groups decide the cuts. They are in the footers of parts: one request for each larger
part, at most `FOOTERS_MAX`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from aiopersist.base.errors import InvalidUpdate, InvalidUsage
from aiopersist.base.frontier import Antichain, minimum
from aiopersist.base.resource import run_bounded
from aiopersist.data.lazy import pa, pc
from aiopersist.data.part.key_range import (
    Block,
    Bound,
    KeyRange,
    Leaf,
    bounds_of,
    condition,
    from_stored,
    leaves,
    overlaps,
    plan_key_ranges,
    to_stored,
)
from aiopersist.data.part.select import apply_where, may_match
from aiopersist.data.types.schema import Schema
from aiopersist.parts.fetch import Fetch, Named, Selection
from aiopersist.parts.put import inline_part
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.shard import Shard
from aiopersist.state.keys import BlobKey
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import HollowPart, Record

FOOTERS_MAX = 1024  # of the largest parts; for others the statistics in the state are enough
BLOCKS_PER_TASK = 16  # finer blocks would not make the pieces more equal

Runs: TypeAlias = Sequence[Sequence[Named]]
"""The parts of each run, in order. The caller groups them, since it may read only some parts of a batch,
whose `runs` describes all."""


class Piece(Record, frozen=True, kw_only=True):
    """One piece of a read. It travels as JSON."""

    schema_id: int
    """The schema of the reader; the range is over its leaf columns."""
    keys: dict[str, Any]
    """The range, in the form of `to_stored`."""
    runs: tuple[HollowBatch, ...]
    """Each batch is one run of parts, in order."""

    def named(self) -> list[list[Named]]:
        """The parts, run by run."""
        return [[(batch, part) for part in batch.parts] for batch in self.runs]


def checked_shard(shard: str, piece: Piece) -> str:
    """`shard`; `InvalidUpdate` if it is no id, or a part of the piece is invalid, or of another shard."""
    for part in (part for batch in piece.runs for part in batch.parts):
        check_part(part)
    try:
        ShardId.parse(shard)
        keys = [part.key for batch in piece.runs for part in batch.parts if part.key is not None]
        others = [key for key in keys if BlobKey.parse(key).shard != shard]
    except InvalidUsage as error:
        raise InvalidUpdate(f"a piece of work cannot be read: {error}") from error
    if others:
        raise InvalidUpdate(f"part {others[0]} of a piece does not belong to shard {shard}")
    return shard


def check_part(part: HollowPart) -> None:
    """`InvalidUpdate` unless these are valid facts of a part. They were transmitted."""
    place = part.key or "within the state"
    if (part.key is None) is (part.inline is None):
        raise InvalidUpdate("a transmitted part has no place, or two")
    if part.size < 0 or not 0 <= part.footer_bytes <= part.size:
        text = f"a transmitted part ({place}) has {part.size} bytes, {part.footer_bytes} of them its index"
        raise InvalidUpdate(text)
    if part.rows < 1 or (part.goodbytes is not None and part.goodbytes < 1):
        raise InvalidUpdate(
            f"a transmitted part ({place}) has {part.rows} rows of {part.goodbytes} goodbytes"
        )


def check_schemas(piece: Piece, shard: Shard) -> None:
    """`InvalidUpdate` unless the shard has the schemas of the piece."""
    needed = {part.schema_id for batch in piece.runs for part in batch.parts} | {piece.schema_id}
    if not needed <= shard.state.schemas.keys():
        raise InvalidUpdate("a piece of work has a schema that the shard does not know")


def piece_condition(piece: Piece, schema: Schema[Any, Any, Any]) -> Any:
    """The condition that is true for the rows of the piece; `None` for all rows. `InvalidUpdate` for a range
    over columns that the schema does not have."""
    order = leaves(schema)
    try:
        return condition(from_stored(piece.keys, order), order)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidUpdate(f"a piece of a read has no range of this shard: {error}") from error


class _Input(NamedTuple):
    """The data to divide: runs of blobs, and the rows of inline parts."""

    fetch: Fetch
    runs: Runs
    inline: "pa.Table"

    @classmethod
    async def of(cls, fetch: Fetch, runs: Runs, selection: Selection, reader: str) -> "_Input":
        inline = [named for run in runs for named in run if named[1].inline is not None]
        rows = await fetch.table(inline, selection, reader)
        in_blobs = [[named for named in run if named[1].inline is None] for run in runs]
        return cls(fetch, [run for run in in_blobs if run], rows)

    @property
    def parts(self) -> list[Named]:
        return [named for run in self.runs for named in run]


async def divide(fetch: Fetch, runs: Runs, selection: Selection, reader: str, tasks: int) -> list[Piece]:
    """About `tasks` pieces, at least one, of the selected updates of the runs. The reader of a piece must use
    the same selection."""
    order = leaves(fetch.schema)
    source = await _Input.of(fetch, runs, selection, reader)
    blocks = await _blocks(source, selection, reader, order, tasks) if tasks > 1 else []
    ranges = plan_key_ranges(blocks, tasks)
    if len(ranges) > 1 and selection.where is not None:
        ranges = await fetch.stack.compute(_matching, ranges, selection.where, order, fetch.schema)
    return await fetch.stack.compute(_pieces, source, ranges, order)


def _matching(
    ranges: list[KeyRange], where: Any, order: list[Leaf], schema: Schema[Any, Any, Any]
) -> list[KeyRange]:
    """The ranges that may have matching rows, at least one. All cuts may lie within the row groups of a few
    matches, and then most ranges contradict the condition."""

    def fact(keys: KeyRange) -> Any:
        columns = order[: len(keys.prefix) + 1]
        is_float = any(pa.types.is_floating(leaf.type) for leaf in columns)  # where may name NaN
        of_range = None if is_float else condition(keys, order)
        return pc.scalar(True) if of_range is None else of_range

    kept = may_match(where, [fact(keys) for keys in ranges], schema)
    return [keys for keys, keep in zip(ranges, kept, strict=True) if keep] or ranges[:1]


async def divide_with(
    fetch: Fetch, runs: Runs, selection: Selection, reader: str, tasks: int, others: Runs
) -> list[tuple[Piece, Piece]]:
    """As `divide`. Each piece comes with a second piece, of the runs `others`, with all rows whose keys may
    be in the first."""
    order = leaves(fetch.schema)
    key_leaves = sum(leaf.path[0] == "key" for leaf in order)
    source = await _Input.of(fetch, runs, selection, reader)
    beside = await _Input.of(fetch, others, Selection(), "")
    blocks = await _blocks(source, selection, reader, order, tasks)
    blocks += await _blocks(beside, Selection(), "", order, tasks)
    ranges = plan_key_ranges(blocks, tasks)
    whole_keys = [r if len(r.prefix) < key_leaves else KeyRange(r.prefix[:key_leaves]) for r in ranges]
    pieces = await fetch.stack.compute(_pieces, source, ranges, order)
    return list(zip(pieces, await fetch.stack.compute(_pieces, beside, whole_keys, order), strict=True))


def _pieces(source: _Input, ranges: list[KeyRange], order: list[Leaf]) -> list[Piece]:
    fetch, runs, inline = source
    bounds = {id(part): bounds_of(part.stats, order) for run in runs for _, part in run}
    pieces = []
    for keys in ranges:
        batches = [_of_range(run, keys, bounds) for run in runs]
        where = condition(keys, order)
        rows = inline if where is None else apply_where(inline, where, fetch.schema)
        batches += [_inline(fetch, rows)] if rows.num_rows else []
        filled = tuple(batch for batch in batches if batch is not None)
        pieces.append(Piece(schema_id=fetch.schema_id, keys=to_stored(keys, order), runs=filled))
    return pieces


def _of_range(
    run: Sequence[Named], keys: KeyRange, bounds: dict[int, tuple[Bound, ...]]
) -> HollowBatch | None:
    """The parts of a run that may have rows of the range, without statistics, which are used up."""
    parts = tuple(
        part.replace(stats=None, key_lower=None) for _, part in run if overlaps(keys, bounds[id(part)])
    )
    return run[0][0].replace(parts=parts, runs=()) if parts else None


def _inline(fetch: Fetch, rows: "pa.Table") -> HollowBatch:
    """Rows as one inline part. Its description neither drops nor advances any time."""
    since = minimum(fetch.schema.time_length)
    part = inline_part(rows.combine_chunks(), fetch.schema_id)
    return HollowBatch(lower=since, upper=Antichain(), since=since, parts=(part,))


async def _blocks(
    source: _Input, selection: Selection, reader: str, order: list[Leaf], tasks: int
) -> list[Block]:
    """Each row group of the larger parts that may match, and each other part as a whole."""
    fetch, parts = source.fetch, source.parts
    total = sum(part.rows for _, part in parts)
    fine = total // (tasks * BLOCKS_PER_TASK)
    row_group = fetch.stack.settings.row_group_bytes
    larger = [p for _, p in parts if p.rows > fine and (p.goodbytes is None or p.goodbytes > row_group)]
    larger.sort(key=lambda part: -part.rows)
    jobs = [partial(_row_groups, fetch, part, selection, reader, order) for part in larger[:FOOTERS_MAX]]
    groups = await run_bounded(fetch.stack.settings.fetch_max_outstanding_parts, jobs)
    blocks = [block for of_part in groups for block in of_part]
    divided = {id(part) for part in larger[:FOOTERS_MAX]}
    rest = [Block(bounds_of(part.stats, order), part.rows) for _, part in parts if id(part) not in divided]
    return blocks + rest


async def _row_groups(
    fetch: Fetch, part: HollowPart, selection: Selection, reader: str, order: list[Leaf]
) -> list[Block]:
    index = await fetch.index(part, reader)
    groups = [index.row_groups[number] for number in await fetch.matching(index, selection)]
    return [Block(bounds_of(group.stats, order), group.rows) for group in groups]
