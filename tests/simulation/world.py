"""The world of a game: stores that fail, a clock that jumps, and lines that are cut.

All clients share the two stores, with their faults, and the store's clock. Each process has a `Line` of
its own to them: once it is cut, nothing arrives any more of what the process still does. That is how a
process is killed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiopersist as ap
from aiopersist.shard.log import consensus_key
from aiopersist.state.diff import apply, decode_diff
from aiopersist.state.model import State
from aiopersist.state.rollup_file import decode_rollup
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.support.internals import stack_of

# A busy world is no damage: with these an action may end, and be logged, once leases run out.
HONEST = (ap.LeaseExpired, ap.BatchExpired, ap.Indeterminate, ap.OpaqueMismatch, ap.StorageUnavailable)


class Clock:
    """How far the store's clock is ahead of the real one. A jump ends the leases of all handles without a
    recent heartbeat."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def jump(self, seconds: float) -> None:
        self.ahead_s += seconds


class Line:
    """Between one process and the stores; it passes for the `Faults` of its stores."""

    def __init__(self, faults: Faults, clock: Clock) -> None:
        self.faults = faults
        self.clock = clock
        self.is_cut = False

    @property
    def losing_hints(self) -> bool:
        return self.faults.losing_hints

    async def call(self, op: str, act: Callable[[], Awaitable[Any]]) -> Any:
        await self.wait()
        result = await self.faults.call(op, act)
        await self.wait()
        return result

    def outcome(self, op: str) -> Outcome:
        return self.faults.outcome(op)

    async def wait(self) -> None:
        """For ever, once it is cut."""
        if self.is_cut:
            await asyncio.Event().wait()


class LineBlob(FaultyBlob):
    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        async for item in super().list(prefix):
            await self.faults.wait()
            yield item


class LineConsensus(FaultyConsensus):
    async def now(self) -> float:
        line: Any = self.faults
        return float(await super().now() + line.clock.ahead_s)


class World:
    """See the header."""

    def __init__(self, faults: Faults, blob: str, consensus: str) -> None:
        self.faults = faults
        self.clock = Clock()
        self.blob = ap.open_blob(blob)
        self.consensus = ap.open_consensus(consensus)

    def line(self) -> Line:
        return Line(self.faults, self.clock)

    def open(self, line: Line, settings: ap.Settings, *, maintenance: bool) -> Any:
        between: Any = line
        return ap.open(
            blob=LineBlob(self.blob, between),
            consensus=LineConsensus(self.consensus, between),
            settings=settings,
            maintenance=maintenance,
        )

    async def aclose(self) -> None:
        await self.blob.aclose()
        await self.consensus.aclose()

    # --- what lies in the stores, told without any client --------------------------------------------

    async def blobs(self, shard_id: str) -> set[str]:
        return {key async for key, _ in self.blob.list(f"{shard_id}/")}

    async def named(self, shard_id: str) -> set[str]:
        """The blobs that live versions name: parts of each of them, rollups of the newest."""
        versions = await self.consensus.scan(consensus_key(shard_id), 0, 1_000_000)
        diffs = [decode_diff(version.data) for version in versions]
        latest = diffs[-1].rollup
        base = None if latest is None else await self._state(latest.key, latest.checksum)
        newest = _states(base, diffs)[-1]
        earliest = newest.rollups.get(versions[0].seqno)
        assert earliest is not None or versions[0].seqno == 0, "the earliest version has no rollup"
        begin = None if earliest is None else await self._state(earliest.key, earliest.checksum)
        batches = [batch for state in _states(begin, diffs) for batch in state.batches.values()]
        parts = {part.key for batch in batches for part in batch.parts if part.key is not None}
        return parts | {rollup.key for rollup in newest.rollups.values()}

    async def _state(self, key: str, checksum: str) -> State:
        data = await self.blob.get(key)
        assert data is not None, f"rollup {key} is named and is not there"
        return decode_rollup(data, checksum)


def _states(base: State | None, diffs: list[Any]) -> list[State]:
    """`base`, if there is one, and those after it."""
    states = [] if base is None else [base]
    for diff in diffs:
        if not states or diff.seqno > states[-1].seqno:
            states.append(apply(diff, states[-1] if states else None))
    return states


async def kill(line: Line, client: ap.Client | None, running: "asyncio.Task[Any]") -> None:
    """End a process in the middle of its work, without notice."""
    line.is_cut = True
    while not running.done():
        running.cancel()
        await asyncio.wait([running], timeout=0.01)
    while client is not None and (tasks := _tasks_of(client)):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=0.01)


def _tasks_of(client: ap.Client) -> "set[asyncio.Task[Any]]":
    supervisor = stack_of(client).supervisor
    supervisor._closed = True  # what is begun in the background from now on ends at once
    closing = client._closing
    return {*supervisor._tasks, *supervisor._loops, *([] if closing is None or closing.done() else [closing])}


class Complaints(logging.Handler):
    """What the library logged as failed, without what a busy world explains."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, HONEST):
            self.heard.append(f"{record.getMessage()} {error!r}")

    def __enter__(self) -> "Complaints":
        logging.getLogger("aiopersist").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("aiopersist").removeHandler(self)
