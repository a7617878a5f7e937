"""A location where one client meets a fault, the answers that callers got, and whether these are true at the
end.

1. A scene prepares itself, and gives the call that meets trouble.
2. Whatever that raised is among the errors that a call may raise then; the outcome of an append is settled.
3. The same client goes on: it appends, reads, listens, compacts, collects. Then a fresh one does, after every
   lease has run out, and sweeps.
4. All that was acknowledged is there once, what was refused is not, what nobody knows is there once or not.
   Every blob that is named is there, no other is; no task is left.
"""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from tests.conftest import StoreUrls
from tests.cuts.faults import PAUSE_S, Fault, Trouble, TroubledBlob, TroubledConsensus
from tests.support.schemas import SCHEMA

NAME, OTHER = "t", "u"
LIMITS: dict[str, Any] = {
    "inline_writes_single_max_bytes": 60,
    "blob_target_size": 200,
    "rollup_every": 4,
    "watch_timeout_s": 0.02,
    "blob_cache_bytes": 0,
    "once_keep_s": 10 * PAUSE_S,
}
MAY_RAISE = (ap.StorageUnavailable, ap.Indeterminate, ap.LeaseExpired, ap.BatchExpired)
END_S = 45.0  # for what takes a tenth of a second

Row = tuple[str, int]


@dataclass(eq=False)
class Told:
    """Rows that were given to be appended, and whether they were, as far as anyone was told."""

    shard: str
    rows: list[Row]
    happened: bool | None = None


def few(mark: str) -> list[Row]:
    """So few that they stay in the state."""
    return [(f"{mark}{n}", n) for n in range(2)]


def many(mark: str) -> list[Row]:
    """Several parts of them."""
    return [(f"{mark}{n}" + 90 * "-", n) for n in range(4)]


def at(time: int, rows: list[Row]) -> list[Any]:
    return [(key, val, time, 1) for key, val in rows]


