"""The same work by hand: straight programs with the libraries that we use, and no guarantees.

They are the limit that a library can hope for."""

import base64
import json
import zlib
from collections.abc import Sequence

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
