"""The same work by hand: plain programs with the libraries that we use, and no guarantees.

They are the limit that a library can hope for."""

import asyncio
import base64
import json
import sqlite3
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary(), False),
        pa.field("val", pa.binary(), False),
        pa.field("time", pa.int64(), False),
        pa.field("diff", pa.int64(), False),
    ]
)
Row = tuple[bytes, bytes, int, int]


def rows(n: int, time: int, start: int = 0) -> list[Row]:
    """`n` updates of 16 bytes of key and 64 of val, in no order, compressible to about a fifth."""
    return [
        (zlib.crc32(b"%d" % i).to_bytes(16, "big"), (b"%016d" % (i % 997)) * 4, time, 1)
        for i in range(start, start + n)
    ]


def table(n: int, time: int = 0) -> pa.Table:
    """The same as Arrow columns."""
    return pa.table(list(map(list, zip(*rows(n, time), strict=True))), schema=SCHEMA)


def large_table(goodbytes: int, time: int = 0) -> pa.Table:
    """Rows of the same kind, made in columns: `goodbytes` bytes of them."""
    n = pl.int_range(goodbytes // 96, eager=True).alias("n")
    number = (pl.col("n") % 997).cast(pl.String).str.zfill(16)
    frame = pl.DataFrame(n).select(
        key=(pl.col("n").hash(1) % 10**16).cast(pl.String).str.zfill(16).cast(pl.Binary),
        val=pl.concat_str([number] * 4).cast(pl.Binary),
        time=pl.lit(time, pl.Int64),
        diff=pl.lit(1, pl.Int64),
    )
    return frame.to_arrow().cast(SCHEMA)


def at(updates: pa.Table, time: int) -> pa.Table:
    """The same at that time."""
    return updates.set_column(
        2, SCHEMA.field(2), pa.array([time]).take(pa.nulls(len(updates), pa.int64()).fill_null(0))
    )


def record(updates: Sequence[Row]) -> bytes:
    """A few updates, sorted and encoded, as one record for a compare-and-set."""
    columns = zip(*sorted(updates), strict=True)
    arrays = [pa.array(c, t) for c, t in zip(columns, SCHEMA.types, strict=True)]
    data = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA).serialize().to_pybytes()
    return json.dumps({"len": len(updates), "data": base64.b64encode(data).decode()}).encode()


def consolidate(updates: pa.Table) -> pa.Table:
    """Sort, then sum equal neighbours at their boundaries."""
    keys = ["key", "val", "time"]
    frame = pl.from_arrow(updates).sort(keys)
    first = pl.any_horizontal(*(pl.col(k).ne_missing(pl.col(k).shift()) for k in keys)).fill_null(True)
    starts = frame.select(first.alias("first"))["first"].to_numpy().nonzero()[0]
    import numpy as np

    sums = np.add.reduceat(frame["diff"].to_numpy(), starts)
    frame = frame[starts].with_columns(pl.Series("diff", sums))
    return frame.filter(pl.col("diff") != 0).to_arrow().cast(SCHEMA)


def part(updates: pa.Table) -> bytes:
    """Parquet, zstd."""
    sink = pa.BufferOutputStream()
    pq.write_table(updates, sink, compression="zstd", compression_level=1)
    return sink.getvalue().to_pybytes()


def read(parts: Sequence[bytes]) -> pl.DataFrame:
    """The contents: read Parquet with polars, sum."""
    frames = [pl.read_parquet(data) for data in parts]
    return pl.concat(frames).group_by("key", "val").agg(pl.col("diff").sum()).sort("key", "val")


class Records(Protocol):
    """One record after the other under compare-and-set, with nothing but the driver."""

    async def put(self, seqno: int, data: bytes) -> None: ...
    async def aclose(self) -> None: ...


class MemoryRecords:
    def __init__(self) -> None:
        self._log: list[bytes] = []

    async def put(self, seqno: int, data: bytes) -> None:
        assert len(self._log) == seqno
        self._log.append(data)

    async def aclose(self) -> None: ...


class SqliteRecords:
    """WAL, synchronous=FULL, one transaction each, on a thread."""

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._path = path
        self._db: sqlite3.Connection | None = None

    async def put(self, seqno: int, data: bytes) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._put, seqno, data)

    async def aclose(self) -> None:
        if self._db is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    def _put(self, seqno: int, data: bytes) -> None:
        if self._db is None:
            self._db = sqlite3.connect(self._path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("CREATE TABLE log (seqno INTEGER PRIMARY KEY, data BLOB NOT NULL)")
        self._db.execute("BEGIN IMMEDIATE")
        put = "INSERT INTO log SELECT ?, ? WHERE ? = (SELECT coalesce(max(seqno) + 1, 0) FROM log)"
        assert self._db.execute(put, (seqno, data, seqno)).rowcount == 1
        self._db.execute("COMMIT")


class PostgresRecords:
    """One prepared statement each, on one connection."""

    PUT = """
        WITH moved AS (UPDATE {0}.head SET seqno = seqno + 1 WHERE seqno = $1 - 1 RETURNING seqno)
        INSERT INTO {0}.log SELECT seqno, $2 FROM moved"""

    def __init__(self, url: str, schema: str) -> None:
        parts = urlsplit(url)
        self._dsn = f"postgresql://{parts.netloc}{parts.path}"
        self._schema = schema
        self._db: Any = None

    async def put(self, seqno: int, data: bytes) -> None:
        if self._db is None:
            await self.connect()
        assert await self._db.execute(self._put, seqno, data) == "INSERT 0 1"

    async def aclose(self) -> None:
        if self._db is not None:
            await self._db.close()

    async def connect(self) -> None:
        """Connect, and make the tables."""
        import asyncpg

        self._db = await asyncpg.connect(self._dsn)
        await self._db.execute(
            f"CREATE SCHEMA {self._schema};"
            f"CREATE TABLE {self._schema}.head (seqno bigint NOT NULL);"
            f"INSERT INTO {self._schema}.head VALUES (-1);"
            f"CREATE TABLE {self._schema}.log (seqno bigint PRIMARY KEY, data bytea NOT NULL)"
        )
        self._put = self.PUT.format(self._schema)
