"""Truncation; see `test_batches.py`."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

import aiopersist as ap
from tests.batches.batches_kit import BLOB, EVERYWHERE, STAGED, refused, summed_at
from tests.conftest import StoreUrls
from tests.support.schemas import KIND, PRODUCT, SCHEMA
from tests.support.shards import f, history, open_at, open_mem, parquet, rows, summed

WINDOWS = [(0, 10), (0, 4), (4, 10), (3, 7), (6, 7), (1, 9)]


async def check_truncation(client: ap.Client, lower: int, upper: int) -> None:
    """Goal: at both ends; by snapshots, listens, and after the next append over the same times."""
    updates = [(f"k{time % 3}", time % 2, time, time + 1) for time in range(10)]
    inside = [u for u in updates if lower <= u[2] < upper]
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, lower)
        b = await w.batch(updates, 0, 10)
        await w.compare_and_append_batch([b], lower, upper)
        assert w.upper == f(upper)
        assert await history(client) == summed(inside)
        assert await rows(client) == summed_at(inside, upper - 1)
        rest = await w.batch(updates, 0, f())
        await w.compare_and_append_batch([rest], upper, 12)
        both = [u for u in updates if u[2] >= lower]
        assert await history(client) == summed(both)
        for as_of in (lower, upper - 1, 11):
            assert await rows(client, as_of) == summed_at(both, as_of)


def le(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def beyond(frontier: Sequence[Sequence[int]], time: Sequence[int]) -> bool:
    return any(le(element, time) for element in frontier)


@pytest.mark.parametrize(("lower", "upper"), WINDOWS)
@STAGED
async def test_a_wider_batch_is_truncated(lower: int, upper: int, limits: dict[str, int]) -> None:
    async with open_mem(**limits) as client:
        await check_truncation(client, lower, upper)


@EVERYWHERE
async def test_truncation_everywhere(location: StoreUrls, limits: dict[str, int]) -> None:
    async with open_at(location, **limits) as client:
        await check_truncation(client, 3, 7)


@pytest.mark.parametrize(
    ("bounds", "lower", "upper"),
    [
        ((3, 7), 2, 7),
        ((3, 7), 3, 8),
        ((3, 7), 2, 8),
        ((3, 7), 8, 9),
        ((3, 7), 0, 2),
        ((3, 7), 2, 2),
        ((3, f()), 2, f()),
        ((3, 7), 3, f()),
        ((3, 3), 2, 2),
    ],
)
@pytest.mark.parametrize("empty", [False, True], ids=["parts", "empty"])
async def test_a_batch_must_cover_the_append(bounds: Any, lower: Any, upper: Any, empty: bool) -> None:
    """Goal: for every batch, also one without parts, also beside others that do; nothing is changed."""
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, lower)
        b = await w.batch([] if empty or bounds == (3, 3) else [("a", 1, 5, 1)], *bounds)
        wide = await w.batch([("w", 1, 2, 1)], 0, f())
        says = {
            "batch_lower": b.lower,
            "batch_upper": b.upper,
            "append_lower": f(lower),
            "append_upper": upper if isinstance(upper, ap.Antichain) else f(upper),
        }
        for call in (
            w.compare_and_append_batch([wide, b], lower, upper),
            w.compare_and_append_batch([b], lower, upper),
            w.append_batch(b, lower, upper),
        ):
            await refused(call, KIND.INVALID_BATCH_BOUNDS, **says)
        assert w.upper == f(lower)
        await b.delete()
        await wide.delete()


async def test_batches_of_product_times_must_cover_the_append() -> None:
    """Goal: `batch.lower <= lower` and not `batch.upper < upper`, in the partial order: an incomparable
    upper is fine, and truncates."""
    async with open_mem(**BLOB) as client, client.writer("t", PRODUCT) as w:
        b = await w.batch([("a", 1, (1, 1), 1), ("b", 1, (3, 9), 1)], (0, 1), (5, 5))
        await refused(w.compare_and_append_batch([b], (0, 0), (5, 5)), KIND.INVALID_BATCH_BOUNDS)
        await refused(w.compare_and_append_batch([b], (0, 1), (5, 6)), KIND.INVALID_BATCH_BOUNDS)
        await w.compare_and_append([], (0, 0), (0, 1))
        await w.compare_and_append_batch([b], (0, 1), (2, 9))
        assert await history(client, (0, 0), PRODUCT) == {("a", 1, (1, 1)): 1}


@STAGED
async def test_an_empty_interval(limits: dict[str, int]) -> None:
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, 5)
        b, hollow = await w.batch([("a", 1, 6, 1)], 0, 10), await w.batch([], 0, 10)
        for call in (
            w.compare_and_append_batch([b], 5, 5),
            w.compare_and_append_batch([hollow, b], 5, 5),
            w.append_batch(b, 5, 5),
        ):
            await refused(call, KIND.INVALID_EMPTY_TIME_INTERVAL, lower=f(5), upper=f(5))
        await w.compare_and_append_batch([hollow], 5, 5)
        await w.compare_and_append_batch([await w.batch([], 5, 5)], 5, 5)
        await refused(w.compare_and_append_batch([b], 6, 5), KIND.INVALID_BOUNDS, lower=f(6), upper=f(5))
        await w.compare_and_append_batch([b], 5, 10)
        assert await history(client) == {("a", 1, 6): 1}


@EVERYWHERE
async def test_product_times_with_bounds_of_several_elements(
    location: StoreUrls, limits: dict[str, int]
) -> None:
    """Goal: one batch, staged thrice, cut to neighbouring intervals, as a snapshot and a listen see it."""
    draw = random.Random(7)
    grid = [(x, y) for x in range(6) for y in range(6)]
    updates = [(draw.choice("abc"), 0, draw.choice(grid), draw.choice((-1, 1, 2))) for _ in range(22)]
    cuts = [[(0, 0)], [(0, 3), (2, 1)], [(1, 4), (3, 3), (4, 1)], [(6, 4), (3, 6)]]
    async with open_at(location, **limits) as client, client.writer("t", PRODUCT) as w:
        for lower, upper in pairwise(cuts):
            async with w.builder(f((0, 0))) as builder:
                await builder.extend(updates)
                b = await builder.finish(f((6, 6)))
            await w.compare_and_append_batch([b], f(*lower), f(*upper))
            assert w.upper == f(*upper)
            appended = [u for u in updates if not beyond(upper, u[2])]
            assert await history(client, (0, 0), PRODUCT) == summed(appended)
        for as_of in ((0, 0), (2, 0), (0, 5), (3, 3), (5, 5)):
            sums: dict[Any, int] = {}
            for key, val, time, diff in updates:
                if le(time, as_of):
                    sums[key, val] = sums.get((key, val), 0) + diff
            expected = [(*kv, diff) for kv, diff in sorted(sums.items()) if diff]
            assert await rows(client, as_of, PRODUCT) == expected


async def test_replicas_of_product_times() -> None:
    """Goal: what is covered is dropped in the partial order; an incomparable upper is a mismatch."""
    grid = [(x, y) for x in range(5) for y in range(5)]
    updates = [("a", 0, time, 1) for time in grid]
    async with open_mem(**BLOB) as client, client.writer("t", PRODUCT) as w:
        await w.append_batch(await w.batch(updates, (0, 0), (5, 5)), (0, 0), f((0, 3), (2, 1)))
        gap = await w.batch([("z", 0, (4, 4), 1)], f((1, 2)), (9, 9))
        with pytest.raises(ap.UpperMismatch) as caught:
            await w.append_batch(gap, f((1, 2)), (9, 9))
        assert caught.value.current == f((0, 3), (2, 1))
        await gap.delete()
        await w.append_batch(await w.batch(updates, (0, 0), (5, 5)), f((0, 1), (1, 0)), f((4, 4)))
        await w.append_batch(await w.batch(updates, (0, 0), (5, 5)), (0, 0), f((3, 3)))  # covered
        assert w.upper == f((4, 4))
        expected = [u for u in updates if not le((4, 4), u[2])]
        assert await history(client, (0, 0), PRODUCT) == summed(expected)
        assert len(await parquet(client)) == 2
