"""`aiopersist demo`: the history of a git repository as a time-varying collection.

Key: path. Value: mode, blob id and size. Time: the number of the commit. Two writers race. Each has its own
client, so they meet only in the stores. Both append the next commit at the upper that they know; the loser
continues from the upper in its error. A subscriber follows. At the end, snapshots at sampled commits and the
rows of the subscriber are compared with git, row by row.
"""

import asyncio
import statistics
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from rich.console import Console
from rich.progress import Progress

from aiopersist.base.errors import UpperMismatch
from aiopersist.base.runtime import SYSTEM
from aiopersist.client.client import Client
from aiopersist.data.types.schema import Schema
from aiopersist.demo.common import (
    DemoOptions,
    Row,
    add_row,
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

WRITERS = ("one", "two")
FIXED_BYTES = 20 + 8 + 8  # blob id, mode and size beside the path


class Window:
    """The commits to write, read from one stream on demand.

    `floor` is the greatest upper that a writer knows; earlier commits are in the shard and are dropped here.
    So only the few commits that writers race for are in memory.
    """

    def __init__(self, stream: AsyncIterator[GitCommit], floor: int) -> None:
        self.floor = floor
        self._stream = stream
        self._commits: dict[int, GitCommit] = {}
        self._reading = asyncio.Lock()

    def written(self, upper: int) -> None:
        """Note that everything before `upper` is in the shard."""
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
    """The start of each append, by commit and writer, and the winner of each commit."""

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
        """Times from the start of the winning append to the subscriber, sorted."""
        latencies = []
        for starts, winner, seen in zip(self.started_s, self.winner, self.seen_s, strict=True):
            if winner is not None and seen is not None:
                latencies.append(seen - starts[winner])
        return sorted(latencies)


class HistoryDemo:
    """A run with a client for each writer; the first client also reads."""

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
        """Write all commits, and wait until the subscriber has seen them."""
        async with self.client.writer(self.shard, self.schema) as writer:
            start = min(
                end_of(await writer.fetch_recent_upper()), len(self.commits)
            )  # an earlier run may have written commits
        written = self.bars.add_task("written", total=len(self.commits), completed=start)
        followed = self.bars.add_task("followed", total=len(self.commits))
        async with aclosing(self.repository.changes(self.commits, start)) as stream:
            window = Window(stream, start)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(followed))
                for name, client in zip(WRITERS, self.clients, strict=True):
                    tasks.create_task(self._write(name, client, window, written))

    async def _write(self, name: str, client: Client, window: Window, bar: Any) -> None:
        async with client.writer(self.shard, self.schema) as writer:
            while (commit := await window.next()) is not None:
                number = commit.number
                updates = [(path, version, number, diff) for path, version, diff in commit.updates]
                self.race.started_s[number][name] = SYSTEM.monotonic()
                try:
                    await writer.compare_and_append(updates, number, number + 1)
                except UpperMismatch as e:
                    self.race.lost[name] += 1
                    window.written(end_of(e.current))
                else:
                    self.race.won(commit, name, updates)
                    window.written(number + 1)
                self.bars.update(bar, completed=min(window.floor, len(self.commits)))

    async def _follow(self, bar: Any) -> None:
        seen = 0
        steps = follow(self.client, self.shard, self.schema, len(self.commits) - 1, self.followed)
        async with aclosing(steps) as uppers:
            async for upper in uppers:
                self.race.seen_s[seen:upper] = [SYSTEM.monotonic()] * (upper - seen)
                seen = upper
                self.bars.update(bar, completed=seen)

    async def check(self) -> tuple[int, int]:
        """Compare with git. Returns the numbers of compared commits and rows."""
        last = len(self.commits) - 1
        sampled = samples(self.commits)
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
                    compare(expected, self.followed, "the subscriber's contents")
                rows += len(expected)
                self.bars.advance(bar)
        return len(sampled), rows


async def run(options: DemoOptions, console: Console) -> None:
    """Run the demo; raises if it cannot start or a check fails."""
    repository = await Repository.find(options.repository)
    commits = await repository.first_parents(options.limit)
    with directory_of(options) as directory:
        async with opened(options, directory, len(WRITERS)) as clients:
            with progress(console) as bars:
                demo = HistoryDemo(clients, repository, commits, bars)
                before = SYSTEM.monotonic()
                await demo.write_and_follow()
                seconds = SYSTEM.monotonic() - before
                checked, rows = await demo.check()
            compared = f"{checked} snapshots ({rows:,} rows) and the subscriber's contents equal git's"
            say(console, *_report(demo.race, seconds), compared)
        if directory is not None:
            size = sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())
            kept = f"in {directory}" if options.location is not None else "deleted now: --location keeps them"
            say(console, f"{size:,} bytes on disk, {kept}")


def _report(race: Race, seconds: float) -> list[str]:
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
    return lines
