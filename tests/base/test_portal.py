"""Goal: threads use one loop at the same time; no call hangs: not in its own thread, not after the end,
not in a fork; an interrupted wait ends the work."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base import portal as module
from aiopersist.base.portal import PerProcess, Portal, Waits, on_caller


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal()
    yield portal
    portal.end()
    assert not portal._thread.is_alive()


async def doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def kind_of(call: Any, *args: Any) -> ap.UsageKind:
    with pytest.raises(ap.InvalidUsage) as caught:
        call(*args)
    return caught.value.kind


def test_several_threads(portal: Portal) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda n: portal.run(doubled, n), range(100))) == list(range(0, 200, 2))


def test_blocking_calls_are_made_by_the_caller(portal: Portal) -> None:
    async def work() -> tuple[int, int]:
        return threading.get_ident(), await on_caller(threading.get_ident)

    loop, caller = portal.run(work)
    assert caller == threading.get_ident() != loop


def test_a_call_in_the_loop_is_refused(portal: Portal) -> None:
    async def within() -> ap.UsageKind:
        return kind_of(portal.run, doubled, 1)

    assert portal.run(within) == ap.UsageKind.WRONG_LOOP


class Numbers:
    """Counts up to `end`, and notes what has happened."""

    def __init__(self, end: int) -> None:
        self.end, self.begun, self.closed = end, 0, False

    async def items(self) -> AsyncIterator[int]:
        try:
            for number in range(self.end):
                self.begun += 1
                await asyncio.sleep(0)
                yield number
        finally:
            self.closed = True


def test_items_come_in_order_and_one_ahead(portal: Portal) -> None:
    numbers = Numbers(5)
    assert list(portal.iterate(numbers.items)) == list(range(5))
    few = Numbers(1_000_000)
    items = portal.iterate(few.items)
    assert [next(items), next(items)] == [0, 1]
    items.close()  # type: ignore[attr-defined]
    assert few.closed and few.begun <= 4


def test_items_are_closed_when_none_is_computed(portal: Portal) -> None:
    """A generator that runs cannot be closed: its cancellation may take a while."""
    ended: list[str] = []

    async def slowly() -> AsyncIterator[int]:
        try:
            yield 1
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                for _ in range(100):
                    await asyncio.sleep(0)
                ended.append("cancelled")
        finally:
            ended.append("closed")

    items = portal.iterate(slowly)
    assert next(items) == 1
    items.close()  # type: ignore[attr-defined]
    assert ended == ["cancelled", "closed"]


def test_items_may_be_dropped_in_the_loop(portal: Portal) -> None:
    """The collector of garbage runs in any thread."""
    numbers = Numbers(1_000_000)
    items = portal.iterate(numbers.items)
    assert next(items) == 0

    async def drop() -> None:
        items.close()  # type: ignore[attr-defined]
        while not numbers.closed:
            await asyncio.sleep(0)

    portal.run(drop)


def test_the_end_ends_the_calls_that_wait() -> None:
    portal, begun = Portal("the library's portal"), threading.Event()

    async def for_ever() -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(kind_of, portal.run, for_ever)
        begun.wait()
        portal.end()
        assert waiting.result() == ap.UsageKind.CLOSED
    portal.end()
    assert kind_of(portal.run, doubled, 1) == ap.UsageKind.CLOSED
    with pytest.raises(ap.InvalidUsage, match="the library's portal is closed"):
        portal.call(int)


def test_what_begins_beside_the_end_hangs_nowhere() -> None:
    """Goal: each call returns its result, or is refused."""

    def outcome(portal: Portal) -> bool:
        try:
            return portal.run(doubled, 1) == 2
        except ap.InvalidUsage as error:
            return error.kind == ap.UsageKind.CLOSED

    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            portal = Portal()
            calls = [threads.submit(outcome, portal) for _ in range(16)]
            portal.end()
            assert all(call.result() for call in calls)


def test_another_thread_cancels_a_wait(portal: Portal) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def for_ever() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    waits = Waits()

    def wait() -> None:
        with waits, pytest.raises(CancelledError):
            portal.run(for_ever)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        begun.wait()
        while not waiting.done():  # its wait begins after the work
            waits.cancel()
        waiting.result()
    assert ended.is_set()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_is_refused_in_words_and_has_its_own_per_process(portal: Portal) -> None:
    ended: list[Portal] = []
    mine = PerProcess(Portal, ended.append)
    first = mine()
    assert mine() is first
    if (child := os.fork()) == 0:
        code = 1
        try:
            refused = kind_of(portal.run, doubled, 1) == ap.UsageKind.WRONG_LOOP
            portal.end()
            code = 0 if refused and mine() is not first and mine().run(doubled, 2) == 4 else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    first.end()


def test_a_loop_that_cannot_begin(monkeypatch: Any) -> None:
    """Goal: a caller is refused, and does not wait."""

    def refused(*args: Any) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(module.anyio, "run", refused)
    with pytest.raises(OSError, match="too many"):
        Portal()
