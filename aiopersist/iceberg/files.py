"""The Parquet files that a publication writes itself: rows that no part shows, and deleted positions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiopersist.base.errors import Unsupported
from aiopersist.data.lazy import np, pa, pq
from aiopersist.data.part.layout import layout, writable
from aiopersist.data.types.field_ids import FIELD_ID
from aiopersist.data.updates.assemble import column_of, numbers, whole
from aiopersist.iceberg.surplus import ROW, Positions

FILE_PATH_ID, POS_ID = 2147483546, 2147483545  # reserved by Iceberg
COPIES_MAX = 10_000_000  # of rows with a multiplicity: an engine reads each copy
SLICE_ROWS = 65_536

Put = Callable[[bytes, int], Awaitable[None]]
"""Writes a file with so many rows."""


def deletes_file(uri: str, positions: Positions) -> bytes:
    """The file of the deleted positions of one data file."""
    file_path = pa.field("file_path", pa.string(), False, {FIELD_ID: str(FILE_PATH_ID).encode()})
    pos = pa.field("pos", pa.int64(), False, {FIELD_ID: str(POS_ID).encode()})
    paths = pa.repeat(pa.scalar(uri), len(positions))
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table([paths, column_of(positions)], schema=pa.schema([file_path, pos])),
        sink,
        compression="zstd",
        use_dictionary=["file_path"],
        column_encoding={"pos": "DELTA_BINARY_PACKED"},
        store_schema=False,
        write_statistics=False,  # they would have the path six times; its bounds are in the manifest
    )
    data: bytes = sink.getvalue().to_pybytes()
    return data


def rows_file(rows: pa.Table, columns: pa.Schema) -> bytes:
    """A data file with these rows; `columns` have the field ids."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, columns, store_schema=False, **layout(rows)) as writer:
        for table in writable(rows).to_batches(max_chunksize=SLICE_ROWS):
            writer.write_batch(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


@dataclass(eq=False)
class Tail:
    """Gathers the rows that no part shows, and writes them in files of about `target_bytes`."""

    columns: pa.Schema
    """Of the rows, with their field ids."""
    compute: Callable[..., Awaitable[bytes]]
    """Encodes a file on a worker thread."""
    put: Put
    target_bytes: int
    rows: int = 0
    """That were added."""
    _pending: list[pa.Table] = field(default_factory=list)
    _bytes: int = 0

    async def add(self, rows: pa.Table) -> None:
        """Add each of the rows `key`, `val`, `diff` as often as its diff says. `Unsupported` if there are
        more than `COPIES_MAX` in all."""
        counts = numbers(whole(rows.column("diff")))
        self.rows += sum(map(int, counts))
        if self.rows > COPIES_MAX:
            raise Unsupported(
                f"more than {COPIES_MAX:,} copies of rows would be written: diffs are too great"
            )
        copies = np.repeat(np.arange(len(counts)), counts)
        for start in range(0, len(copies), SLICE_ROWS):
            piece = rows.select(ROW).take(column_of(copies[start : start + SLICE_ROWS]))
            self._pending.append(piece)
            self._bytes += piece.nbytes
            if self._bytes >= self.target_bytes:
                await self.flush()

    async def flush(self) -> None:
        """Write what was gathered."""
        if not self._pending:
            return
        table, self._pending, self._bytes = pa.concat_tables(self._pending), [], 0
        await self.put(await self.compute(rows_file, table, self.columns), table.num_rows)
