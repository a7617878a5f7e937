"""Parts: sorted, consolidated updates as one Parquet file, with checksums of all bytes.

A part is written once and read by ranges, so every range is checked by itself, in a chain:

1. The state holds the size of the part and a checksum of its *footer*: the last `footer_bytes` bytes,
   all bytes after the last row group.
2. The footer holds, in the key-value metadata of Parquet, the *index*: for each row group its range
   of bytes, their CRC-32, its rows and statistics. The first range begins at byte 0, so the ranges and
   the footer cover every byte of the file.

So every damaged byte is noticed, and also another valid part in place of this one: its footer has another
checksum, since the footer holds the checksums of the row groups. Any Parquet reader can open a part.

The metadata also holds the format version and the description at the time of writing: lower, since, and an
empty upper. The bounds in the state decide.
"""

from __future__ import annotations

from binascii import crc32
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from json import dumps, loads
from typing import Any, NamedTuple, Protocol

from aiopersist.base.errors import Corruption, Unsupported
from aiopersist.base.frontier import Antichain, Description
from aiopersist.base.settings import UntrimmableColumns
from aiopersist.data.arrays import empty_table
from aiopersist.data.lazy import pa, pq
from aiopersist.data.part.inline import checksum
from aiopersist.data.part.layout import layout, writable
from aiopersist.data.part.ranges import Ranges
from aiopersist.data.part.stats import Record, collect, if_computable, key_lower, merge, trim
from aiopersist.data.part.wanted_keys import WantedKeys
from aiopersist.data.refusal import Refusal
from aiopersist.data.types.cast import retyped
from aiopersist.data.types.field_ids import with_field_ids
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.consolidate import diff_sum
from aiopersist.data.updates.sizes import cut, goodbytes

FORMAT = 1
THREADS_FROM_BYTES = 1024 * 1024  # encoded; decoding less is faster than reaching Arrow's threads
INDEX = b"aiopersist"  # the key of the index in the file's metadata


class PartRef(Protocol):
    """The facts in the state that check the bytes of a part."""

    @property
    def size(self) -> int: ...
    @property
    def footer_bytes(self) -> int: ...
    @property
    def checksum(self) -> str: ...


class EncodedPart(NamedTuple):
    """The bytes of a part, and the facts that the state keeps of it."""

    data: memoryview
    size: int
    footer_bytes: int
    checksum: str
    rows: int
    goodbytes: int
    row_groups: int
    key_lower: Any
    """JSON; `decode_key_lower` gives the value."""
    stats: Record | None
    """JSON; `decode_stats` gives the values."""


class RowGroup(NamedTuple):
    """The range of a row group in the file, the checksum of its bytes, its rows and statistics."""

    offset: int
    length: int
    rows: int
    crc32: int
    stats: Record


class PartIndex(NamedTuple):
    """The contents of a part's footer."""

    size: int
    rows: int
    row_groups: tuple[RowGroup, ...]
    lower: Antichain
    since: Antichain
    diffs: int | None
    """The sum of the diffs that were given to the writer, modulo 2**64; earlier versions did not keep it."""
    footer: bytes
    metadata: Any
    """Parquet's own metadata, parsed."""


class StatsSpec(NamedTuple):
    """Which statistics a part carries; see `Settings`."""

    enabled: bool = True
    budget_bytes: int = 1024
    untrimmable: UntrimmableColumns = UntrimmableColumns()


DEFAULT_STATS = StatsSpec()


class PartWriter:
    """Writes a part row group by row group, encoded in memory."""

    def __init__(
        self,
        schema: Schema[Any, Any, Any],
        description: Description,
        stats: StatsSpec = DEFAULT_STATS,
        columns: pa.Schema | None = None,
    ) -> None:
        """`columns` is `schema` with field ids; by default those of a shard without other schemas."""
        self.rows = 0
        self._goodbytes = 0
        self.diffs = 0
        """Their sum modulo 2**64."""
        self._schema = schema
        self._columns = with_field_ids([schema.arrow_schema]) if columns is None else columns
        self._description = description
        self._stats = stats
        self._sink = _Sink()
        self._groups: list[RowGroup] = []
        self._writer: Any = None
        self._key_lower: Any = None

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._sink.tell()

    def whole(self, table: pa.Table, row_group_bytes: int) -> EncodedPart:
        """The sorted, consolidated updates (at least one) as a part, in row groups of at most
        `row_group_bytes` goodbytes, or of one larger row."""
        row_groups = cut(table, row_group_bytes)
        del table  # `row_groups` releases the chunks that are written: their memory shrinks as the part grows
        for row_group in row_groups:
            self.write(row_group)
        return self.finish()

    def write(self, table: pa.Table) -> None:
        """Write the next row group: sorted, consolidated updates, at least one, above all updates before."""
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._sink, self._columns, **layout(table))
            self._key_lower = if_computable(lambda: key_lower(table))
        stats = if_computable(lambda: collect(table)) if self._stats.enabled else None
        self._writer.write_table(writable(table), row_group_size=table.num_rows)
        offset = self._groups[-1].offset + self._groups[-1].length if self._groups else 0
        length = self._sink.tell() - offset
        self._groups.append(RowGroup(offset, length, table.num_rows, self._sink.take_crc(), stats or {}))
        self.rows += table.num_rows
        self._goodbytes += goodbytes(table)
        self.diffs = (self.diffs + diff_sum(table)) % 2**64

    def finish(self) -> EncodedPart:
        """Write the footer, and return the part."""
        groups, groups_end = self._groups, self._sink.tell()
        index = _index(groups, self._description, self.diffs, self._stats)
        self._writer.add_key_value_metadata({INDEX: index})
        self._writer.close()
        data = self._sink.data()
        return EncodedPart(
            data=data,
            size=len(data),
            footer_bytes=len(data) - groups_end,
            checksum=checksum(data[groups_end:]),
            rows=self.rows,
            goodbytes=self._goodbytes,
            row_groups=len(groups),
            key_lower=self._key_lower,
            stats=self._part_stats(),
        )

    def _part_stats(self) -> Record | None:
        if not all(group.stats for group in self._groups):
            return None
        whole = if_computable(lambda: merge([group.stats for group in self._groups], self._schema))
        return whole and trim(whole, self._stats.budget_bytes, self._stats.untrimmable)


