"""`aiopersist demo`: the history of a git repository as a time-varying collection.

Key: path. Val: mode, blob id and size. Time: the number of the commit. Two writers race, each with a
client of its own, so that they know of each other through the stores only: both append the next commit
at the upper they know, and who loses goes on from the upper that the mismatch names. A subscriber
follows. When all is written, git is asked about sampled commits, and each answer is
compared with the snapshot at that time, row for row; what the subscriber accumulated, with the last.
"""

import asyncio
import logging
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aiopersist.client import Client
from aiopersist.data.types.schema import Schema
from aiopersist.demo.git import FileVersion, GitCommit, Repository
from aiopersist.errors import UpperMismatch
from aiopersist.frontier import Antichain
from aiopersist.opening import open as open_client
from aiopersist.resource import Opening
from aiopersist.runtime import SYSTEM
from aiopersist.settings import Settings

WRITERS = ("one", "two")
SAMPLES = 12  # commits whose whole tree is compared
OPEN_TIMEOUT_S = 10.0  # somebody is watching
FIXED_BYTES = 20 + 8 + 8  # blob id, mode and size beside the path

Row = tuple[bytes, FileVersion]


class CheckFailed(Exception):
    """What was read is not what git says."""


class DemoOptions(NamedTuple):
    """What the command was asked to do."""

    repository: Path
    location: Path | None
    blob: str | None
    consensus: str | None
    limit: int | None


class Window:
    """The commits that are still to be written, read from one stream as writers ask for them.

    `floor` is the greatest upper that anybody has heard of: what is before it is in the shard and is
    forgotten here, so only the few commits that writers are racing for are in memory.
    """

    def __init__(self, stream: AsyncIterator[GitCommit], floor: int) -> None:
        self.floor = floor
        self._stream = stream
        self._commits: dict[int, GitCommit] = {}
        self._reading = asyncio.Lock()

    def written(self, upper: int) -> None:
        """Everything before `upper` is in the shard."""
        self.floor = max(self.floor, upper)
        for number in [n for n in self._commits if n < self.floor]:
            del self._commits[number]

    async def next(self) -> GitCommit | None:
        """The commit at the floor; `None` at the end."""
        async with self._reading:
            while self.floor not in self._commits:
                commit = await anext(self._stream, None)
                if commit is None:
                    return None
                if commit.number >= self.floor:
                    self._commits[commit.number] = commit
            return self._commits[self.floor]


class Race:
    """What the writers did and when: an append's start by commit and writer, and who won it."""

    def __init__(self, commits: int) -> None:
        self.started_s: list[dict[str, float]] = [{} for _ in range(commits)]
        self.winner: list[str | None] = [None] * commits
        self.seen_s: list[float | None] = [None] * commits
        self.lost: Counter[str] = Counter()
        self.updates = 0
        self.bytes = 0

    def won(self, commit: GitCommit, writer: str, updates: list[Any]) -> None:
        self.winner[commit.number] = writer
        self.updates += len(updates)
        self.bytes += sum(len(update[0]) + FIXED_BYTES for update in updates)

    def latencies_s(self) -> list[float]:
        """From the start of the append that won to the subscriber, sorted."""
        found = []
        for starts, winner, seen in zip(self.started_s, self.winner, self.seen_s, strict=True):
            if winner is not None and seen is not None:
                found.append(seen - starts[winner])
        return sorted(found)


class HistoryDemo:
    """One run, on one open client for each writer; the first one also reads."""

    def __init__(
        self, clients: list[Client], repository: Repository, commits: list[str], bars: Progress
    ) -> None:
        self.clients = clients
        self.client = clients[0]
        self.repository = repository
        self.commits = commits
        self.bars = bars
        self.shard = f"git-{commits[0]}"
        self.schema = Schema(key=bytes, val=FileVersion)
        self.race = Race(len(commits))
        self.followed: Counter[Row] = Counter()

    async def write_and_follow(self) -> None:
        """Until every commit is written and was seen."""
        async with self.client.writer(self.shard, self.schema) as writer:
            start = min(_int(await writer.fetch_recent_upper()), len(self.commits))  # an earlier run's
        written = self.bars.add_task("written", total=len(self.commits), completed=start)
        followed = self.bars.add_task("followed", total=len(self.commits))
        async with closing(self.repository.changes(self.commits, start)) as stream:
            window = Window(stream, start)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(followed))
                for name, client in zip(WRITERS, self.clients, strict=True):
                    tasks.create_task(self._write(name, client, window, written))

    async def _write(self, name: str, client: Client, window: Window, bar: Any) -> None:
        async with client.writer(self.shard, self.schema) as writer:
            while (commit := await window.next()) is not None:
                number = commit.number
                updates = updates_of(commit)
                self.race.started_s[number][name] = SYSTEM.monotonic()
                try:
                    await writer.compare_and_append(updates, number, number + 1)
                except UpperMismatch as e:
                    self.race.lost[name] += 1
                    window.written(_int(e.current))
                else:
                    self.race.won(commit, name, updates)
                    window.written(number + 1)
                self.bars.update(bar, completed=min(window.floor, len(self.commits)))

    async def _follow(self, bar: Any) -> None:
        last = len(self.commits) - 1
        seen = 0
        async with (
            self.client.reader(self.shard, self.schema) as reader,
            reader.subscribe(as_of=0) as changes,
        ):
            async for step in changes.steps():
                now = SYSTEM.monotonic()
                for path, version, time, diff in step.updates:
                    if time <= last:
                        add_row(self.followed, (path, version), diff)
                upper = min(_int(step.upper), last + 1)
                self.race.seen_s[seen:upper] = [now] * (upper - seen)
                seen = upper
                self.bars.update(bar, completed=seen)
                if seen > last:
                    return

    async def check(self) -> tuple[int, int]:
        """Against git; returns how many commits and rows were compared."""
        last = len(self.commits) - 1
        sampled = sorted({round(n * last / (SAMPLES - 1)) for n in range(SAMPLES)})
        bar = self.bars.add_task("checked", total=len(sampled))
        rows = 0
        async with self.client.reader(self.shard, self.schema) as reader:
            for number in sampled:
                expected = Counter({row: 1 async for row in self.repository.tree(self.commits[number])})
                actual: Counter[Row] = Counter()
                async with reader.snapshot(as_of=number) as snapshot:
                    async for path, version, diff in snapshot:
                        add_row(actual, (path, version), diff)
                compare(expected, actual, f"the snapshot at commit {number} ({self.commits[number]})")
                if number == last:
                    compare(expected, self.followed, "what the subscriber accumulated")
                rows += len(expected)
                self.bars.advance(bar)
        return len(sampled), rows


