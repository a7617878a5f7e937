"""Helpers of attacks on a stash: a proxy that delivers held bytes late, and a look behind the library's
back."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from aiopersist.stash import Stash, StashCollection, StashError
from aiopersist.testing.proxy import TcpProxy

Loss = Literal["answer", "request", "late"]
LOSSES: tuple[Loss, ...] = ("answer", "request", "late")

TABLES = ("fence", "openers", "collections", "uppers", "sinces", "data")
ARRIVAL_S = 0.02  # until what was sent surely waits in the proxy; a test that guessed wrong tests less
LATE_S = 0.03


class LateProxy(TcpProxy):
    """Can lose the n-th answer or request from now on, or deliver that request late."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.struck = False

    def strand(self) -> Callable[[], None]:
        """What is held waits on, until the returned function is called; all that comes later passes."""
        held, self._requests = self._requests, asyncio.Event()
        self._requests.set()
        return held.set

    def after_answers(self, number: int, then: Callable[[], None]) -> None:
        """Call `then` before that many answers have reached the client; at once for none."""
        left = number

        def when(answer: bytes) -> bool:
            nonlocal left
            left -= 1
            if left == 0:
                then()
            return False

        if number == 0:
            then()
        else:
            self.swallow_answers_then_cut(when)

    def after_answer_with(self, text: bytes, then: Callable[[], None]) -> None:
        """Call `then` before the first answer with that text reaches the client."""

        def when(answer: bytes) -> bool:
            if text in answer:
                lost.cancel()
                then()
            return False

        lost = self.swallow_answers_then_cut(when)

    @asynccontextmanager
    async def losing(self, loss: Loss, number: int, *, refusing: bool = False) -> AsyncIterator[None]:
        """Lose it once within the block, and after it refuse connections if `refusing`; `struck` says whether
        that many came."""
        self.struck = False
        struck = asyncio.Event()
        watch = asyncio.create_task(self._strike(struck, loss, refusing))
        if loss == "answer":
            left = number + 1

            def last(answer: bytes) -> bool:
                nonlocal left
                left -= 1
                self.struck = left == 0
                if self.struck and refusing:
                    self.refuse()
                return self.struck

            self.swallow_answers_then_cut(last)
        else:

            def hold() -> None:
                self.hold_requests()
                self.struck = True
                struck.set()

            self.after_answers(number, hold)
        try:
            yield
            if struck.is_set():
                await watch
        finally:
            watch.cancel()
            self.release_requests()
            self.accept()
            self._swallow = None

    async def _strike(self, struck: asyncio.Event, loss: Loss, refusing: bool) -> None:
        await struck.wait()
        if refusing:
            self.refuse()
        await asyncio.sleep(ARRIVAL_S)
        if loss == "late":
            self.cut_clients()
            arrive = self.strand()
            await asyncio.sleep(LATE_S)
            arrive()
        else:
            self.cut()
            self.release_requests()


async def sqlite_tables(path: Path) -> dict[str, list[Any]]:
    def look() -> dict[str, list[Any]]:
        connection = sqlite3.connect(path)
        try:
            return {t: sorted(connection.execute(f"SELECT * FROM stash_{t}"), key=repr) for t in TABLES}
        finally:
            connection.close()

    return await asyncio.to_thread(look)


async def postgres_tables(admin: Any) -> dict[str, list[Any]]:
    return {t: sorted(map(tuple, await admin.fetch(f"SELECT * FROM {t}")), key=repr) for t in TABLES}


async def put(stash: Stash, c: StashCollection[str, int], keys: Iterable[str]) -> None:
    """Append the keys, each with diff 1, at the upper."""
    batch = await c.make_batch(stash)
    for key in keys:
        c.append_to_batch(batch, key, 0, 1)
    await stash.append([batch])


async def keys(stash: Stash, c: StashCollection[str, int]) -> list[str]:
    """The keys that are there; each once."""
    found = await stash.iter(c)
    assert all(diff == 1 for _, _, diff in found), found
    return [key for (key, _), _, _ in found]


async def is_fenced(call: Awaitable[Any]) -> None:
    """Check that the call fails as unrecoverable."""
    with pytest.raises(StashError) as caught:
        await call
    assert caught.value.is_unrecoverable, caught.value
