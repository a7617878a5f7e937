"""What the slowest commits of a run waited for: `python -m benches.tails sqlite 10`.

One writer commits some rows again and again, while the client's maintenance runs beside it. A thread looks
every half of a millisecond at what each thread does: the innermost function of the library on its stack, and
for the event loop the task. For the slowest hundredth of the commits the table has how often each was seen
while one of them ran, beside the same for all other commits: what is in the first column alone is what they
waited for. Where the thread could not look for longer than two milliseconds, it had no processor, or another
thread kept the interpreter: that time is told, too.
"""

import asyncio
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import aiopersist as ap
from aiopersist.testing.servers import postgres_server

EVERY_S = 0.0005
HELD_S = 0.002
FIRST = 200  # commits of a process that still imports
SLOW = 0.01
LINES = 14
LOOPS: list[asyncio.AbstractEventLoop] = []
"""The one whose tasks are told."""


class Sample(NamedTuple):
    """What the threads did at a moment, and for how long nobody could look before."""

    at: float
    gap: float
    seen: tuple[tuple[str, str], ...]


def place(frame: object) -> str:
    """The innermost function of the library on the stack, and its line."""
    while frame is not None:
        name = frame.f_code.co_filename  # type: ignore[attr-defined]
        if "/aiopersist/" in name:
            short = name.rpartition("/aiopersist/")[2]
            return f"{short}:{frame.f_code.co_name}:{frame.f_lineno}"  # type: ignore[attr-defined]
        frame = frame.f_back  # type: ignore[attr-defined]
    return ""


@contextmanager
def sampled() -> Iterator[list[Sample]]:
    """The samples of the body."""
    samples: list[Sample] = []
    done = threading.Event()

    def look() -> None:
        before = time.perf_counter()
        while not done.is_set():
            time.sleep(EVERY_S)
            names = {thread.ident: thread.name.rstrip("0123456789-_ ") for thread in threading.enumerate()}
            if LOOPS:
                task = asyncio.current_task(LOOPS[0])
                names[threading.main_thread().ident] = f"loop, {task.get_name() if task else 'no task'}"
            frames, now = sys._current_frames(), time.perf_counter()
            seen = [(names.get(ident, "?"), place(frame)) for ident, frame in frames.items()]
            samples.append(Sample(now, now - before, tuple(pair for pair in seen if pair[1])))
            before = now

    thread = threading.Thread(target=look, name="sampler")
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


@asynccontextmanager
async def client_of(store: str) -> AsyncIterator[ap.Client]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if store == "sqlite":
            yield await stack.enter_async_context(ap.open(folder))
            return
        server = stack.enter_context(postgres_server())
        consensus = server.url(f"tails_{time.time_ns()}")
        yield await stack.enter_async_context(ap.open(blob=f"file://{folder}", consensus=consensus))


async def committed(store: str, rows: int, commits: int) -> list[tuple[float, float]]:
    """When each commit began and ended."""
    random, spans = Random(1), list[tuple[float, float]]()
    LOOPS[:] = [asyncio.get_running_loop()]
    async with client_of(store) as client, client.writer("tails", ap.Schema(key=str, val=int)) as w:
        for t in range(FIRST + commits):
            updates = [(f"{random.getrandbits(64):016x}", t, t, 1) for _ in range(rows)]
            began = time.perf_counter()
            await w.compare_and_append(updates, t, t + 1)
            spans.append((began, time.perf_counter()))
    return spans[FIRST:]


def within(samples: list[Sample], spans: list[tuple[float, float]]) -> tuple[Counter[tuple[str, str]], float]:
    """How often each place was seen within the spans, per commit; and for how long nobody could look."""
    found: Counter[tuple[str, str]] = Counter()
    held, at = 0.0, 0
    for began, ended in spans:
        while at < len(samples) and samples[at].at < began:
            at += 1
        look = at
        while look < len(samples) and samples[look].at - samples[look].gap < ended:
            sample = samples[look]
            if sample.at <= ended or sample.gap > HELD_S:
                found.update(set(sample.seen))
                held += sample.gap if sample.gap > HELD_S else 0.0
            look += 1
    return found, held


def main(store: str, rows: int, commits: int = 3000) -> None:
    with sampled() as samples:
        spans = asyncio.run(committed(store, rows, commits))
    took = sorted(ended - began for began, ended in spans)
    p50, p99 = took[len(took) // 2], took[int(len(took) * (1 - SLOW))]
    print(
        f"{store}, {rows} rows: p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms ({p99 / p50:.1f} x), "
        f"slowest {took[-1] * 1e3:.1f} ms"
    )
    slow = [span for span in spans if span[1] - span[0] >= p99]
    fast = [span for span in spans if span[1] - span[0] < p99]
    (in_slow, held), (in_fast, _) = within(samples, slow), within(samples, fast)
    print(f"nobody could look for {held * 1e3:.0f} of {sum(e - b for b, e in slow) * 1e3:.0f} ms")
    print("seen in a slow commit, in a fast one (times)")
    for (thread, where), count in in_slow.most_common(LINES):
        print(f"  {count / len(slow):5.2f} {in_fast[thread, where] / len(fast):5.2f}  {thread}: {where}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:]))
