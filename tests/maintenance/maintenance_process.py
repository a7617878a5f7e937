"""What the tests of maintenance run in other processes: `python maintenance_process.py killed`, `... shared`.

- `killed` serves runs that end by SIGKILL at a call to a store. It imports everything once and forks for
  each run, before any loop or thread is there, so that a run costs milliseconds.
- `shared` makes rounds of maintenance, and tells at the end what it asked of the stores.
"""

import asyncio
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiobotocore.session  # noqa: F401  # a fork must not have to import it, nor the others
import asyncpg  # noqa: F401
import pandas  # noqa: F401  # pyarrow imports it where it is there
import pyarrow.compute
import pyarrow.parquet  # noqa: F401

import aiopersist as ap
from aiopersist.maintenance.rounds import MaintenanceRound
from aiopersist.state.diff import decode_diff
from aiopersist.storage.urls import open_blob, open_consensus
from aiopersist.testing.faults import FaultyBlob, FaultyConsensus, Outcome

Act = Callable[[], Awaitable[Any]]

BUSY, ENDED = "busy", "ended"  # shards: one that owes work, and one that no client can read or write
KEPT_TAG, OLD_TAG, NEW_TAG = "kept", "old", "new"
BEFORE, DURING, AFTER = "before", "during", "after"
FREE = ("watch", "now")  # calls that change nothing and may be any number
RUN_S = 20  # a run that hangs is ended, and is no run that was killed as it should be
BETWEEN_ROUNDS_S = 0.02

LIMITS: dict[str, Any] = {
    "inline_writes_single_max_bytes": 0,
    "blob_target_size": 150,
    "row_group_bytes": 80,
    "blob_cache_bytes": 0,
    "watch_timeout_s": 0.02,
}


# --- killed ------------------------------------------------------------------------------------------


class Killing:
    """Ends this process at the `at`-th call that comes after `begin`: before the call happened, after
    it, or somewhere in it."""

    losing_hints = False

    def __init__(self, at: int, moment: str) -> None:
        self.at, self.moment = at, moment
        self.calls: int | None = None

    def begin(self) -> None:
        self.calls = 0

    async def call(self, op: str, act: Act) -> Any:
        if self.calls is None or op in FREE:
            return await act()
        self.calls += 1
        if self.calls == self.at:
            await self._die(act)
        return await act()

    async def _die(self, act: Act) -> None:
        if self.moment == AFTER:
            await act()
        if self.moment == DURING:
            going = asyncio.ensure_future(act())
            await asyncio.wait([going], timeout=random.Random(self.at).uniform(0, 0.003))
        os.kill(os.getpid(), signal.SIGKILL)


class KillingBlob(FaultyBlob):
    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        async def listed() -> list[tuple[str, int]]:
            return [item async for item in self.inner.list(prefix)]

        for item in await self.faults.call("list", listed):
            yield item


async def compact(client: ap.Client) -> None:
    await client.admin.force_compaction(BUSY)
    await client.admin.force_gc(BUSY)


async def finalize(client: ap.Client) -> None:
    await client.admin.finalize(ENDED)


async def maintain(client: ap.Client) -> None:
    await client.admin.maintain()


async def tag(client: ap.Client) -> None:
    """One tag is added, another one is dropped, and what nobody needs is collected."""
    with suppress(ap.TagExists):
        await client.tag(BUSY, NEW_TAG)
    with suppress(ap.UnknownTag):
        await client.untag(BUSY, OLD_TAG)
    await compact(client)


WORKS = {work.__name__: work for work in (compact, finalize, maintain, tag)}


@asynccontextmanager
async def stores(blob: str, consensus: str) -> AsyncIterator[tuple[Any, Any]]:
    """Both, opened here and closed at the end."""
    opened = open_blob(blob), open_consensus(consensus)
    try:
        yield opened
    finally:
        for store in opened:
            await store.aclose()


async def run_killed(blob: str, consensus: str, work: str, at: int, moment: str) -> None:
    killing: Any = Killing(at, moment)
    async with stores(blob, consensus) as (inner_blob, inner_consensus):
        client = await ap.open(
            blob=KillingBlob(inner_blob, killing),
            consensus=FaultyConsensus(inner_consensus, killing),
            settings=ap.Settings(**LIMITS),
            maintenance=False,
        )
        killing.begin()
        async with client:  # what it gives back at the end are calls, too
            await WORKS[work](client)


