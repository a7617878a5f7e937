"""The same small commits by this library and by peers: `python -m benches.peers`. Bulk is in `test_bulk.py`.

Needs `pip install deltalake lancedb duckdb`. Everything lies in local directories. A commit of ours and of
duckdb is synced to the disk, one of deltalake and lancedb is not. Rows are a key of 16 bytes and a val of 64,
in random order; the figures are medians over rounds in which contenders take turns.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import deltalake
import duckdb
import lancedb
import numpy as np
import pyarrow as pa

import aiopersist as ap

SMALL = 10
COMMITS, ROUNDS = 150, 5
HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


def rows(count: int, seed: int) -> pa.Table:
    """Keys of 16 hexadecimal digits, vals of 64 characters that compress to a fifth."""
    dice = np.random.default_rng(seed)
    keys = HEX[dice.integers(0, 16, (count, 16))].tobytes().decode()
    words = HEX[dice.integers(0, 16, (count, 8))].tobytes().decode()
    return pa.table(
        {
            "key": [keys[at : at + 16] for at in range(0, 16 * count, 16)],
            "val": [words[at : at + 8] * 8 for at in range(0, 8 * count, 8)],
        }
    )


class Contender(Protocol):
    """One collection of rows in a directory of its own."""

    async def append(self, table: pa.Table) -> object: ...
    async def read(self) -> int: ...
    async def as_of(self) -> int: ...


class Ours:
    """A shard on files and SQLite."""

    async def open(self, directory: Path) -> "Ours":
        self.client = await ap.open(directory)
        schema = ap.Schema(key=str, val=str)
        self.writer = await self.client.writer("t", schema)
        self.reader = await self.client.reader("t", schema)
        self.first: int | None = None
        return self

    async def append(self, table: pa.Table) -> None:
        time = await self.writer.write(table)
        self.first = time if self.first is None else self.first

    async def read(self) -> int:
        async with self.reader.snapshot() as snapshot:
            return int((await snapshot.to_arrow()).num_rows)

    async def as_of(self) -> int:
        async with self.reader.snapshot(self.first) as snapshot:
            return int((await snapshot.to_arrow()).num_rows)


class Delta:
    """deltalake, by its table in memory."""

    async def open(self, directory: Path) -> "Delta":
        self.path = str(directory)
        return self

    async def append(self, table: pa.Table) -> None:
        deltalake.write_deltalake(self.path, table, mode="append")

    async def read(self) -> int:
        return int(deltalake.DeltaTable(self.path).to_pyarrow_table().num_rows)

    async def as_of(self) -> int:
        return int(deltalake.DeltaTable(self.path, version=0).to_pyarrow_table().num_rows)


class Lance:
    """lancedb, with a table that stays open."""

    async def open(self, directory: Path) -> "Lance":
        self.database = await lancedb.connect_async(str(directory))
        self.table: Any = None
        return self

    async def append(self, table: pa.Table) -> None:
        if self.table is None:
            self.table = await self.database.create_table("t", table)
        else:
            await self.table.add(table)

    async def read(self) -> int:
        return int((await self.table.query().to_arrow()).num_rows)

    async def as_of(self) -> int:
        await self.table.checkout(1)
        try:
            return await self.read()
        finally:
            await self.table.checkout_latest()


class Duck:
    """duckdb in a file. It has no earlier times."""

    async def open(self, directory: Path) -> "Duck":
        directory.mkdir()
        self.database = duckdb.connect(str(directory / "db"))
        self.database.execute("CREATE TABLE t (key VARCHAR, val VARCHAR)")
        return self

    async def append(self, table: pa.Table) -> None:
        self.database.register("added", table)
        self.database.execute("INSERT INTO t SELECT * FROM added")
        self.database.unregister("added")

    async def read(self) -> int:
        found: Any = self.database.sql("SELECT * FROM t")
        found = found.to_arrow_table()
        return int(found.num_rows)

    async def as_of(self) -> int:
        raise NotImplementedError


CONTENDERS: dict[str, Callable[[], Any]] = {
    "aiopersist": Ours,
    "deltalake": Delta,
    "lancedb": Lance,
    "duckdb": Duck,
}
Figures = dict[str, dict[str, list[float]]]


async def timed(work: Awaitable[object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    await work
    return (time.perf_counter() - began) * 1000


async def small(opened: dict[str, Any], figures: Figures) -> None:
    """Commits of ten rows; what the last tenth takes beside the first; reads of what they left."""
    took: dict[str, list[float]] = {name: [] for name in opened}
    for number in range(COMMITS):
        table = rows(SMALL, number)
        for name, contender in opened.items():
            took[name].append(await timed(contender.append(table)))
    tenth = COMMITS // 10
    for name, contender in opened.items():
        figures[f"commit of {SMALL} rows"].setdefault(name, []).append(statistics.median(took[name]))
        drift = statistics.median(took[name][-tenth:]) / statistics.median(took[name][tenth : 2 * tenth])
        figures["drift"].setdefault(name, []).append(drift)
        figures[f"read after {COMMITS} commits"].setdefault(name, []).append(await timed(contender.read()))
        if name != "duckdb":
            figures["read as of the first commit"].setdefault(name, []).append(await timed(contender.as_of()))


async def main() -> None:
    figures: Figures = {
        name: {}
        for name in (
            f"commit of {SMALL} rows",
            "drift",
            f"read after {COMMITS} commits",
            "read as of the first commit",
        )
    }
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as directory:
            opened = {name: await make().open(Path(directory) / name) for name, make in CONTENDERS.items()}
            await small(opened, figures)
            await opened["aiopersist"].client.aclose()
            opened["duckdb"].database.close()
    print("|" + "|".join(["ms, medians", *CONTENDERS]) + "|")
    for what, found in figures.items():
        cells = [f"{statistics.median(found[name]):.3g}" if name in found else "-" for name in CONTENDERS]
        print("|" + "|".join([what, *cells]) + "|")


if __name__ == "__main__":
    asyncio.run(main())
