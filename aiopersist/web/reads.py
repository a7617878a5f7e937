"""Running reads of pages of rows, and the results of the last ones.

A page waits `WAIT_S` for its rows. A longer read continues as a task of the client; the page comes without
rows and asks again. Results stay in memory for a while, since contents at one time never change. A read ends
after `GIVE_UP_S`: a condition may match nothing in a hundred gigabytes.
"""

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from aiopersist.client.client import Client
from aiopersist.web.reading import Question, RawRows, RowsPage, page_of, read_shard
from aiopersist.web.streams import read_stream

WAIT_S = 0.2  # so that a page comes within 300 ms
GIVE_UP_S = 60.0
KEPT = 32  # pages of short texts
AT_ONCE = 2  # reads; the others wait


class PageRead(NamedTuple):
    """The rows of a page, or the state of their read."""

    page: RowsPage | None
    """`None`: the read is running, or was given up."""
    seconds: float
    """How long the read took, or has run so far."""
    given_up: bool = False


class _RunningRead(NamedTuple):
    """A read, and when it began, on the monotonic clock."""

    task: asyncio.Task[RowsPage]
    began: float


async def read_rows(client: Client, shard: str, question: Question) -> RawRows:
    """The rows of a page of a shard, or of a stream of an `Indexed`."""
    return await (read_stream if question.stream else read_shard)(client, shard, question)


class Reads:
    """See the header. One per client."""

    def __init__(self) -> None:
        self._reads: OrderedDict[tuple[str, Question], _RunningRead] = OrderedDict()
        self._seconds: dict[tuple[str, Question], float] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def of(self, client: Client, shard: str, question: Question) -> PageRead:
        """The rows of a page. Raises the error of the read."""
        stack, key = client._stack, (shard, question)
        read = self._reads.get(key)
        if read is None:
            work = stack.supervisor.spawn(self._read(client, shard, question), "read a page", abandon=True)
            read = self._reads[key] = _RunningRead(work, stack.runtime.monotonic())
            work.add_done_callback(lambda task: self._done(key, task, stack.runtime.monotonic() - read.began))
        self._reads.move_to_end(key)
        while len(self._reads) > KEPT:
            self._reads.popitem(last=False)[1].task.cancel()
        await asyncio.wait([read.task], timeout=WAIT_S)
        if not read.task.done():
            return PageRead(None, stack.runtime.monotonic() - read.began)
        try:
            return PageRead(read.task.result(), self._seconds.get(key, 0.0))
        except TimeoutError:
            return PageRead(None, GIVE_UP_S, given_up=True)

    async def _read(self, client: Client, shard: str, question: Question) -> RowsPage:
        async with asyncio.timeout(GIVE_UP_S), self._turns:
            return await client._stack.compute(page_of, await read_rows(client, shard, question), question)

    def _done(self, key: tuple[str, Question], task: asyncio.Task[RowsPage], seconds: float) -> None:
        """Forget a read that failed: the next page tries again."""
        self._seconds[key] = seconds
        if task.cancelled() or task.exception() is not None:
            self._reads.pop(key, None)
        for dropped in self._seconds.keys() - self._reads.keys():
            del self._seconds[dropped]
