"""Goal: work that blocks goes to few threads; who is cancelled waits no more, and keeps no thread."""

import asyncio
import threading
from contextvars import ContextVar

import pytest

from aiopersist.base.threads import Threads

NAME: ContextVar[str] = ContextVar("NAME")


async def test_no_more_threads_than_it_may_have() -> None:
    threads, go_on, seen = Threads(2, "few"), threading.Event(), set[int]()

    def work() -> None:
        seen.add(threading.get_ident())
        go_on.wait(30)

    calls = [asyncio.create_task(threads.run(work)) for _ in range(5)]
    try:
        async with asyncio.timeout(30):
            while len(seen) < 2:
                await asyncio.sleep(0.001)
        assert (threads.running, threads.waiting) == (2, 3)
    finally:
        go_on.set()
        await asyncio.gather(*calls)
    assert len(seen) == 2
    assert (threads.running, threads.waiting) == (0, 0)
    threads.end()


async def test_a_cancelled_caller_stops_waiting() -> None:
    """Its work goes on if it runs, and never begins if it waits."""
    threads, go_on, done = Threads(1, "one"), threading.Event(), list[str]()
    began = threading.Event()

    def work(name: str) -> None:
        if name == "first":
            began.set()
            go_on.wait(30)
        done.append(name)

    first, second = (asyncio.create_task(threads.run(lambda n=name: work(n))) for name in ("first", "second"))  # type: ignore[misc]
    async with asyncio.timeout(30):
        while not began.is_set():
            await asyncio.sleep(0.001)
    for call in (first, second):
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert done == []
    go_on.set()
    await threads.run(lambda: work("third"))
    assert done == ["first", "third"]
    threads.end()


async def test_work_has_the_context_of_its_caller_and_its_errors() -> None:
    threads = Threads(1, "one")
    NAME.set("mine")
    assert await threads.run(NAME.get) == "mine"
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    threads.end()


async def test_it_may_be_used_again_after_its_end() -> None:
    """Goal: what closes a client may still compute."""
    threads = Threads(1, "ended")
    before = await threads.run(threading.current_thread)
    threads.end()
    async with asyncio.timeout(30):
        while before.is_alive():
            await asyncio.sleep(0.001)
    assert await threads.run(threading.current_thread) is not before
    threads.end()


def test_a_loop_in_another_thread_outlives_the_executors() -> None:
    """All executors end when the main thread does; loops of other threads may go on."""
    import subprocess
    import sys

    program = """
import asyncio, threading, time
from aiopersist.base.threads import Threads

async def main():
    threads = Threads(1, "t")
    await threads.run(lambda: None)
    while threading.main_thread().is_alive():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    print(await threads.run(lambda: "computed"))

threading.Thread(target=lambda: asyncio.run(main())).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout == "computed\n", done.stderr
