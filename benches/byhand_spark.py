"""The same work by hand on Spark: `mapInArrow` tasks of key ranges over sorted Parquet files, with polars,
and without guarantees. Plain functions: they run in Spark's workers, which have this folder on no path, so
they travel whole.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

ROW_GROUP = 87_000  # of 96 bytes: 8 MiB
Batches = Iterable[pa.RecordBatch]


def ranges(paths: Sequence[str], tasks: int) -> list[tuple[bytes | None, bytes | None]]:
    """Key ranges of equal size, from the statistics of row groups."""
    import pyarrow.parquet as pq

    lows = []
    for path in paths:
        metadata = pq.read_metadata(path)
        lows += [metadata.row_group(n).column(0).statistics.min for n in range(metadata.num_row_groups)]
    lows.sort()
    cuts = [lows[len(lows) * n // tasks] for n in range(1, tasks)]
    return list(zip([None, *cuts], [*cuts, None], strict=True))


def snapshot(paths: Sequence[str], tasks: int) -> tuple[int, Callable[[Batches], Iterator[pa.RecordBatch]]]:
    """Tasks that read a range of all files, and sum it."""
    cut = ranges(paths, tasks)

    def read(lower: Any, upper: Any) -> Any:
        import polars as pl
        import pyarrow.parquet as pq

        tables = []
        for path in paths:
            file = pq.ParquetFile(path)
            found = [
                n
                for n in range(file.num_row_groups)
                if (upper is None or file.metadata.row_group(n).column(0).statistics.min < upper)
                and (lower is None or file.metadata.row_group(n).column(0).statistics.max >= lower)
            ]
            frame = pl.from_arrow(file.read_row_groups(found, use_threads=False))
            if lower is not None:
                frame = frame.filter(pl.col("key") >= lower)
            tables.append(frame if upper is None else frame.filter(pl.col("key") < upper))
        frame = pl.concat(tables).sort("key", "val")
        first = (
            frame.select((pl.col("key") != pl.col("key").shift()) | (pl.col("val") != pl.col("val").shift()))
            .to_series()
            .fill_null(True)
        )
        if first.all():
            return frame.filter(pl.col("diff") != 0)
        sums = (
            frame.with_columns(row=first.cum_sum())
            .group_by("row", maintain_order=True)
            .agg(pl.col("diff").sum())["diff"]
        )
        return frame.filter(first).with_columns(diff=sums).filter(pl.col("diff") != 0)

    def work(batches: Batches) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                table = read(*cut[number]).select("key", "val").to_arrow()
                table = table.cast(pa.schema([("key", pa.binary()), ("val", pa.binary())]))
                yield from table.to_batches(max_chunksize=65_536)

    return len(cut), work


def compaction(
    paths: Sequence[str], folder: str, tasks: int
) -> tuple[int, Callable[[Batches], Iterator[pa.RecordBatch]]]:
    """Tasks that read a range of all files, merge it and write a file; only their names cross the JVM."""
    cut, (_, rows) = ranges(paths, tasks), snapshot(paths, tasks)

    def work(batches: Batches) -> Iterator[pa.RecordBatch]:
        import os
        import uuid

        import pyarrow.parquet as pq

        for batch in batches:
            for number in batch.column(0).to_pylist():
                one = pa.record_batch([pa.array([number])], ["id"])
                name = f"{folder}/{number:03}-{uuid.uuid4().hex}.parquet"
                found = pa.Table.from_batches(rows([one]))
                size = found.num_rows
                found = found.append_column("time", pa.repeat(0, size))
                found = found.append_column("diff", pa.repeat(1, size))
                pq.write_table(found, name, row_group_size=ROW_GROUP, compression="zstd")
                with open(name, "rb") as file:
                    os.fsync(file.fileno())
                yield pa.record_batch([pa.array([name.encode()], pa.binary())], ["result"])

    return len(cut), work


def write(folder: str) -> Callable[[Batches], Iterator[pa.RecordBatch]]:
    """Tasks that sort what comes and write a file."""

    def work(batches: Batches) -> Iterator[pa.RecordBatch]:
        import os
        import uuid

        import polars as pl
        import pyarrow.parquet as pq

        frame = pl.concat([pl.from_arrow(batch) for batch in batches]).sort("key", "val")
        name = f"{folder}/{uuid.uuid4().hex}.parquet"
        pq.write_table(frame.to_arrow(), name, row_group_size=ROW_GROUP, compression="zstd")
        with open(name, "rb") as file:
            os.fsync(file.fileno())
        yield pa.record_batch([pa.array([name.encode()], pa.binary())], ["result"])

    return work
