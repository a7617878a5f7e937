"""A shard that takes many small commits: the cost of each as they become many, the bytes written again,
the bytes left; the speed and memory of a large compaction; the time in which a new process reads the
shard."""

import asyncio
import base64
import json
import math
import os
import random
import sqlite3
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import aiopersist as ap
from aiopersist.state.compaction import INLINE_WEIGHTS
from benches import byhand
from benches.conftest import report

SCHEMA = ap.Schema(key=bytes, val=bytes)
MIB = 2**20
KEYS = 20_000
KEPT = 1000  # times


def child(what: str, *args: object) -> dict[str, Any]:
    """What `benches/maintenance_child.py` says, in a process of its own."""
    command = [sys.executable, "-m", "benches.maintenance_child", what, *map(str, args)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


class Table:
    """A table of `KEYS` keys, five of which change at every time."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self._chance = random.Random(1)

    def step(self, at: int) -> list[tuple[bytes, bytes, int, int]]:
        """Retractions and insertions."""
        updates = []
        for _ in range(5):
            key, val = b"%016d" % self._chance.randrange(KEYS), (b"%016d" % self._chance.randrange(997)) * 4
            if (old := self.rows.get(key)) is not None:
                updates.append((key, old, at, -1))
            updates.append((key, val, at, 1))
            self.rows[key] = val
        return updates


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", ["files+sqlite"], indirect=True)
def test_many_small_appends(place: Any, run: Any, enabled: bool, benchmark: Any, capsys: Any) -> None:
    """100,000 of them, with `retain`: latency, batches, live diffs, bytes; each tenth beside the first."""
    n, tables = (100_000 if enabled else 400), Table()
    figures: dict[str, Any] = {}

    async def life() -> None:
        seconds, blobs, most_batches, most_diffs = [], [0], 0.0, 0
        async with ap.open(blob=place.blob, consensus=place.consensus) as client:
            writer = await client.writer("shard", SCHEMA)
            await client.admin.retain("shard", KEPT)
            for at in range(n):
                updates = tables.step(at)
                began = time.perf_counter()
                await writer.compare_and_append(updates, at, at + 1)
                seconds.append(time.perf_counter() - began)
                if at % 1000 == 999:
                    blobs.append((await client.admin.usage()).total)
                    view = await client.admin.inspect("shard")
                    most_batches = max(most_batches, len(view.batches) / math.log2(at))
                    most_diffs = max(most_diffs, view.live_diffs)
            tenths = [seconds[i : i + n // 10] for i in range(0, n, n // 10)]
            medians = [statistics.median(tenth) for tenth in tenths]
            means = [statistics.fmean(tenth) for tenth in tenths]
            figures["median ms by tenth"] = " ".join(f"{m * 1e3:.2f}" for m in medians)
            figures["mean ms by tenth"] = " ".join(f"{m * 1e3:.2f}" for m in means)
            figures["last / second tenth, medians"] = round(medians[-1] / medians[1], 2)
            figures["last / second tenth, means"] = round(means[-1] / means[1], 2)
            figures["slowest ms"] = round(max(seconds) * 1e3, 1)
            figures["most batches / log2(n)"] = round(most_batches, 2)
            figures["most live diffs"] = most_diffs
            later = blobs[len(blobs) // 10 :]  # once most keys are there
            figures["blobs, bytes, median and most"] = f"{statistics.median(later):,.0f}, {max(later):,}"
            figures.update(await _sizes(client, place, n, tables))

    benchmark.pedantic(lambda: run(life()), rounds=1)
    report(capsys, f"{n} appends of 5 changes, {KEPT} times kept", **figures)
    assert figures["batches at the end"] <= _batches_max(n)


def _batches_max(n: int) -> float:
    """After so many appends; batches in the state count for less."""
    return 2 * math.log2(n) / INLINE_WEIGHTS[0]


async def _sizes(client: ap.Client, place: Any, n: int, tables: Table) -> dict[str, Any]:
    async with asyncio.timeout(60):  # what the last appends began may end
        while len((view := await client.admin.inspect("shard")).batches) > _batches_max(n):
            await asyncio.sleep(0.01)
    before = await client.admin.usage()
    written = client.metrics["blob.set"].bytes + client.metrics["consensus.compare_and_set"].bytes
    disk = _bytes_on_disk(place)
    async with client.reader("shard") as reader, reader.snapshot() as snapshot:
        assert dict((await snapshot.to_arrow()).select(["key", "val"]).to_pandas().values) == tables.rows
    await client.admin.force_compaction("shard")
    await client.admin.force_gc("shard")
    after = await client.admin.usage()
    return {
        "batches at the end": len(view.batches),
        "live diffs": view.live_diffs,
        "inline bytes in the state": view.inline_bytes,
        "blobs, bytes": f"{before.total:,}",
        "consensus store, bytes": f"{disk - before.total:,}",
        "one compact batch, bytes": f"{after.live:,}",
        "bytes written per append": round(written / n),
    }


def _bytes_on_disk(place: Any) -> int:
    folder = Path(place.blob.removeprefix("file://")).parent
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", ["files+sqlite"], indirect=True)
def test_compaction_of_more_than_memory(
    place: Any, run: Any, enabled: bool, tmp_path: Path, benchmark: Any, capsys: Any
) -> None:
    """4 GiB of updates in 16 appends, each with the same keys at another time, in 256 MiB."""
    size, memory, appends = (256 * MIB, 256 * MIB, 16) if enabled else (2 * MIB, 8 * MIB, 4)

    async def fill() -> int:
        table, rows = byhand.large_table(size), 0
        async with ap.open(tmp_path / "location", maintenance=False) as client:
            writer = await client.writer("shard", SCHEMA)
            for at in range(appends):
                await writer.compare_and_append(_at(table, at), at, at + 1)
                rows += table.num_rows
        return rows

    rows = run(fill())
    found = benchmark.pedantic(lambda: child("compact", tmp_path / "location", memory), rounds=1)
    report(
        capsys,
        f"compaction of {size * appends // MIB} MiB in {appends} runs, bound {memory // MIB} MiB",
        seconds=round(found["seconds"], 1),
        MiB_per_s=round(size * appends / MIB / found["seconds"]),
        process_grew_by_MiB=round(found["grew_by"] / MIB),
    )
    assert (found["batches"], found["runs"], found["rows"]) == (1, 1, rows)
    if not enabled:
        return

    async def check() -> None:
        async with ap.open(tmp_path / "location", maintenance=False) as client:
            report = await client.admin.fsck("shard")
            assert report.ok, report.problems

    run(check())


@pytest.mark.timeout(900)
def test_compaction_beside_by_hand(tmp_path: Path, run: Any, enabled: bool, capsys: Any) -> None:
    """2M updates in 8 runs; by hand: read all, sort, sum, write one file."""
    n, rounds_n = (2_000_000, 3) if enabled else (4000, 1)
    seconds: dict[str, list[float]] = {"by hand": [], "force_compaction": []}
    grew = 0
    for number in range(rounds_n):
        location = tmp_path / str(number)
        run(_fill_runs(location, n, 8))
        began = time.perf_counter()
        _compact_by_hand(location)
        seconds["by hand"].append(time.perf_counter() - began)
        found = child("compact", location, 256 * MIB)
        seconds["force_compaction"].append(found["seconds"])
        grew = max(grew, found["grew_by"])
        assert found["rows"] == n
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    report(
        capsys,
        f"compaction of {n} updates in 8 runs",
        by_hand_ms=round(medians["by hand"] * 1e3),
        force_compaction_ms=round(medians["force_compaction"] * 1e3),
        ratio=round(medians["force_compaction"] / medians["by hand"], 2),
        process_grew_by_MiB=round(grew / MIB),
    )


async def _fill_runs(location: Path, n: int, runs: int) -> None:
    settings = ap.Settings(inline_writes_single_max_bytes=0)
    table = byhand.large_table(n * 96)
    async with ap.open(location, maintenance=False, settings=settings) as client:
        writer = await client.writer("shard", SCHEMA)
        for at in range(runs):
            some = table.take(pa.array(range(at, n, runs)))
            await writer.compare_and_append(_at(some, at), at, at + 1)


def _compact_by_hand(location: Path) -> None:
    parts = [pl.read_parquet(path) for path in location.rglob("*.parquet")]
    whole = byhand.consolidate(pl.concat(parts).to_arrow())
    path = location / "by-hand"
    pq.write_table(whole, path, compression="zstd", compression_level=1)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.unlink()


@pytest.mark.timeout(900)
def test_compaction_of_small_commits(tmp_path: Path, run: Any, enabled: bool, capsys: Any) -> None:
    """300 commits of 100 rows each, compacted by the process that made them; by hand: read 300 records, sort,
    sum, write one file and one record. The first round warms up."""
    commits, rounds_n = (300, 8) if enabled else (10, 1)
    hand, ours, size = [], [], 0
    for number in range(rounds_n):
        path = tmp_path / f"{number}.db"
        taken, size = run(_small_commits(tmp_path / str(number), path, commits))
        ours.append(taken)
        began = time.perf_counter()
        _compact_records(path)
        hand.append(time.perf_counter() - began)
    medians = [statistics.median(seconds[1:] or seconds) for seconds in (hand, ours)]
    report(
        capsys,
        f"compaction of {commits} commits of 100 rows",
        by_hand_ms=round(medians[0] * 1e3),
        force_compaction_ms=round(medians[1] * 1e3),
        ratio=round(medians[1] / medians[0], 2),
        bytes_then=f"{size:,}",
    )


async def _small_commits(location: Path, path: Path, commits: int) -> tuple[float, int]:
    """Make them, there and as records in a file; then compact: the seconds, and the bytes of the result."""
    records = byhand.SqliteRecords(path)
    async with ap.open(location, maintenance=False) as client, client.writer("shard", SCHEMA) as writer:
        for at in range(commits):
            updates = byhand.rows(100, at, at * 100)
            await writer.compare_and_append(updates, at, at + 1)
            await records.put(at, byhand.record(updates))
        await records.aclose()
        began = time.perf_counter()
        await client.admin.force_compaction("shard")
        seconds = time.perf_counter() - began
        view = await client.admin.inspect("shard")
        assert (len(view.batches), view.batches[0].len) == (1, commits * 100)
        return seconds, view.blob_bytes


def _compact_records(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = FULL")
        records = [json.loads(data) for (data,) in db.execute("SELECT data FROM log ORDER BY seqno")]
        batches = [
            pa.ipc.read_record_batch(pa.py_buffer(base64.b64decode(record["data"])), byhand.SCHEMA)
            for record in records
        ]
        data = byhand.part(byhand.consolidate(pa.Table.from_batches(batches)))
        part = path.with_suffix(".parquet")
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        db.execute("INSERT INTO log VALUES (?, ?)", (len(records), part.name.encode()))


@pytest.mark.timeout(900)
def test_open_and_read(tmp_path: Path, run: Any, enabled: bool, capsys: Any) -> None:
    """A new process opens the location and reads the contents, after few commits and after many."""
    counts = (300, 30_000) if enabled else (30, 60)
    medians = {}
    for n in counts:
        location = tmp_path / str(n)
        run(_commits(location, n))
        taken = [child("read", location) for _ in range(7 if enabled else 1)]
        assert taken[0]["rows"] <= KEYS
        medians[n] = statistics.median(found["seconds"] for found in taken)
    few, many = (medians[n] for n in counts)
    figures = {f"after {n} commits, ms": round(medians[n] * 1e3, 1) for n in counts}
    report(capsys, "open and read in a new process", **figures, ratio=round(many / few, 2))


async def _commits(location: Path, n: int) -> None:
    async with ap.open(location) as client, client.writer("shard", SCHEMA) as writer:
        await client.admin.retain("shard", 100)
        for at in range(n):
            await writer.compare_and_append([(b"%03d" % (at % 500), b"x" * 64, at, 1)], at, at + 1)


def _at(table: pa.Table, time: int) -> pa.Table:
    return table.set_column(2, "time", pa.array([time] * table.num_rows, pa.int64()))
