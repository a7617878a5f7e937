"""`aiopersist demo --indexed`: the history of a git repository by author date, in many streams.

The demo walks the commits in order, and writes each at its author date, so writes come late and out of order.
There is a stream for each top-level folder (key: path, value: mode, blob id and size), and one with the ids
of commits. One write adds the changes of a commit and its id, so a repeated walk continues after the last
one. All streams are sealed together, up to the oldest author date of the remaining commits. A subscriber with
its own client follows every stream.

Then the contents are compared with git. A run of consecutive commits changes the tree before its first commit
to the tree of its last one. So the contents as of a time are sums of trees, independent of the written
changes. They are compared with the streams, with the rows of the subscriber, and again with the streams after
all history was removed.
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

AT_ONCE = 64  # commits written at once
SAMPLES = 6  # times at which the contents are compared
TREES_MAX = 60  # trees to read from git, per time
COMMITS = "commits"
FOLLOWED_S = 60.0  # until the subscriber listens to all streams
END = (b"", FileVersion(mode=0, blob=b"", size=None))  # no path; written and retracted to end the walk


class Walk:
    """The commits, their author dates, and the times up to which all streams can be sealed."""

    def __init__(self, commits: list[str], dates: dict[str, int], limit: int | None) -> None:
        self.commits = commits[:limit]
        self.times = [dates[commit] for commit in self.commits]
        self._sorted = sorted(self.times)
        every = [dates[commit] for commit in commits]  # also beyond the limit
        end = max(every) + 1
        self.complete = [*list(accumulate(reversed([*every[1:], end]), min))[::-1]]
        """After each commit, a time such that no later commit is older."""
        self.end = self.complete[len(self.commits) - 1]

    @property
    def late(self) -> int:
        """The number of commits with an author date before that of an earlier one."""
        newest = accumulate(self.times, max)
        return sum(time < before for time, before in zip(self.times[1:], newest, strict=False))

    def complete_by(self, time: int) -> int:
        """The number of commits that are complete once all streams are sealed at `time`."""
        return bisect_left(self._sorted, time)

    def runs_until(self, time: int) -> list[tuple[int, int]]:
        """The first and the last number of each run of commits authored by `time`."""
        by = groupby(range(len(self.times)), key=lambda number: self.times[number] <= time)
        rows = [list(numbers) for is_by, numbers in by if is_by]
        return [(row[0], row[-1]) for row in rows]

    def samples(self) -> list[int]:
        """The times to compare: the last one, and some that need few trees."""
        times = sorted(set(self.times))
        spread = {times[round(n * (len(times) - 1) / (SAMPLES - 1))] for n in range(SAMPLES)}
        few = {time for time in spread if 2 * len(self.runs_until(time)) <= TREES_MAX}
        return sorted({*few, times[-1]})


class IndexedDemo:
    """A run: one client writes `ix`, another one follows it with `reader`."""

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
        """Write all commits, and wait until the subscriber has seen them. Commits in `done` are not written
        again; only their folders are registered."""
        self._sealed = end_of((await self.ix.description(COMMITS)).upper)
        written = self.bars.add_task("written", total=len(self.walk.commits))
        followed = self.bars.add_task("followed", total=len(self.walk.commits))
        async with (
            asyncio.TaskGroup() as tasks,
            aclosing(self.repository.changes(self.walk.commits)) as stream,
        ):
            async for chunk in _chunks(stream, AT_ONCE):
                for folder in {_folder(change.path) for commit in chunk for change in commit.changes}:
                    if folder not in self.folders:
                        self.folders[folder] = await self.ix.register(folder, bytes, FileVersion)
                        tasks.create_task(self._follow(folder, followed))
                await self._write(commits, [commit for commit in chunk if commit.id not in done])
                self.bars.advance(written, len(chunk))
            await self._end(commits)

    async def _write(self, commits: Stream[str, int], chunk: list[GitCommit]) -> None:
        """The calls of a chunk are made in order; none waits for the one before."""
        calls = []
        for commit in chunk:
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
        self.written += len(chunk)

    async def _end(self, commits: Stream[str, int]) -> None:
        """Seal the complete times, and tell the subscriber that this is the end."""
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
        """Compare with git. Returns the numbers of compared times and rows."""
        sinces = [end_of((await self.ix.description(name)).since) for name in self.folders]
        since = max(sinces, default=0)  # an earlier run may have removed history
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
        """The contents as of each of these times, summed over all streams."""
        contents: dict[int, Counter[Row]] = {time: Counter() for time in times}
        for stream in self.folders.values():
            async with self.ix.snapshot(stream) as snapshot:
                for rows in snapshot.split(2):
                    async for path, version, at, diff in rows:
                        for time in times[bisect_left(times, at) :]:
                            add_row(contents[time], (path, version), diff)
        return contents

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
    """Run the demo; raises if it cannot start or a check fails."""
    repository = await Repository.find(options.repository)
    commits = await repository.first_parents()
    dates = await repository.author_dates()
    with directory_of(options) as directory:
        async with opened(options, directory, 2) as clients:
            name = f"git-{commits[0]}"
            async with clients[0].indexed(name) as ix, clients[1].indexed(name, readonly=True) as reader:
                commit_ids = await ix.register(COMMITS, str, int)
                async with ix.snapshot(commit_ids) as snapshot:
                    done = {update.key for update in await snapshot.rows()}
                walk = Walk(commits, dates, max(options.limit or len(commits), len(done)))
                with progress(console) as bars:
                    demo = IndexedDemo(ix, reader, repository, walk, bars)
                    before = SYSTEM.monotonic()
                    await demo.write_and_follow(commit_ids, done)
                    seconds = max(SYSTEM.monotonic() - before, 1e-9)
                    checked, rows = await demo.check()
                versions = clients[0].metrics["consensus.compare_and_set"].count
                counts = ix.counters()
    say(
        console,
        f"{demo.written:,} commits in {seconds:.1f} s: {demo.written / seconds:,.0f} commits/s",
        f"{demo.rows:,} rows in {len(demo.folders):,} streams; {walk.late:,} commits were late",
        f"{versions:,} versions for {demo.written:,} writes; {counts['compactions']:,} compactions",
        f"{checked} times ({rows:,} rows) and the subscriber's contents equal git's",
    )


def _by_folder(commit: GitCommit, time: int) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {}
    for path, version, diff in commit.updates:
        rows.setdefault(_folder(path), []).append((path, version, time, diff))
    return rows


def _folder(path: bytes) -> str:
    """The stream of a path: its top-level folder, or the root."""
    folder, slash, _ = path.partition(b"/")
    return (folder.decode(errors="backslashreplace") if slash else ".") + "/"


async def _chunks(commits: AsyncIterator[GitCommit], size: int) -> AsyncIterator[list[GitCommit]]:
    chunk: list[GitCommit] = []
    async for commit in commits:
        chunk.append(commit)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