def forked(arguments: dict[str, Any]) -> None:
    """One run, in a process of its own."""
    signal.alarm(RUN_S)
    os.environ.update(arguments.pop("environment"))
    status = 1
    try:
        asyncio.run(run_killed(**arguments))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    """Each line asks for a run; the answer is how it ended: 0, an exit status, or minus a signal."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            forked(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


# --- shared ------------------------------------------------------------------------------------------


class Record:
    """What this process has asked of the stores, and was done."""

    def __init__(self) -> None:
        self.uploaded: list[str] = []
        self.deleted: list[str] = []
        self.named: list[str] = []
        self.replacements = 0
        self.claims: list[tuple[str, int, str]] = []
        self.writers: set[str] = set()

    def version(self, key: str, data: bytes) -> None:
        """A version that was written, and what it is the first to name."""
        changes = decode_diff(data).changes
        batches = changes.batches.values()
        self.named += [part.key for batch in batches for part in batch.parts if part.key is not None]
        self.named += [rollup.key for rollup in changes.rollups.values()]
        self.replacements += len(batches)
        self.claims += [(key, first, claim.writer) for first, claim in changes.claims.items()]
        self.writers |= changes.writers.keys()


class Recording:
    """Lets every call through."""

    losing_hints = False

    async def call(self, op: str, act: Act) -> Any:
        return await act()

    def outcome(self, op: str) -> Outcome:
        return Outcome.DONE

    async def wait(self) -> None:
        return None


class RecordingBlob(FaultyBlob):
    def __init__(self, inner: Any, record: Record) -> None:
        super().__init__(inner, Recording())  # type: ignore[arg-type]
        self.record = record

    async def set(self, key: str, data: bytes | memoryview) -> None:
        await super().set(key, data)
        self.record.uploaded.append(key)

    async def delete(self, keys: Sequence[str]) -> None:
        await super().delete(keys)
        self.record.deleted += keys


class RecordingConsensus(FaultyConsensus):
    def __init__(self, inner: Any, record: Record) -> None:
        super().__init__(inner, Recording())  # type: ignore[arg-type]
        self.record = record

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        done = await super().compare_and_set(key, expected, data)
        if done:
            self.record.version(key, data)
        return done


async def rounds_until_told(client: ap.Client) -> MaintenanceRound:
    """Rounds until a line comes, and then until there is nothing left to look at; their sum."""
    told = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    total = MaintenanceRound()
    while True:
        last = told.done()
        done = await client.admin.maintain()
        total = total.plus(done)
        if last and not done.looked_at:
            return total
        await asyncio.sleep(BETWEEN_ROUNDS_S)


async def share(blob: str, consensus: str) -> None:
    """Begins at the first line, ends after the second, and prints what was done."""
    record = Record()
    async with stores(blob, consensus) as (inner_blob, inner_consensus):
        client = await ap.open(
            blob=RecordingBlob(inner_blob, record),
            consensus=RecordingConsensus(inner_consensus, record),
            settings=ap.Settings(**LIMITS),
            maintenance=False,
        )
        async with client:
            print("ready", flush=True)
            sys.stdin.readline()
            total = await rounds_until_told(client)
        requests = {op: metrics.count for op, metrics in client.metrics.items()}
        told = {**vars(record), "writers": sorted(record.writers), "requests": requests}
        print(json.dumps({**told, "round": total.model_dump()}), flush=True)


SCRIPT = Path(__file__).with_name("maintenance_process.py")


Urls = tuple[str, str]


def urls_in(folder: Path) -> Urls:
    return f"file://{folder}/blob?fsync=off", f"sqlite://{folder}/state.db"


def opened(urls: Urls) -> Any:
    return ap.open(blob=urls[0], consensus=urls[1], settings=ap.Settings(**LIMITS), maintenance=False)


if __name__ == "__main__":
    if sys.argv[1] == "killed":
        serve()
    else:
        asyncio.run(share(*sys.argv[2:4]))