def read_footer(footer: bytes, ref: PartRef) -> PartIndex:
    """The index, from the last `ref.footer_bytes` bytes of the part. `Corruption` for other bytes."""
    if len(footer) != ref.footer_bytes or checksum(footer) != ref.checksum:
        raise Corruption("the footer of a part does not have its checksum")
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        index = loads(metadata.metadata[INDEX])
        if index["format"] != FORMAT:
            raise Unsupported(f"a part of format {index['format']}; this version reads {FORMAT}")
        groups = tuple(RowGroup(*group) for group in index["row_groups"])
        lower, since = (_frontier(index[name]) for name in ("lower", "since"))
        diffs = index.get("diffs")
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, RecursionError) as e:
        raise Corruption(f"the footer of a part cannot be read: {e}") from e
    rows = sum(group.rows for group in groups)
    return PartIndex(ref.size, rows, groups, lower, since, diffs, footer, metadata)


def read_row_groups(
    index: PartIndex,
    fetched: Iterable[tuple[int, bytes]],
    row_groups: Iterable[int],
    schema: Schema[Any, Any, Any],
) -> pa.Table:
    """The rows of some row groups, in order, from ranges of bytes `(offset, data)` that cover them
    (`plan_ranges`). `schema` is the part's. `Corruption` unless all bytes are the written ones."""
    chosen = list(row_groups)
    ranges = Ranges([*fetched, (index.size - len(index.footer), index.footer)], index.size)
    _check(index, ranges, chosen)
    large = sum(index.row_groups[number].length for number in chosen) > THREADS_FROM_BYTES
    with _reading(schema):
        file = pq.ParquetFile(ranges.file(), metadata=index.metadata, pre_buffer=False)
        try:
            table = file.read_row_groups(chosen, use_threads=large)
        except pa.ArrowNotImplementedError:  # 2 GiB of text in lists or structs, which one array cannot hold
            table = pa.concat_tables(file.read_row_group(number) for number in chosen)
        return as_stored(table, schema.arrow_schema)


def read_rows(
    index: PartIndex,
    fetched: tuple[int, bytes],
    row_groups: list[int],
    schema: Schema[Any, Any, Any],
    keys_sought: WantedKeys,
) -> pa.Table:
    """The rows of some row groups that have one of the keys. The column of keys is decoded first; the other
    columns are decoded only up to the last match."""
    ranges = Ranges([fetched, (index.size - len(index.footer), index.footer)], index.size)
    _check(index, ranges, row_groups)
    arrow = schema.arrow_schema
    of_key, of_others = pa.schema([arrow.field("key")]), arrow.remove(arrow.get_field_index("key"))
    with _reading(schema):
        file = pq.ParquetFile(ranges.sequential_file(), metadata=index.metadata, pre_buffer=False)
        keys = as_stored(file.read_row_groups(row_groups, columns=["key"], use_threads=False), of_key)
        rows = keys_sought.rows(keys.column("key"))
        if not rows:
            return empty_table(arrow)
        options = {"row_groups": row_groups, "columns": of_others.names, "use_threads": False}
        batches = file.iter_batches(batch_size=rows.stop, **options)
        others = as_stored(_within(batches, rows), of_others)
    return keys_sought.of(pa.table([keys.column("key").slice(rows.start, len(rows)), *others.columns], arrow))


def _within(batches: Iterable[pa.RecordBatch], rows: range) -> pa.Table:
    """The rows of this range in a sequence of batches. Takes no batch after the range."""
    slices, first = [], 0
    for batch in batches:
        start, end = max(rows.start - first, 0), min(rows.stop - first, batch.num_rows)
        if start < end:
            slices.append(batch.slice(start, end - start))
        first += batch.num_rows
        if first >= rows.stop:
            break
    return pa.Table.from_batches(slices)


