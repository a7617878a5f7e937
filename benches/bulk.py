"""One process of `test_bulk.py`: it does one thing to many rows, with the library, by hand, or with a peer,
once with few rows to be warm, then as a measurement, and prints what that took as JSON.

python -m benches.bulk WHO WHAT FOLDER ROWS
"""

import asyncio
import json
import os
import resource
import sqlite3
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import aiopersist as ap
from benches import byhand
from benches.road import at_rest

SCHEMA = ap.Schema(key=bytes, val=bytes)
WHATS = ("append", "read", "read compacted", "range", "compact")
RUNS = 8  # of a compaction
SHARE = 100  # a range is one of so many


class Contender(ABC):
    """A table in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    async def append(self, rows: pa.Table) -> None: ...

    @abstractmethod
    async def read(self) -> int:
        """All rows; how many there are."""

    async def range(self, first: bytes, last: bytes) -> int:
        """The rows with keys from the one to the other."""
        raise NotImplementedError

    async def compact(self) -> None:
        """Put all into one run."""
        raise NotImplementedError

    async def aclose(self) -> None:  # noqa: B027  # most hold nothing
        pass


class Ours(Contender):
    async def _opened(self) -> Any:
        if not hasattr(self, "_client"):
            settings = ap.Settings(blob_cache_bytes=0)
            self._client = await ap.open(self.folder, maintenance=False, settings=settings)
            self._writer = await self._client.writer("shard", SCHEMA)
            self._reader = await self._client.reader("shard", SCHEMA)
        return self._writer, self._reader

    async def append(self, rows: pa.Table) -> None:
        writer, _ = await self._opened()
        time = rows.column("time")[0].as_py()
        await writer.compare_and_append(rows, time, time + 1)

    async def read(self) -> int:
        _, reader = await self._opened()
        async with reader.snapshot() as snapshot:
            return (await snapshot.to_arrow()).num_rows

    async def range(self, first: bytes, last: bytes) -> int:
        _, reader = await self._opened()
        async with reader.snapshot() as snapshot:
            found = await snapshot.to_arrow((pc.field("key") >= first) & (pc.field("key") < last))
            return int(found.num_rows)

    async def compact(self) -> None:
        await self._opened()
        await self._client.admin.force_compaction("shard")

    async def aclose(self) -> None:
        await self._client.aclose()


class ByHand(Contender):
    """Sort, sums at boundaries, Parquet, one synced row that names the files."""

    def _commit(self, table: pa.Table, instead: bool = False) -> None:
        db = sqlite3.connect(self.folder / "log.db", isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("CREATE TABLE IF NOT EXISTS log (name TEXT)")
        path = self.folder / f"{time.time_ns()}.parquet"
        pq.write_table(table, path, compression="zstd", compression_level=1, row_group_size=100_000)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        db.execute("BEGIN IMMEDIATE")
        if instead:
            db.execute("DELETE FROM log")
        db.execute("INSERT INTO log VALUES (?)", (str(path),))
        db.execute("COMMIT")
        db.close()

    def _files(self) -> list[str]:
        db = sqlite3.connect(self.folder / "log.db")
        found = [name for (name,) in db.execute("SELECT name FROM log")]
        db.close()
        return found

    async def append(self, rows: pa.Table) -> None:
        self._commit(byhand.consolidate(rows))

    async def read(self) -> int:
        files = self._files()
        if len(files) == 1:
            return pl.read_parquet(files[0]).to_arrow().num_rows
        return byhand.consolidate(pl.concat(map(pl.read_parquet, files)).to_arrow()).num_rows

    async def range(self, first: bytes, last: bytes) -> int:
        found = [pq.read_table(f, filters=[("key", ">=", first), ("key", "<", last)]) for f in self._files()]
        return byhand.consolidate(pa.concat_tables(found)).num_rows

    async def compact(self) -> None:
        self._commit(
            byhand.consolidate(pl.concat(map(pl.read_parquet, self._files())).to_arrow()), instead=True
        )


class Duckdb(Contender):
    """Over the files that are written by hand."""

    def _ask(self, sql: str, *given: Any) -> int:
        import duckdb

        return int(duckdb.execute(sql, [str(self.folder / "*.parquet"), *given]).to_arrow_table().num_rows)

    async def append(self, rows: pa.Table) -> None:
        await ByHand(self.folder).append(rows)

    async def read(self) -> int:
        return self._ask("SELECT key, val, sum(diff) FROM read_parquet(?) GROUP BY 1, 2")

    async def range(self, first: bytes, last: bytes) -> int:
        sql = "SELECT key, val, sum(diff) FROM read_parquet(?) WHERE key >= ? AND key < ? GROUP BY 1, 2"
        return self._ask(sql, first, last)


class Deltalake(Contender):
    """Neither sorted nor summed."""

    async def append(self, rows: pa.Table) -> None:
        from deltalake import write_deltalake

        write_deltalake(str(self.folder / "delta"), rows, mode="append")

    async def read(self) -> int:
        from deltalake import DeltaTable

        return int(DeltaTable(str(self.folder / "delta")).to_pyarrow_table().num_rows)

    async def compact(self) -> None:
        from deltalake import DeltaTable

        DeltaTable(str(self.folder / "delta")).optimize.compact()


class Pyiceberg(Contender):
    """Neither sorted nor summed."""

    def _table(self, schema: Any = None) -> Any:
        from pyiceberg.catalog.sql import SqlCatalog

        where = {"uri": f"sqlite:///{self.folder}/catalog.db", "warehouse": f"file://{self.folder}"}
        catalog = SqlCatalog("bench", **where)
        catalog.create_namespace_if_not_exists("n")
        return catalog.create_table_if_not_exists("n.t", schema or byhand.SCHEMA)

    async def append(self, rows: pa.Table) -> None:
        self._table().append(rows)

    async def read(self) -> int:
        return int(self._table().scan().to_arrow().num_rows)


CONTENDERS = {
    "ours": Ours,
    "by hand": ByHand,
    "duckdb": Duckdb,
    "deltalake": Deltalake,
    "pyiceberg": Pyiceberg,
}


def _rss_bytes(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return 1024 * int(line.split()[1])
    return 0


async def _done(who: str, what: str, folder: Path, rows: int) -> dict[str, Any]:
    """What doing it to a new table of so many rows took."""
    folder.mkdir(parents=True)
    contender, table = CONTENDERS[who](folder), byhand.large_table(rows * 96)
    key = lambda n: b"%016d" % (n * 10**14)  # noqa: E731  # keys are 16 digits, evenly spread
    if what == "compact":
        for at in range(RUNS):
            await contender.append(byhand.at(table.take(pa.array(range(at, rows, RUNS))), at))
    elif what != "append":
        await contender.append(table)
    if what == "read compacted":
        await contender.compact()
    if what != "append":
        del table
    pa.default_memory_pool().release_unused()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory begins anew
    memory, cpu, began = _rss_bytes("VmRSS"), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    if what == "append":
        found = rows
        await contender.append(table)
    elif what == "compact":
        found = rows
        await contender.compact()
    elif what == "range":
        found = SHARE * await contender.range(key(50), key(51))
    else:
        found = await contender.read()
    seconds, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    assert abs(found - rows) <= (0.3 * rows if what == "range" else 0), (who, what, found)
    await contender.aclose()
    cpu_s = now.ru_utime + now.ru_stime - cpu.ru_utime - cpu.ru_stime
    return {"seconds": seconds, "cpu_s": cpu_s, "grew": _rss_bytes("VmHWM") - memory}


async def main(who: str, what: str, folder: str, rows: str) -> None:
    await _done(who, what, Path(folder) / "warm", 10_000)
    await at_rest()
    print(json.dumps(await _done(who, what, Path(folder) / "measured", int(rows))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