@dataclass(eq=False)
class Stage:
    """See the header."""

    blob: Any
    consensus: Any
    place: Path | None
    retry_timeout_s: float | None
    trouble: Trouble = field(default_factory=Trouble)
    told: list[Told] = field(default_factory=list)
    client: Any = None
    writers: list[tuple[Any, list[Told]]] = field(default_factory=list)
    after: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """What the scene checks, in the same client, once all is well again."""
    afresh: list[Callable[[Any], Awaitable[None]]] = field(default_factory=list)
    """And in a fresh one."""
    gone: set[str] = field(default_factory=set)
    """Shards that may have been dropped."""
    claim_s: float = 61.0
    """After it work is claimed anew that no process could give back."""
    marks: int = 0

    def open(self, trouble: Trouble | None = None, **limits: Any) -> Any:
        trouble = trouble or self.calm()
        return ap.open(
            blob=TroubledBlob(self.blob, trouble),  # type: ignore[arg-type]
            consensus=TroubledConsensus(self.consensus, trouble),  # type: ignore[arg-type]
            settings=ap.Settings(**{**LIMITS, **limits}),
            maintenance=False,
        )

    def opened(self, **limits: Any) -> Any:
        """The client that meets trouble."""
        return self.open(self.trouble, retry_timeout_s=self.retry_timeout_s, **limits)

    def calm(self) -> Trouble:
        """Of others, whose clock is the same."""
        calm = Trouble()
        calm.ahead_s = self.trouble.ahead_s
        return calm

    # --- what is told ---------------------------------------------------------------------------------

    async def writer(self, name: str = NAME) -> Any:
        return await self.client.writer(name, SCHEMA)

    async def filled(self, name: str = NAME, *, compact: bool = False) -> Any:
        """A writer of a shard with a history, whose since has moved on."""
        w = await self.writer(name)
        for time, rows in enumerate([many("b"), few("c"), many("d")]):
            rows = [(f"{key}{name}", val) for key, val in rows]
            await self.append(
                w,
                rows,
                lambda time=time, rows=rows: w.compare_and_append(at(time, rows), time, time + 1),
                name,
            )
        async with self.client.critical_since(name, "mover") as c:
            await c.compare_and_downgrade_since(0, 0, 2)
        if compact:
            await self.client.admin.force_compaction(name)
        return w

    async def append(
        self, w: Any, rows: list[Row], call: Callable[[], Awaitable[Any]], name: str = NAME
    ) -> Any:
        """Await the append of `rows` by `w`, and note what was told of it."""
        told = Told(name, rows, None)
        self.told.append(told)
        self.writers.append((w, [told]))
        try:
            result = await call()
        except (ap.StorageUnavailable, ap.LeaseExpired, ap.BatchExpired):
            told.happened = False
            raise
        told.happened = True
        return result

    async def settle(self) -> None:
        """The outcome of the last append of each writer, if its caller was not told."""
        for w, (told,) in self.writers:
            if told.happened is not None:
                continue
            try:
                outcome = await w.settle()
            except ap.Indeterminate:
                continue
            told.happened = isinstance(outcome, ap.Committed)

    # --- what is so -----------------------------------------------------------------------------------

    async def goes_on(self, client: Any, *, sweeps: bool = False) -> None:
        """Everything that a client does."""
        names = sorted({told.shard for told in self.told} - self.gone)
        for name in names:
            await self.check(client, name)
            self.marks += 1
            rows = many(f"after{self.marks}")
            async with client.writer(name, SCHEMA) as w:
                self.told.append(Told(name, rows, True))
                await w.write(rows)
            await client.admin.force_compaction(name)
            await client.admin.force_gc(name)
            await self.check(client, name)
            report = await client.admin.fsck(name)
            assert report.ok, report.problems
        done = await client.admin.maintain()
        assert not done.failures, done.failures
        if sweeps:
            await client.admin.sweep_leaked_blobs(dry_run=False)
            usage = await client.admin.usage()
            assert usage.total == usage.referenced, usage

    async def check(self, client: Any, name: str) -> None:
        """The contents, in a snapshot and as they are followed, and all that `fsck` knows."""
        async with client.reader(name, SCHEMA) as r:
            async with r.snapshot() as snapshot:
                self.check_rows(name, await snapshot.rows())
            async with r.subscribe() as listen:
                upper, followed = r.upper, []
                async for item in listen:
                    if isinstance(item, ap.Progress):
                        if upper <= item.upper:
                            break
                    else:
                        followed += [(u.key, u.val, u.diff) for u in item]
            self.check_rows(name, followed)

    def check_rows(self, name: str, rows: list[Any]) -> None:
        """The contents agree with the answers; unknown outcomes are known from now on."""
        there = {(key, val): diff for key, val, diff in rows}
        assert len(there) == len(rows)
        for told in self.told:
            if told.shard != name:
                continue
            diffs = {there.pop(row, 0) for row in told.rows}
            if told.happened is None and diffs in ({0}, {1}):
                told.happened = diffs == {1}
            assert diffs == {int(bool(told.happened))}, (told, diffs)
        assert not there, f"these were never appended: {there}"

    async def verify(self) -> None:
        """See the header, 2 to 4."""
        if self.trouble.fault in (Fault.GONE, Fault.LOST_AND_GONE):
            self.trouble.ahead_s += self.claim_s
        if self.trouble.fault is Fault.LATE:
            await self.trouble.land()
        await self.settle()
        for check in self.after:
            await check()
        if self.client is not None:
            await self.goes_on(self.client)
            await self.client.aclose()
        await self.trouble.land()
        self.trouble.ahead_s += PAUSE_S
        async with self.open() as fresh:
            for afresh in self.afresh:
                await afresh(fresh)
            await self.goes_on(fresh, sweeps=True)
        async with self.open() as fresh:
            await self.goes_on(fresh)

    async def others_sweep(self) -> None:
        async with self.open() as other:
            await other.maintain()
            await other.sweep_leaked_blobs(dry_run=False)

    async def others_pass_by(self) -> None:
        """So many versions later those of before are collected."""
        async with self.open() as other:
            for name in await other.list_shards():
                if name in {told.shard for told in self.told} - self.gone:
                    for keep in (3, 4, 5, None):
                        await other.retain(name, keep)
                        await other.force_gc(name)


@asynccontextmanager
async def staged(
    place: Path | None, retry_timeout_s: float | None, urls: StoreUrls | None = None
) -> AsyncIterator[Stage]:
    """A stage in memory, on disk at `place`, or in these stores; nothing is left running behind it."""
    if place is not None:
        urls = StoreUrls(f"file://{place}/blob?fsync=off", f"sqlite://{place}/state.db")
    blob: Any = MemoryBlob("") if urls is None else ap.open_blob(urls.blob)
    consensus: Any = MemoryConsensus("") if urls is None else ap.open_consensus(urls.consensus)
    others = asyncio.all_tasks()
    stage = Stage(blob, consensus, place, retry_timeout_s)
    stage.trouble.sweep, stage.trouble.pass_by = stage.others_sweep, stage.others_pass_by
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # batches of calls that were cut off
        try:
            async with asyncio.timeout(END_S):
                yield stage
        finally:
            if stage.client is not None:
                await stage.client.aclose()
            gc.collect(0)
            await blob.aclose()
            await consensus.aclose()
    left = asyncio.all_tasks() - others
    assert not left, left