def iter_row_groups(
    index: PartIndex,
    fetched: tuple[int, bytes],
    row_groups: list[int],
    schema: Schema[Any, Any, Any],
    rows_max: int,
) -> Iterator[pa.Table]:
    """The rows of some row groups, in order, from bytes that cover them, in tables of at most `rows_max`
    rows of one row group: use it where rows may be large. Memory holds a page of each column and one table.
    `Corruption` unless all bytes are the written ones."""
    ranges = Ranges([fetched, (index.size - len(index.footer), index.footer)], index.size)
    _check(index, ranges, row_groups)
    with _reading(schema):
        file = pq.ParquetFile(ranges.sequential_file(), metadata=index.metadata, pre_buffer=False)
        for number in row_groups:
            for batch in file.iter_batches(batch_size=rows_max, row_groups=[number], use_threads=False):
                yield as_stored(pa.Table.from_batches([batch]), schema.arrow_schema)


def checked(index: PartIndex, offset: int, data: bytes, row_groups: Iterable[int]) -> bytes:
    """`data` itself if it holds these row groups of the part; else `Corruption`."""
    _check(index, Ranges([(offset, data)], index.size), row_groups)
    return data


def _check(index: PartIndex, ranges: Ranges, row_groups: Iterable[int]) -> None:
    for number in row_groups:
        group = index.row_groups[number]
        data = ranges.view(group.offset, group.length)
        if data is None or crc32(data) != group.crc32:
            raise Corruption(f"row group {number} of a part does not have its checksum")


def read_index(data: bytes, ref: PartRef) -> PartIndex:
    """The index of a part, from all its bytes. `Corruption` unless their number and the footer are right."""
    if len(data) != ref.size:
        raise Corruption(f"a part has {len(data)} bytes, and {ref.size} were written")
    return read_footer(data[len(data) - ref.footer_bytes :], ref)


def decode_part(data: bytes, ref: PartRef, schema: Schema[Any, Any, Any]) -> pa.Table:
    """All rows of a part. `schema` is the part's. `Corruption` unless all bytes are the written ones."""
    index = read_index(data, ref)
    return read_row_groups(index, [(0, data)], range(len(index.row_groups)), schema)


def plan_ranges(
    index: PartIndex, row_groups: Iterable[int], *, gap_bytes: int, range_bytes_max: int
) -> list[tuple[int, int]]:
    """The ranges `(offset, length)` to fetch for some row groups: neighbours at most `gap_bytes` apart
    share a range, up to `range_bytes_max`."""
    plan: list[tuple[int, int]] = []
    for number in sorted(set(row_groups)):
        group = index.row_groups[number]
        end = group.offset + group.length
        if plan:
            offset, length = plan[-1]
            near = group.offset - (offset + length) <= gap_bytes
            if near and end - offset <= range_bytes_max:
                plan[-1] = (offset, end - offset)
                continue
        plan.append((group.offset, group.length))
    return plan


class _Sink:
    """The file being written, with a CRC-32 per row group. A file object, since Arrow's own buffers cannot be
    read before they are closed."""

    closed = False
    mode = "wb"

    def __init__(self) -> None:
        self._data = bytearray()
        self._crc = 0

    def write(self, chunk: Any) -> int:
        self._data += chunk
        self._crc = crc32(chunk, self._crc)
        return len(chunk)

    def take_crc(self) -> int:
        """The CRC-32 of the bytes since the last call."""
        crc, self._crc = self._crc, 0
        return crc

    def tell(self) -> int:
        return len(self._data)

    def data(self) -> memoryview:
        return memoryview(self._data)

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def _index(groups: list[RowGroup], description: Description, diffs: int, stats: StatsSpec) -> str:
    trimmed = [g._replace(stats=trim(g.stats, stats.budget_bytes, stats.untrimmable)) for g in groups]
    frontiers = {"lower": description.lower.elements, "upper": [], "since": description.since.elements}
    index = {"format": FORMAT, **frontiers, "diffs": diffs, "row_groups": trimmed}
    return dumps(index, separators=(",", ":"))


def _frontier(elements: list[Any]) -> Antichain:
    return Antichain(*(tuple(e) if isinstance(e, list) else e for e in elements))


def as_stored(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table in the types that were written, without field ids: Parquet has no seconds. Arrow's cast of a
    table is not used: it makes unsound lists of nulls."""
    if table.schema.equals(schema, check_metadata=True):
        return table
    columns = [retyped(table.column(field.name), field.type) for field in schema]
    return pa.table(columns, schema)


@contextmanager
def _reading(schema: Schema[Any, Any, Any]) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, Refusal, OSError, KeyError, ValueError) as e:
        raise Corruption(f"a part cannot be read as {schema!r}: {e}") from e
