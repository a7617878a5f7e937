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