async def run(options: DemoOptions, console: Console) -> None:
    """All of it; raises where it cannot begin or a check fails."""
    repository = await Repository.find(options.repository)
    commits = await repository.first_parents(options.limit)
    await asyncio.to_thread(import_all)
    with place(options) as directory:
        async with AsyncExitStack() as stack:
            with quiet():
                clients = [await stack.enter_async_context(open_place(options, directory)) for _ in WRITERS]
            try:
                await _run(clients, repository, commits, console)
            except* Exception as group:
                raise first_error(group) from None
        if directory is not None:
            size = sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())
            console.print(f"{size:,} bytes on disk, in {directory}", highlight=False, soft_wrap=True)


async def _run(clients: list[Client], repository: Repository, commits: list[str], console: Console) -> None:
    columns = TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bars:
        demo = HistoryDemo(clients, repository, commits, bars)
        before = SYSTEM.monotonic()
        await demo.write_and_follow()
        seconds = SYSTEM.monotonic() - before
        checked, rows = await demo.check()
    _report(demo.race, seconds, console)
    console.print(
        f"{checked} snapshots ({rows:,} rows) and the subscriber's contents are what git says",
        highlight=False,
        soft_wrap=True,
    )


def _report(race: Race, seconds: float, console: Console) -> None:
    wins = Counter(winner for winner in race.winner if winner is not None)
    seconds = max(seconds, 1e-9)
    rate = f"{wins.total() / seconds:,.0f} commits/s"
    total = f"{wins.total():,} commits in {seconds:.1f} s: {rate}"
    lines = [
        f"{total}; {race.updates:,} rows, {race.bytes:,} bytes",
        "; ".join(f"writer {name} won {wins[name]:,} and lost {race.lost[name]:,}" for name in WRITERS),
    ]
    latencies = race.latencies_s()
    if len(latencies) > 1:
        p50, p99 = (
            statistics.quantiles(latencies, n=100, method="inclusive")[at - 1] * 1000 for at in (50, 99)
        )
        lines.append(f"from append to subscriber: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def updates_of(commit: GitCommit) -> list[tuple[bytes, FileVersion, int, int]]:
    updates = []
    for path, old, new in commit.changes:
        if old is not None:
            updates.append((path, old, commit.number, -1))
        if new is not None:
            updates.append((path, new, commit.number, 1))
    return updates


def add_row(rows: Counter[Row], row: Row, diff: int) -> None:
    rows[row] += diff
    if not rows[row]:
        del rows[row]


def compare(expected: Counter[Row], actual: Counter[Row], what: str) -> None:
    if expected == actual:
        return
    differing = (row for row in expected | actual if expected[row] != actual[row])
    path, version = next(differing, next(iter(actual.keys() - expected.keys()), (b"?", None)))
    raise CheckFailed(f"{what} is not what git says, at {path!r}: {version}")


def _int(frontier: Antichain | Any) -> int:
    """The upper of a shard of int times; a finished one is past every commit."""
    time = frontier.time
    return time if isinstance(time, int) else 2**63 - 1


def open_place(options: DemoOptions, directory: Path | None) -> Opening[Client]:
    named = "AIOPERSIST_OPEN_TIMEOUT_S" in os.environ
    settings = Settings() if named else Settings(open_timeout_s=OPEN_TIMEOUT_S)
    if directory is not None:
        return open_client(directory, settings=settings)
    return open_client(blob=options.blob, consensus=options.consensus, settings=settings)


def import_all() -> None:
    """What would be imported with the first commit, and be counted as its latency."""
    for name in ("polars", "pyarrow.compute", "pyarrow.parquet"):
        import_module(name)
    import_module("pyarrow").array([b""])  # looks for pandas


@contextmanager
def place(options: DemoOptions) -> Iterator[Path | None]:
    if options.location is not None or options.blob is not None:
        yield options.location
        return
    with tempfile.TemporaryDirectory(prefix="aiopersist-demo-") as directory:
        yield Path(directory)


@contextmanager
def quiet() -> Iterator[None]:
    """A store that cannot be reached is told once, by the command."""
    handler = logging.NullHandler()
    logging.getLogger("aiopersist").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("aiopersist").removeHandler(handler)


@asynccontextmanager
async def closing(stream: Any) -> AsyncIterator[Any]:
    try:
        yield stream
    finally:
        await stream.aclose()


def first_error(error: BaseException) -> BaseException:
    return first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
