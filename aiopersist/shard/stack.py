"""What every part of a client works with, built once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio.to_thread

from aiopersist.resource import Supervisor
from aiopersist.runtime import Runtime
from aiopersist.settings import Settings
from aiopersist.storage.cache import CacheBlob
from aiopersist.storage.consensus import Consensus

T = TypeVar("T")

ON_THE_LOOP_BYTES = 32 * 1024  # less is worked on faster than a thread is reached
THREADS = 4  # for work on columns, whose kernels release the GIL; more would only cost memory


@dataclass(frozen=True, slots=True)
class Stack:
    """The two stores behind their wrappers, the limits, the clock, and the owner of tasks."""

    blob: CacheBlob
    consensus: Consensus
    settings: Settings
    runtime: Runtime
    supervisor: Supervisor
    threads: anyio.CapacityLimiter = field(default_factory=partial(anyio.CapacityLimiter, THREADS))

    async def compute(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `work` on a worker thread: for what takes more than a millisecond. A cancelled caller stops
        waiting; the work goes on, and its result is dropped."""
        return await anyio.to_thread.run_sync(
            partial(work, *args, **kwargs), abandon_on_cancel=True, limiter=self.threads
        )

    async def compute_few(self, size: int, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)`, about so many encoded bytes: on a worker thread unless they are few."""
        return work(*args) if size <= ON_THE_LOOP_BYTES else await self.compute(work, *args)
