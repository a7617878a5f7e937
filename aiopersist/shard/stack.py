"""The stores, limits, clock and tasks that every part of a client uses, built once."""

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
from aiopersist.storage.cache import CacheBlob
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.stall import StallLog

T = TypeVar("T")

log = logging.getLogger("aiopersist").getChild("maintenance")

ON_THE_LOOP_BYTES = 32 * 1024  # the work on fewer takes less time than reaching a thread
SLICE_BYTES = 160 * 1024  # of plain values: to decode or to sort them takes about a millisecond
ON_THE_LOOP_ROWS = 512  # the same for work that takes time for each row
SIGNATURE_MAX = 64  # characters: the id of a reader stands in the state
_UNUSUAL = re.compile(r"[^A-Za-z0-9._:/-]")
THREADS = 4  # for work on columns, whose kernels release the GIL; more would only cost memory


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
    """Of this client, to other clients that race with it."""
    threads: Threads = field(default_factory=partial(Threads, THREADS, "aiopersist compute"))
    thread: ThreadPoolExecutor | None = None
    """The only thread to compute on; `None`: any of `threads`. See `on_one_thread`."""
    senders: dict[Callable[[], Awaitable[None]], str] = field(default_factory=dict)
    """Wait until no append of a handle is under way, and no outcome unknown. By shard. A handle that is
    closed stays here until its last append is settled."""
    turns: ReadTurns = field(default_factory=ReadTurns)
    """Of reads for clients that may be many, and slow."""
    readonly: bool = False
    """Whether nothing may be written, leases included."""
    metrics: Metrics = field(default_factory=NoMetrics)
    """Counts what the client does."""
    tracing: Tracing = NO_TRACING
    """Spans of what the client does."""

    def stall_log(self, what: Callable[[], str]) -> StallLog:
        """The log of a wait that begins now; a long one is counted."""
        return StallLog(what, self.runtime, self.metrics.stalled)

    @contextmanager
    def work(self, kind: str, shard: str) -> Iterator[OngoingWork]:
        """Surrounds long work on a shard, a `compaction` or a `collection`: it is counted, timed and traced.
        The caller says whether anything was done."""
        began = self.runtime.monotonic()
        with self.tracing.span(kind, shard), self.metrics.work(kind) as work:
            yield work
        if work.done:
            seconds = self.runtime.monotonic() - began
            extra = {"op": kind, "shard": shard, "seconds": seconds}
            log.debug("a %s of shard %r took %.3f s", kind, shard, seconds, extra=extra)

    def signed(self, id: str) -> str:
        """`id` with the name of this client and its process: so people see who owns a registration."""
        name, process = self.settings.client_name, self.runtime.process()
        return f"{id}@{_UNUSUAL.sub('-', f'{name}/{process}' if name else process)[:SIGNATURE_MAX]}"

    async def compute(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `work`, which takes more than a millisecond, on a worker thread. A cancelled caller stops
        waiting; the work goes on, and its result is dropped."""
        if self.thread is not None:
            loop = asyncio.get_running_loop()
            try:
                running = loop.run_in_executor(self.thread, partial(work, *args, **kwargs))
            except RuntimeError:
                pass  # all executors end with the main thread; the loop may go on in another one
            else:
                return await running
        return await self.threads.run(partial(work, *args, **kwargs))

    @contextmanager
    def on_one_thread(self) -> Iterator["Stack"]:
        """A stack that computes on a thread of its own, for long work in bounded memory: an allocator reuses
        memory that the same thread freed, but not memory that another thread freed."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="aiopersist compute")
        try:
            yield replace(self, thread=thread)
        finally:
            thread.shutdown(wait=False)

    async def imported(self, *modules: str) -> None:
        """Return when these are imported: on a worker thread, unless they are there."""
        if not are_imported(modules):
            await self.compute(import_all, modules)

    async def ready_to_convert(self, schema: Schema[Any, Any, Any] | None = None) -> None:
        """Import what the conversion of Python values needs, a second at the first time, on a worker thread;
        nothing where the `schema` has plain values. What sorts lists is imported after that, beside the
        caller."""
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
        """`compute_few` for the background. What takes a millisecond is done in a turn of the loop of its
        own: a thread may hold the interpreter's lock for five, and the loop would wait for it."""
        if ON_THE_LOOP_BYTES < size <= SLICE_BYTES:
            await self.runtime.sleep(0)
            return work(*args)
        return await self.compute_few(size, work, *args)
