"""`aiopersist demo --indexed`: the history of a git repository by author date, as many streams.

The demo walks the commits in their order, and writes each at the time when it was authored: early, late, and
out of order. There is a stream for each top-level folder (key: path, val: mode, blob id and size), and one
that names the commits, so that a repeated walk goes on where the last one ended: the changes of a commit, and
its name, are one write to several streams. All streams are sealed together, up to the oldest time of
authorship among the commits still to come. A subscriber with a client of its own follows every stream.

Then git is asked. A run of consecutive commits that were authored by a time has changed the tree of the last
against the tree before the first. So the contents as of any time are sums of trees, independent of the
changes that were written. They are compared with the streams, with the rows that the subscriber has
accumulated, and once more with the streams after all history was given up.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import accumulate, groupby
from typing import Any

from rich.console import Console
from rich.progress import Progress

from aiopersist.base.frontier import TIME_MAX
from aiopersist.base.runtime import SYSTEM
from aiopersist.demo.common import (
    DemoOptions,
    Row,
    add_row,
    compare,
    directory_of,
    end_of,
    opened,
    progress,
    say,
)
from aiopersist.demo.git import FileVersion, GitCommit, Repository
from aiopersist.indexed import Indexed, Sealed, Stream

AT_ONCE = 64  # commits that are written without waiting for one another
SAMPLES = 6  # times at which the contents are compared
TREES_MAX = 60  # trees that git is asked for, per time
COMMITS = "commits"
FOLLOWED_S = 60.0  # for the subscriber to listen to all streams
END = (b"", FileVersion(mode=0, blob=b"", size=None))  # no path: written and retracted at the end of the walk


class Walk:
    """The commits, when they were authored, and how far that lets all streams be sealed."""

    def __init__(self, commits: list[str], dates: dict[str, int], limit: int | None) -> None:
        self.commits = commits[:limit]
        self.times = [dates[commit] for commit in self.commits]
        self._sorted = sorted(self.times)
        every = [dates[commit] for commit in commits]  # also those beyond the limit
        end = max(every) + 1
        self.complete = [*list(accumulate(reversed([*every[1:], end]), min))[::-1]]
        """After each commit: no later one is older."""
        self.end = self.complete[len(self.commits) - 1]

    @property
    def late(self) -> int:
        """Commits that were authored before a commit that was written earlier."""
        newest = accumulate(self.times, max)
        return sum(time < before for time, before in zip(self.times[1:], newest, strict=False))

    def complete_by(self, time: int) -> int:
        """How many commits are complete once everything is sealed at `time`."""
        return bisect_left(self._sorted, time)

    def runs_until(self, time: int) -> list[tuple[int, int]]:
        """The first and the last number of each run of commits authored by `time`."""
        by = groupby(range(len(self.times)), key=lambda number: self.times[number] <= time)
        rows = [list(numbers) for is_by, numbers in by if is_by]
        return [(row[0], row[-1]) for row in rows]

    def samples(self) -> list[int]:
        """The times to compare: the last one, and others that need few trees."""
        times = sorted(set(self.times))
        some = {times[round(n * (len(times) - 1) / (SAMPLES - 1))] for n in range(SAMPLES)}
        few = {time for time in some if 2 * len(self.runs_until(time)) <= TREES_MAX}
        return sorted({*few, times[-1]})


class IndexedDemo:
    """One run: `ix` is written by one client, `reader` follows it with another."""

    def __init__(
        self, ix: Indexed, reader: Indexed, repository: Repository, walk: Walk, bars: Progress
    ) -> None:
        self.ix = ix
        self.reader = reader
        self.repository = repository
        self.walk = walk
        self.bars = bars
        self.folders: dict[str, Stream[bytes, FileVersion]] = {}
        self.followed: Counter[Row] = Counter()
        self.rows = 0
        self.written = 0
        self._sealed = 0
        self._listening = 0

    async def write_and_follow(self, commits: Stream[str, int], done: set[str]) -> None:
        """Write until every commit is written and was seen; commits that are `done` are only searched for the
        folders that they name."""
        self._sealed = end_of((await self.ix.description(COMMITS)).upper)
        written = self.bars.add_task("written", total=len(self.walk.commits))
        followed = self.bars.add_task("followed", total=len(self.walk.commits))
        async with (
            asyncio.TaskGroup() as tasks,
            aclosing(self.repository.changes(self.walk.commits)) as stream,
        ):
            async for some in _chunks(stream, AT_ONCE):
                for folder in {_folder(change.path) for commit in some for change in commit.changes}:
                    if folder not in self.folders:
                        self.folders[folder] = await self.ix.register(folder, bytes, FileVersion)
                        tasks.create_task(self._follow(folder, followed))
                await self._write(commits, [commit for commit in some if commit.id not in done])
                self.bars.advance(written, len(some))
            await self._end(commits)

    async def _write(self, commits: Stream[str, int], some: list[GitCommit]) -> None:
        """The calls of a chunk are made in order, and none waits for the one before."""
        calls = []
        for commit in some:
            time = self.walk.times[commit.number]
            updates = [(self.folders[folder], rows) for folder, rows in _by_folder(commit, time).items()]
            self.rows += sum(len(rows) for _, rows in updates)
            calls.append(self.ix.write([(commits, [(commit.id, commit.number, time, 1)]), *updates]))
            complete = self.walk.complete[commit.number]
            if complete > self._sealed:
                self._sealed = complete
                calls.append(self.ix.seal([commits, *self.folders.values()], complete))
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(call)
        self.written += len(some)

    async def _end(self, commits: Stream[str, int]) -> None:
        """Seal the complete times, and let the subscriber know that nothing more comes."""
        await self.ix.seal([commits, *self.folders.values()], max(self.walk.end, self._sealed))
        async with asyncio.timeout(FOLLOWED_S):
            while self._listening < len(self.folders):
                await SYSTEM.sleep(0.01)
        time = max(*self.walk.times, self._sealed)
        mark = [(*END, time, 1), (*END, time, -1)]
        await self.ix.write([(stream, mark) for stream in self.folders.values()])

    async def _follow(self, folder: str, bar: Any) -> None:
        stream = await self.reader.load(folder, bytes, FileVersion)
        assert stream is not None
        snapshot, events = await self.reader.listen(stream)
        async with snapshot, events:
            for path, version, _, diff in await snapshot.rows():
                add_row(self.followed, (path, version), diff)
            self._listening += 1
            async for event in events:
                if isinstance(event, Sealed):
                    self.bars.update(bar, completed=self.walk.complete_by(event.time))
                    continue
                for path, version, _, diff in event.updates:
                    if not path:
                        return
                    add_row(self.followed, (path, version), diff)

    async def check(self) -> tuple[int, int]:
        """Against git; returns how many times and rows were compared."""
        sinces = [end_of((await self.ix.description(name)).since) for name in self.folders]
        since = max(sinces, default=0)  # an earlier run may have given up history
        times = [time for time in self.walk.samples() if time >= since] or [TIME_MAX]
        bar = self.bars.add_task("checked", total=len(times) + 1)
        actual = await self._contents(times)
        rows = 0
        for time in times:
            expected = await self._by_git(time)
            compare(expected, actual[time], f"the commits authored by {time}")
            rows += len(expected)
            self.bars.advance(bar)
        compare(expected, self.followed, "the subscriber's contents")
        end = max(self.walk.end, self._sealed)
        await self.ix.allow_compaction([(stream, end) for stream in self.folders.values()])
        while requests := await self.ix.step():
            for request in requests:
                await self.ix.apply(request.stream, await self.ix.compact(request))
        compare(expected, (await self._contents([TIME_MAX]))[TIME_MAX], "the rest of history")
        self.bars.advance(bar)
        return len(times), rows

    async def _contents(self, times: list[int]) -> dict[int, Counter[Row]]:
        """All that was authored by each of these times, summed over all streams."""
        found: dict[int, Counter[Row]] = {time: Counter() for time in times}
        for stream in self.folders.values():
            async with self.ix.snapshot(stream) as snapshot:
                for rows in snapshot.split(2):
                    async for path, version, at, diff in rows:
                        for time in times[bisect_left(times, at) :]:
                            add_row(found[time], (path, version), diff)
        return found

    async def _by_git(self, time: int) -> Counter[Row]:
        contents: Counter[Row] = Counter()
        for first, last in self.walk.runs_until(time):
            async for row in self.repository.tree(self.walk.commits[last]):
                add_row(contents, row, 1)
            if first > 0:
                async for row in self.repository.tree(self.walk.commits[first - 1]):
                    add_row(contents, row, -1)
        return contents


async def run(options: DemoOptions, console: Console) -> None:
    """The whole demo; raises if it cannot begin, or if a check fails."""
    repository = await Repository.find(options.repository)
    commits = await repository.first_parents()
    dates = await repository.author_dates()
    with directory_of(options) as directory:
        async with opened(options, directory, 2) as clients:
            name = f"git-{commits[0]}"
            async with clients[0].indexed(name) as ix, clients[1].indexed(name, readonly=True) as reader:
                known = await ix.register(COMMITS, str, int)
                async with ix.snapshot(known) as snapshot:
                    done = {update.key for update in await snapshot.rows()}
                walk = Walk(commits, dates, max(options.limit or len(commits), len(done)))
                with progress(console) as bars:
                    demo = IndexedDemo(ix, reader, repository, walk, bars)
                    before = SYSTEM.monotonic()
                    await demo.write_and_follow(known, done)
                    seconds = max(SYSTEM.monotonic() - before, 1e-9)
                    checked, rows = await demo.check()
                versions = clients[0].metrics["consensus.compare_and_set"].count
                counts = ix.counters()
    say(
        console,
        f"{demo.written:,} commits in {seconds:.1f} s: {demo.written / seconds:,.0f} commits/s",
        f"{demo.rows:,} rows in {len(demo.folders):,} streams; {walk.late:,} commits were late",
        f"{versions:,} versions for {demo.written:,} writes; {counts['compactions']:,} compactions",
        f"{checked} times ({rows:,} rows) and the subscriber's contents are what git says",
    )


def _by_folder(commit: GitCommit, time: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for path, version, diff in commit.updates:
        found.setdefault(_folder(path), []).append((path, version, time, diff))
    return found


def _folder(path: bytes) -> str:
    """The stream of a path: of the top-level folder it is in, or of the root."""
    folder, slash, _ = path.partition(b"/")
    return (folder.decode(errors="backslashreplace") if slash else ".") + "/"


async def _chunks(commits: AsyncIterator[GitCommit], size: int) -> AsyncIterator[list[GitCommit]]:
    some: list[GitCommit] = []
    async for commit in commits:
        some.append(commit)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some
