"""`aiopersist demo --spark`: the history of a git repository, loaded and read back by Spark jobs.

Key: path. Value: mode, blob id and size. Time: the number of the commit. The history becomes a few Parquet
files. A Spark job loads each into one shard, exactly once, while an asyncio subscriber follows. Then Spark
reads the shard as of sampled commits, compacts it, and reads the last commit again. Each result and the rows
of the subscriber are compared with git, row by row.
"""

import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from aiopersist.base.errors import InvalidLocation, to_install
from aiopersist.base.runtime import SYSTEM
from aiopersist.client.client import Client
from aiopersist.data.lazy import pa, pq
from aiopersist.data.types.schema import Schema
from aiopersist.demo.common import (
    DemoOptions,
    Row,
    compare,
    directory_of,
    end_of,
    follow,
    opened,
    progress,
    samples,
    say,
)
from aiopersist.demo.git import FileVersion, GitCommit, Repository

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from aiopersist.spark import SparkClient

FILES = 8  # Parquet files of the history
COLUMNS = ("key", "mode", "blob", "size", "time", "diff")


class SparkDemo:
    """A run: `client` belongs to the asyncio application, `spark` to the pipeline."""

    def __init__(
        self, client: Client, spark: "SparkClient", repository: Repository, commits: list[str], bars: Progress
    ) -> None:
        self.client = client
        self.spark = spark
        self.repository = repository
        self.commits = commits
        self.bars = bars
        self.shard = f"spark-{commits[0]}"
        self.schema = Schema(key=bytes, val=FileVersion)
        self.followed: Counter[Row] = Counter()
        self.updates = 0

    async def load_and_follow(self, session: "SparkSession", folder: Path) -> float:
        """Load all commits, and wait until the subscriber has seen them. Returns the seconds."""
        async with self.client.writer(self.shard, self.schema) as writer:
            start = end_of(await writer.fetch_recent_upper())
            files = [f async for f in self._files(min(start, len(self.commits)), folder)]
            loaded = self.bars.add_task("loaded", total=len(self.commits), completed=start)
            followed = self.bars.add_task("followed", total=len(self.commits))
            before = SYSTEM.monotonic()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(followed))
                for end, path in files:
                    df = await asyncio.to_thread(session.read.parquet, str(path))
                    txn = ("demo", end)
                    await self.spark.awrite_df(df, self.shard, time="time", diff="diff", txn=txn)
                    upper = await writer.fetch_recent_upper()
                    if upper.time != end:  # the last commits of the file changed nothing
                        await writer.compare_and_append([], upper, end)
                    self.bars.update(loaded, completed=end)
            return SYSTEM.monotonic() - before

    async def _files(self, start: int, folder: Path) -> AsyncIterator[tuple[int, Path]]:
        """Files of the history from commit `start` on, with the number after the last commit of each."""
        size = max(-(-(len(self.commits) - start) // FILES), 1)
        rows: list[tuple[Any, ...]] = []
        async with aclosing(self.repository.changes(self.commits, start)) as stream:
            async for commit in stream:
                rows += _rows(commit)
                end = commit.number + 1
                if (end - start) % size == 0 or end == len(self.commits):
                    path = folder / f"{end:09}.parquet"
                    await asyncio.to_thread(_write, path, rows)
                    self.updates += len(rows)
                    rows = []
                    yield end, path

    async def _follow(self, bar: Any) -> None:
        steps = follow(self.client, self.shard, self.schema, len(self.commits) - 1, self.followed)
        async with aclosing(steps) as uppers:
            async for upper in uppers:
                self.bars.update(bar, completed=upper)

    async def check(self) -> tuple[int, int]:
        """Compare with git before and after a compaction. Returns the numbers of commits and rows."""
        last = len(self.commits) - 1
        sampled = samples(self.commits)
        bar = self.bars.add_task("checked", total=len(sampled) + 1)
        rows = 0
        for number in sampled:
            rows += await self._compare(number, "")
            self.bars.advance(bar)
        await self.spark.acompact(self.shard)
        await self._compare(last, "compacted, ")
        self.bars.advance(bar)
        return len(sampled), rows

    async def _compare(self, number: int, how: str) -> int:
        expected = Counter({row: 1 async for row in self.repository.tree(self.commits[number])})
        df = await self.spark.asnapshot_df(self.shard, number)
        actual = Counter(await asyncio.to_thread(_collected, df))
        compare(expected, actual, f"{how}the DataFrame at commit {number} ({self.commits[number]})")
        if number == len(self.commits) - 1:
            compare(expected, self.followed, "the subscriber's contents")
        return len(expected)


def _rows(commit: GitCommit) -> list[tuple[Any, ...]]:
    at = commit.number
    return [(path, file.mode, file.blob, file.size, at, diff) for path, file, diff in commit.updates]


def _write(path: Path, rows: list[tuple[Any, ...]]) -> None:
    types = [pa.binary(), pa.int64(), pa.binary(), pa.int64(), pa.int64(), pa.int64()]
    columns: list[Any] = list(zip(*rows, strict=True)) or [[]] * len(COLUMNS)
    arrays = [pa.array(column, t) for column, t in zip(columns, types, strict=True)]
    pq.write_table(pa.table(arrays, list(COLUMNS)), path)


def _collected(df: "DataFrame") -> list[Row]:
    return [
        (bytes(row.key), FileVersion(mode=row.mode, blob=bytes(row.blob), size=row.size))
        for row in df.collect()
    ]


async def run(options: DemoOptions, console: Console) -> None:
    """Run the demo; raises if it cannot start or a check fails."""
    repository = await Repository.find(options.repository)
    commits = await repository.first_parents(options.limit)
    with (
        directory_of(options) as directory,
        tempfile.TemporaryDirectory(prefix="aiopersist-history-") as folder,
    ):
        async with (
            _pipeline(options, directory) as (session, spark),
            opened(options, directory, 1) as (client,),
        ):
            with progress(console) as bars:
                demo = SparkDemo(client, spark, repository, commits, bars)
                seconds = await demo.load_and_follow(session, Path(folder))
                checked, rows = await demo.check()
    loaded = f"{len(commits):,} commits loaded by Spark in {seconds:.1f} s; {demo.updates:,} rows"
    compared = f"{checked} DataFrames ({rows:,} rows), the compacted shard and the subscriber's contents"
    say(console, loaded, f"{compared} equal git's")


@asynccontextmanager
async def _pipeline(
    options: DemoOptions, directory: Path | None
) -> "AsyncIterator[tuple[SparkSession, SparkClient]]":
    """A Spark session in this process, and the engine on it."""
    session = await asyncio.to_thread(_session)
    try:
        from aiopersist.spark import connect

        spark = await asyncio.to_thread(
            lambda: connect(session, directory, blob=options.blob, consensus=options.consensus)
        )
        try:
            yield session, spark
        finally:
            await spark.aclose()
    finally:
        await asyncio.to_thread(session.stop)


def _session() -> "SparkSession":
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise InvalidLocation(f"spark: {to_install('spark')}, and Java 17") from error
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").appName("aiopersist demo")
    for name, value in (("spark.ui.enabled", "false"), ("spark.log.level", "ERROR")):
        builder = builder.config(name, value)
    try:
        return builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    except PySparkRuntimeError as error:
        raise InvalidLocation(f"spark: no session; is Java 17 installed? {error}") from error
