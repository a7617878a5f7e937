"""Helpers that the fault tests share: faults that happen once, in any process, and the check for
leftovers."""

import asyncio
import ctypes
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiopersist as ap
from aiopersist.spark import tasks
from tests.support.internals import shards_of

Rows = Counter[tuple[Any, ...]]

DEADLINE_S = 120.0
STEP_S = 0.1
FORMAT = "aiopersist"
PR_SET_PDEATHSIG = 1


def until(happened: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait for it; its first result that is true."""
    end = time.monotonic() + deadline_s
    while not (found := happened()):
        assert time.monotonic() < end, f"{what} did not come in {deadline_s:.0f} s"
        time.sleep(STEP_S)
    return found


def with_its_parent() -> None:
    """For `Popen(preexec_fn=...)`: the processes do not outlive the tests, however these end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# --- what happens once --------------------------------------------------------------------------------


def first_time(marker: str) -> bool:
    """Whether this is the first arrival, in any process."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def die() -> None:
    """As when the machine takes the process away: nothing of it runs any more."""
    os.kill(os.getpid(), signal.SIGKILL)


def tasks_but(**replaced: Callable[..., Any]) -> Any:
    """`aiopersist.spark.tasks` with some of its functions replaced. It travels by value."""
    there = {name: found for name, found in vars(tasks).items() if _is_of(found, tasks.__name__)}
    return SimpleNamespace(**{**there, **replaced})


def _is_of(found: Any, module: str) -> bool:
    return callable(found) and getattr(found, "__module__", None) == module


def dying_tasks(method: str, marker: Path) -> Any:
    """`aiopersist.spark.tasks`, but the first worker that has done `method` is killed before it can tell."""
    real, told = getattr(tasks, method), str(marker)

    def once_dead(*args: Any, **named: Any) -> Any:
        result = real(*args, **named)
        if first_time(told):
            die()
        return result

    def once_dead_midway(*args: Any, **named: Any) -> Any:
        for batch in real(*args, **named):
            yield batch
            if first_time(told):
                die()

    return tasks_but(**{method: once_dead_midway if method == "read" else once_dead})


def raising_once(marker: Path, after: int) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """For `mapInArrow`: what comes in, but the first attempt fails after so many batches."""
    told = str(marker)

    def through(batches: Iterable[Any]) -> Iterable[Any]:
        for number, batch in enumerate(batches):
            if number == after and first_time(told):
                raise RuntimeError("the first attempt fails")
            yield batch

    return through


def faulty(hooks: dict[str, Callable[..., Any]]) -> type:
    """`format("aiopersist")` with hooks of `reader`, `writer`, `streamReader` and `streamWriter` replaced:
    by `"writer.commit"`, say, with a function of what it replaces and the arguments. It travels by value."""
    from aiopersist.spark.source import AiopersistSource

    class Faulty(AiopersistSource):
        def reader(self, *args: Any, **named: Any) -> Any:
            return patched("reader", super().reader(*args, **named))

        def writer(self, *args: Any, **named: Any) -> Any:
            return patched("writer", super().writer(*args, **named))

        def streamReader(self, *args: Any, **named: Any) -> Any:  # noqa: N802
            return patched("streamReader", super().streamReader(*args, **named))

        def streamWriter(self, *args: Any, **named: Any) -> Any:  # noqa: N802
            return patched("streamWriter", super().streamWriter(*args, **named))

    def patched(kind: str, made: Any) -> Any:
        mine = {name.partition(".")[2]: hook for name, hook in hooks.items() if name.startswith(f"{kind}.")}
        base = type(made)

        def method(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Any, *args: Any) -> Any:
                return hook(lambda: getattr(base, name)(self, *args), *args)

            return call

        if mine:
            methods = {name: method(name, hook) for name, hook in mine.items()}
            made.__class__ = type("Patched", (base,), methods)
        return made

    return Faulty


# --- what is left behind ------------------------------------------------------------------------------


def rows_of(table: Any) -> Rows:
    """Contents, as the rows of a DataFrame."""
    found: Rows = Counter()
    for row in table.to_pylist():
        found[(*_values(row["key"]), *_values(row["val"]))] += row["diff"]
    return found


def _values(half: Any) -> tuple[Any, ...]:
    if isinstance(half, dict):
        return tuple(half.values())
    return () if half is None else (half,)


def opened(urls: "str | dict[str, str]", **settings: Any) -> Any:
    """A client of the library itself that does nothing of its own."""
    known = ap.Settings(**settings)
    if isinstance(urls, str):
        return ap.open(urls, settings=known, maintenance=False)
    return ap.open(**urls, settings=known, maintenance=False)


async def state_of(client: Any, shard: str) -> Any:
    """As it is now, after a commit, which expires what is overdue."""
    async with client.reader(shard):
        pass
    return (await shards_of(client).existing(shard)).state


async def contents(client: Any, shard: str, as_of: int | None = None) -> Rows:
    """All rows, as a plain client reads them."""
    async with client.reader(shard) as reader, reader.snapshot(as_of) as snapshot:
        return rows_of(await snapshot.to_arrow())


def contents_now(urls: Any, shard: str) -> Rows:
    """From outside of any loop; of a shard that is not there, nothing."""

    async def look() -> Rows:
        async with opened(urls) as client:
            if shard not in await client.list_shards() or await client.upper(shard) == ap.Antichain(0):
                return Counter()
            return await contents(client, shard)

    return asyncio.run(look())


def audit(urls: Any, shard: str, expected: Iterable[tuple[Any, ...]]) -> int:
    """Once all writers are gone: the contents are what is expected, a sweep removes what failed attempts
    left, everything is sound, and the contents are still the same. How many blobs were swept."""
    return asyncio.run(_audited(urls, shard, Counter(expected)))


async def _audited(urls: Any, shard: str, expected: Rows) -> int:
    async with opened(urls) as client, asyncio.timeout(DEADLINE_S):
        while (await state_of(client, shard)).writers:
            await asyncio.sleep(STEP_S)
        assert await contents(client, shard) == expected
        swept = await client.admin.sweep_leaked_blobs(dry_run=False)
        assert not (await client.admin.sweep_leaked_blobs()).keys
        report = await client.admin.fsck(shard)
        assert not report.problems
        assert await contents(client, shard) == expected
        return len(swept.keys)
