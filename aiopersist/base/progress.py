"""The progress of long work, for those who wait for it.

Long work reports to the `Track` that runs it, if there is one. A context variable has the `Track`, so the
calls in between need no argument, and unwatched work costs one look at the variable. The newest report
replaces the one before, so a slow observer never delays the work.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class WorkDone(NamedTuple):
    """The progress of a step of long work."""

    step: str
    """The present step: `compaction`, `fsck`, ... A call may take several steps, each from 0 on."""
    done: int
    total: int | None
    """`None` if the end is unknown."""
    unit: str
    """The unit that is counted: `rows`, `parts`, `shards`, `tasks`."""


class Track(Generic[T]):
    """Watched long work: an async iterator of `WorkDone`, and an awaitable of the result.

        work = ap.track(client.admin.fsck("stock"))
        async for done in work:
            print(f"{done.done} of {done.total} {done.unit}")
        report = await work

    The work begins with the first step of the iteration, or with `await`. An iteration ends when the work
    ends, also with an error; then `await` returns the result, or raises the error. Each value is the newest;
    earlier ones may be skipped. If an iteration is left or cancelled, the work continues; `cancel` ends the
    work, and so does the cancellation of `await`.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._newest: WorkDone | None = None
        self._news = asyncio.Event()

    @property
    def newest(self) -> WorkDone | None:
        """The newest report; `None` before the first."""
        return self._newest

    async def __aiter__(self) -> AsyncIterator[WorkDone]:
        task, seen = self._begun(), None
        while True:
            self._news.clear()
            if self._newest is not None and self._newest is not seen:
                seen = self._newest
                yield seen
            elif task.done():
                return
            else:
                await self._news.wait()

    def __await__(self) -> Generator[Any, None, T]:
        return self._begun().__await__()

    def cancel(self) -> None:
        """Cancel the work, or prevent its beginning."""
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()

    def _begun(self) -> "asyncio.Task[T]":
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            before = _observer.set(self._report)
            try:
                self._task = asyncio.create_task(self._work)
            finally:
                _observer.reset(before)
            self._task.add_done_callback(lambda task: self._news.set())
        return self._task

    def _report(self, done: WorkDone) -> None:
        """For any thread, since the work may run in several."""
        self._newest = done
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._news.set)

    def __repr__(self) -> str:
        return f"<Track: {self._newest}>"


def track(work: Coroutine[Any, Any, T]) -> Track[T]:
    """Watch the progress of a call: see `Track`. These calls report: `force_compaction`, `fsck`,
    `sweep_leaked_blobs`, `usage`, `overview`, `copy_shard`, `Table.put_many` of many entries, and the
    coroutines of a Spark client."""
    return Track(work)


_observer: ContextVar[Callable[[WorkDone], None] | None] = ContextVar("aiopersist progress", default=None)


class Progressing:
    """A step of long work, for the code that does the work."""

    def __init__(
        self, observer: Callable[[WorkDone], None] | None, step: str, total: int | None, unit: str
    ) -> None:
        self._observer = observer
        self._newest = WorkDone(step, 0, total, unit)
        self._tell()

    @property
    def is_watched(self) -> bool:
        return self._observer is not None

    def advance(self, more: int) -> None:
        """Add to the amount that is done."""
        self.tell(self._newest.done + more, self._newest.total)

    def tell(self, done: int, total: int | None) -> None:
        """Set the amount that is done, and the total. For any thread."""
        if self._observer is not None:
            self._newest = self._newest._replace(done=done, total=total)
            self._tell()

    def _tell(self) -> None:
        if self._observer is not None:
            self._observer(self._newest)


@contextmanager
def progress(step: str, total: int | None, unit: str) -> Iterator[Progressing]:
    """A scope for a step of long work that reports its progress. A step within a step does not report."""
    observer = _observer.get()
    before = _observer.set(None)
    try:
        yield Progressing(observer, step, total, unit)
    finally:
        _observer.reset(before)
