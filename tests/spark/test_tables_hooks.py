"""Goal: Spark's jobs and the users of a table, side by side, see and keep what the other has written: hooks
are called as in `test_hooks.py`."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pyarrow as pa

import aiopersist as ap
from tests.spark.test_hooks import (
    _in_one_process,  # noqa: F401  # a fixture
    columns,
    sent,
    some,
    source,
)

KEYS = [f"k{n}" for n in range(6)]
TASKS = 3
JOB = 10**9  # a job's vals are multiples of it


def overwrite(place: str, *rows: tuple[str, int]) -> None:
    committer = source(place, "t").writer(columns(), True)
    committer.commit([sent(committer).write(some(*rows))])


def upsert(place: str, *rows: tuple[str, int]) -> None:
    committer = source(place, "t", apply="upsert").writer(columns(), False)
    committer.commit([sent(committer).write(some(*rows))])


def delete(place: str, *keys: str) -> None:
    from aiopersist.spark.sessions import struct_type

    batch = pa.RecordBatch.from_arrays([pa.array(keys, pa.string())], ["key"])
    committer = source(place, "t", apply="delete").writer(struct_type(batch.schema), False)
    committer.commit([sent(committer).write(iter([batch]))])


async def test_users_see_what_a_job_changed(place: str) -> None:
    """Goal: gets at once, feeds as one step of net changes; what a job wrote as it was is no change."""
    async with ap.open(place, maintenance=False) as client:
        table = client.table("t", str, int)
        await table.put_many({"a": 1, "b": 2, "c": 3})
        async with table.changes(start="now") as feed:

            async def step() -> set[tuple[str, int | None, int | None]]:
                return {(c.key, c.old, c.new) for c in (await anext(feed)).changes}

            await asyncio.to_thread(upsert, place, ("a", 1), ("b", 20))
            assert await table.get_many(list("abc")) == {"a": 1, "b": 20, "c": 3}
            assert await step() == {("b", 2, 20)}
            await asyncio.to_thread(overwrite, place, ("a", 1), ("d", 4))
            assert await table.get_many(list("abcd")) == {"a": 1, "d": 4}
            assert await step() == {("b", 20, None), ("c", 3, None), ("d", None, 4)}
            await asyncio.to_thread(delete, place, "a", "b")
            assert await table.get("a") is None
            assert await step() == {("a", 1, None)}
            assert await table.insert("a", 7) > 0


def one_more(count: int | None) -> int:
    return (count or 0) + 1


def jobs(place: str, rounds: int) -> Iterator[None]:
    for n in range(rounds):
        yield upsert(place, *[(key, JOB * (n + 1)) for key in KEYS[:4]])
        yield delete(place, *KEYS[2:])


async def history(client: ap.Client) -> list[tuple[int, str, set[int], set[int]]]:
    """By time and key: the vals that went, and those that came."""
    found: dict[tuple[int, str], tuple[set[int], set[int]]] = {}
    async with client.workers.shared_read("t", start=0) as read:
        for piece in await read.pieces(1):
            async for batch in client.workers.read_piece(piece):
                for row in batch.to_pylist():
                    assert row["diff"] in (-1, 1)
                    gone, came = found.setdefault((row["time"], row["key"]), (set(), set()))
                    (came if row["diff"] > 0 else gone).add(row["val"])
    return [(*at, *vals) for at, vals in sorted(found.items())]


async def test_jobs_and_updates_at_once(place: str) -> None:
    """Goal: at every time a key has one val at most; what goes is what was there; all updates add up, since
    each begins with what was there, a job's val included."""
    done, updates = asyncio.Event(), 0
    async with ap.open(place, maintenance=False) as client:
        table = await client.table("t", str, int)

        async def count(keys: list[str]) -> None:
            nonlocal updates
            while not done.is_set():
                for key in keys:
                    await table.update(key, one_more)
                    updates += 1

        counting = [asyncio.create_task(count(KEYS[n:] + KEYS[:n])) for n in range(TASKS)]
        async for _ in _on_a_thread(jobs(place, 4)):
            await asyncio.sleep(0.05)
        done.set()
        await asyncio.gather(*counting)
        there: dict[str, int] = {}
        added, by_jobs = 0, 0
        for _, key, gone, came in await history(client):
            old = there.pop(key, None)
            assert gone == (set() if old is None else {old})
            for val in came:
                assert key not in there
                there[key] = val
                by_jobs += val % JOB == 0
                added += val - (old or 0) if val % JOB else 0
        assert there == dict([entry async for entry in table.items()])
        assert added == updates
        assert by_jobs > 0


async def _on_a_thread(work: Iterator[None]) -> AsyncIterator[None]:
    end = object()
    while await asyncio.to_thread(next, work, end) is not end:
        yield
