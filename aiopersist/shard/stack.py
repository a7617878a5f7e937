"""The stores, limits, clock and tasks that all parts of a client use, built once."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from aiopersist.base.runtime import Runtime
from aiopersist.base.settings import Settings
from aiopersist.base.supervisor import Supervisor
from aiopersist.base.threads import Threads
from aiopersist.data.lazy import PARQUET, are_imported, import_all, import_polars, is_warm, warm_up
from aiopersist.data.types.schema import Schema, has_lists, plain_types
from aiopersist.measure.metrics import Metrics, NoMetrics, OngoingWork
from aiopersist.measure.tracing import NO_TRACING, Tracing
from aiopersist.shard.clock import StoreClock
from aiopersist.shard.follow import Follower
from aiopersist.shard.turns import ReadTurns
from aiopersist.shard.twin import Twin
from aiopersist.storage.cache import CacheBlob
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.stall import StallLog

T = TypeVar("T")

log = logging.getLogger("aiopersist").getChild("maintenance")

ON_THE_LOOP_BYTES = 32 * 1024  # work on fewer takes less time than the way to a thread
SLICE_BYTES = 160 * 1024  # rows of plain values: to decode or sort them takes about a millisecond
ON_THE_LOOP_ROWS = 512  # the same for work on single rows
SIGNATURE_MAX = 64  # characters: the state has the ids of readers
_UNUSUAL = re.compile(r"[^A-Za-z0-9._:/-]")
THREADS = 4  # threads for work on columns, whose kernels release the GIL; more would only cost memory


@dataclass(frozen=True, slots=True)
class Stack:
    """The two stores behind their wrappers, the limits, the clock, and the owner of tasks."""

    blob: CacheBlob
    consensus: Consensus
    settings: Settings
    runtime: Runtime
    supervisor: Supervisor
    follower: Follower
    """Brings news of the shards that have waiters."""
    clock: StoreClock
    """The clock of the consensus store."""
    name: str
    """The name of this client for other clients that race with it."""
    threads: Threads = field(default_factory=partial(Threads, THREADS, "aiopersist compute"))
    thread: ThreadPoolExecutor | None = None
    """The only thread for work; `None`: any of `threads`. See `on_one_thread`."""
    senders: dict[Callable[[], Awaitable[None]], str] = field(default_factory=dict)
    """By shard, functions that wait until no append of a handle is under way, and all outcomes are known. A
    closed handle stays here until its last append is settled."""
    twin: Twin = field(default_factory=Twin)
    """The client for threads that block."""
    turns: ReadTurns = field(default_factory=ReadTurns)
    """Turns of reads for many slow clients."""
    readonly: bool = False
    """Whether the client may not write, leases included."""
    metrics: Metrics = field(default_factory=NoMetrics)
    """Counts what the client does."""
    tracing: Tracing = NO_TRACING
    """Spans of what the client does."""

    def stall_log(self, what: Callable[[], str]) -> StallLog:
        """The log of a wait that begins now; long waits are counted."""
        return StallLog(what, self.runtime, self.metrics.stalled)

    @contextmanager
    def work(self, kind: str, shard: str) -> Iterator[OngoingWork]:
        """A scope for long work on a shard, a `compaction` or a `collection`, which counts, times and traces
        it. The caller notes whether anything was done."""
        began = self.runtime.monotonic()
        with self.tracing.span(kind, shard), self.metrics.work(kind) as work:
            yield work
        if work.done:
            seconds = self.runtime.monotonic() - began
            extra = {"op": kind, "shard": shard, "seconds": seconds}
            log.debug("a %s of shard %r took %.3f s", kind, shard, seconds, extra=extra)

    def signed(self, id: str) -> str:
        """`id` with the name of this client and its process, for people who look at registrations."""
        name, process = self.settings.client_name, self.runtime.process()
        return f"{id}@{_UNUSUAL.sub('-', f'{name}/{process}' if name else process)[:SIGNATURE_MAX]}"

    async def compute(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `work`, which takes more than a millisecond, on a worker thread. A cancelled caller stops
        waiting; the work continues, and its result is dropped."""
        if self.thread is not None:
            loop = asyncio.get_running_loop()
            try:
                running = loop.run_in_executor(self.thread, partial(work, *args, **kwargs))
            except RuntimeError:
                pass  # all executors end with the main thread; the loop may run on in another thread
            else:
                return await running
        return await self.threads.run(partial(work, *args, **kwargs))

    @contextmanager
    def on_one_thread(self) -> Iterator["Stack"]:
        """A stack that works on a thread of its own, for long work in bounded memory: an allocator reuses
        memory that the same thread freed, but not memory of other threads."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="aiopersist compute")
        try:
            yield replace(self, thread=thread)
        finally:
            thread.shutdown(wait=False)

    async def imported(self, *modules: str) -> None:
        """Import these on a worker thread, unless they are imported."""
        if not are_imported(modules):
            await self.compute(import_all, modules)

    async def ready_to_convert(self, schema: Schema[Any, Any, Any] | None = None) -> None:
        """Import on a worker thread what the conversion of Python values needs, which takes a second at the
        first time; nothing if the `schema` has plain values. The library that sorts lists is imported later,
        beside the caller."""
        plain = None if schema is None else plain_types(schema)
        if not is_warm() and (plain is None or plain.encoders is None):
            await self.compute(warm_up)
            if schema is not None and not any(has_lists(field.type) for field in schema.arrow_schema):
                return
            self.supervisor.background(self.compute(import_polars), "import polars")

    async def ready_to_encode(self, schema: Schema[Any, Any, Any]) -> None:
        """Import what parts and their statistics need, the first time, on a worker thread."""
        await self.imported(*PARQUET)
        await self.ready_to_convert(schema)

    async def compute_rows(self, rows: Any, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)` on these rows, columns of Arrow: on a worker thread unless they are few and small."""
        are_few = rows.num_rows <= ON_THE_LOOP_ROWS and rows.nbytes <= ON_THE_LOOP_BYTES
        return work(*args) if are_few else await self.compute(work, *args)

    async def compute_few(self, size: float, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)` on about `size` bytes of updates: on a worker thread unless they are few."""
        return work(*args) if size <= ON_THE_LOOP_BYTES else await self.compute(work, *args)

    async def compute_slice(self, size: float, work: Callable[..., T], *args: Any) -> T:
        """`compute_few` for the background. Work of a millisecond gets its own turn of the loop: a thread may
        hold the interpreter's lock for five, and the loop would wait for it."""
        if ON_THE_LOOP_BYTES < size <= SLICE_BYTES:
            await self.runtime.sleep(0)
            return work(*args)
        return await self.compute_few(size, work, *args)
