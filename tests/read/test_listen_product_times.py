"""Product times, cancelled waits; see `test_listen.py`."""

import asyncio
import random
import uuid
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from aiopersist.testing.model import Model, gathered
from aiopersist.testing.strategies import histories, times
from tests.read.listen_kit import add, filled, until
from tests.support.schemas import PRODUCT, SCHEMA

# --- product times ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
def test_product_times_are_advanced_without_gap_or_overlap(data: Any) -> None:
    """Against the oracle: a listen opened at any moment of a history, from any time."""
    history, as_of = data.draw(histories(2)), data.draw(times(2))
    opened_at = data.draw(st.integers(0, len(history)))
    subscribe, eager = data.draw(st.booleans()), data.draw(st.booleans())

    async def scenario() -> None:
        async with ap.open("mem://") as client:
            writer = await client.writer("p", PRODUCT)
            reader = await client.reader("p", PRODUCT)
            model, listen, seen, told = Model([(0, 0)]), None, [], []
            for number, append in enumerate([*history, None]):
                if number == opened_at:
                    listen = await (reader.subscribe if subscribe else reader.listen)(as_of=as_of)
                    at = as_of if subscribe else (0, 0)
                    assert (listen.frontier, listen.as_of) == (ap.Antichain(at), as_of)
                if append is None:
                    break
                rows, lower, upper = append
                await writer.compare_and_append(rows, lower, upper)
                model.append(rows, lower.elements, upper.elements)
                if listen is not None and (eager or number == len(history) - 1):
                    await catch_up(listen, model, seen, told)
            assert listen is not None
            await catch_up(listen, model, seen, told)
            assert all(a < b for a, b in pairwise(told))

    async def catch_up(listen: ap.Listen, model: Model, seen: list[Any], told: list[Any]) -> None:
        upper = ap.Antichain(*model.upper)
        if (subscribe and not model.complete(as_of)) or upper == ap.Antichain((0, 0)):
            return
        while listen.frontier != upper:
            async with asyncio.timeout(50):
                item = await anext(listen)
            if isinstance(item, ap.Progress):
                told.append(item.upper)
                assert gathered(seen) == expected(model, item.upper), item
            else:
                seen += item.rows()

    def expected(model: Model, upper: ap.Antichain) -> Any:
        found = model.changes(as_of, upper=upper.elements)
        if subscribe:
            found.update({(k, v, as_of): d for k, v, d in model.contents(as_of)})
        return found

    asyncio.run(scenario())


async def test_an_update_that_is_advanced_past_its_batch_comes_later(mem: ap.Client) -> None:
    """At (0, 1), in a batch that ends before (3, 1), where a listener from (3, 0) sees it."""
    writer = await mem.writer("p", PRODUCT)
    reader = await mem.reader("p", PRODUCT)
    listen = await reader.listen(as_of=(3, 0))
    first, second = ap.Antichain((0, 5), (2, 0)), ap.Antichain((0, 6), (4, 0))
    await writer.compare_and_append([("a", 1, (0, 1), 1)], (0, 0), first)
    step = await anext(listen.steps())
    assert (step.updates.rows(), step.upper) == ([], first)
    await writer.compare_and_append([("b", 1, (2, 2), 1)], first, second)
    step = await anext(listen.steps())
    assert gathered(step.updates) == {("a", 1, (3, 1)): 1, ("b", 1, (3, 2)): 1}


async def test_until_of_product_times(mem: ap.Client) -> None:
    """Which no upper need be comparable with: what is not before it is never told."""
    writer = await mem.writer("p", PRODUCT)
    reader = await mem.reader("p", PRODUCT)
    listen = await reader.listen(as_of=(0, 0), until=(3, 3))
    grid = [(a, b) for a in range(6) for b in range(6)]
    lower = ap.Antichain((0, 0))
    for upper in (ap.Antichain((0, 5), (4, 0)), ap.Antichain((5, 2), (0, 6)), ap.Antichain((6, 6))):
        rows = [(f"{t}", 1, t, 1) for t in grid if lower.less_equal(t) and not upper.less_equal(t)]
        await writer.compare_and_append(rows, lower, upper)
        lower = upper
        if upper != ap.Antichain((6, 6)):
            first = [u.time for u in (await anext(listen.steps())).updates]
            assert first and all(t[0] < 3 or t[1] < 3 for t in first)
    steps = [step async for step in listen.steps()]
    assert steps[-1].upper == ap.Antichain((3, 3))
    assert all(t.time[0] < 3 or t.time[1] < 3 for step in steps for t in step.updates)


# --- cancelled waits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["items", "steps", "both"])
@pytest.mark.parametrize("seed", range(1))
async def test_cancelled_waits_lose_and_double_nothing(location: Any, way: str, seed: int) -> None:
    """Random tiny timeouts, of both kinds, while two writers write; parts inline and in blobs."""
    rng = random.Random(seed)
    options = ap.Settings(inline_writes_single_max_bytes=120, blob_target_size=200)
    place = {"blob": location.blob, "consensus": location.consensus, "settings": options}
    async with ap.open(**place) as client, ap.open(**place) as other:
        writers = [await c.writer("s", SCHEMA) for c in (client, other)]
        listen = await (await client.reader("s", SCHEMA)).subscribe()
        written = []

        async def write(writer: ap.WriteHandle[str, int], number: int) -> None:
            for i in range(12):
                rows = [(f"{number}.{i}", j) for j in range(rng.choice([1, 2, 20]))]
                t = await writer.write(rows)
                written.extend((k, v, t, 1) for k, v in rows)

        writing = asyncio.gather(*[write(w, n) for n, w in enumerate(writers)])
        seen: list[Any] = []
        while not writing.done() or listen.frontier != await writers[0].fetch_recent_upper():
            seconds = rng.choice([0, 0.0001, 0.001, 0.01])
            steps = way == "steps" or (way == "both" and rng.random() < 0.5)
            try:
                if rng.random() < 0.5:
                    item: Any = await asyncio.wait_for(anext(listen.steps() if steps else listen), seconds)
                else:
                    async with asyncio.timeout(seconds):
                        item = await anext(listen.steps() if steps else listen)
            except TimeoutError:
                continue
            if isinstance(item, ap.Step):
                seen += item.updates.rows()
            elif isinstance(item, ap.Updates):
                seen += item.rows()
        await writing
        assert gathered(seen) == gathered(written)
        assert len(seen) == len(written)


async def test_a_step_that_was_given_up_loses_nothing_to_other_iterations() -> None:
    """It had some of the updates of its interval already; now items are asked for."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    blob = FaultyBlob(ap.open_blob(url), faults)
    options = ap.Settings(inline_writes_single_max_bytes=0, blob_cache_bytes=0, fetch_max_outstanding_parts=1)
    async with ap.open(blob=blob, consensus=ap.open_consensus(url), settings=options) as client:
        await filled(client, 3)
        listen = await (await client.reader("s", SCHEMA)).listen(as_of=0)
        faults.latency_s = (0.1, 0.1)  # for each of two parts
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(listen.steps()), 0.15)
        seen, told = await until(listen, 3)
        assert ([u.time for u in seen], told) == ([1, 2], [ap.Antichain(3)])


async def test_the_default_begins_though_both_frontiers_move(mem: ap.Client) -> None:
    """Between the look at the upper and the hold another client appends and gives up earlier history."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()

    class Racing(FaultyConsensus):
        races = 0

        async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
            if self.races:
                self.races -= 1
                (t,) = (await writer.fetch_recent_upper()).elements
                await add(writer, t)
                await mover.downgrade_since(t)
            return await super().compare_and_set(key, expected, data)

    consensus = Racing(ap.open_consensus(url), faults)
    async with ap.open(url) as other, ap.open(blob=ap.open_blob(url), consensus=consensus) as client:
        writer = await filled(other, 3)
        mover = await other.reader("s", SCHEMA, hold=0)
        for opened in ("listen", "subscribe", "downgrade_since"):
            reader = await client.reader("s", SCHEMA)
            consensus.races = 2
            if opened == "downgrade_since":
                assert await reader.downgrade_since(0) == mover.since
            else:
                await getattr(reader, opened)()
            assert consensus.races == 0
            await reader.aclose()


async def test_several_who_wait_share_the_items(mem: ap.Client) -> None:
    writer = await filled(mem, 0)
    listen = await (await mem.reader("s", SCHEMA)).subscribe()
    waits = [asyncio.ensure_future(anext(listen)) for _ in range(6)]
    for t in range(3):
        await asyncio.sleep(0.01)
        await add(writer, t)
    items = await asyncio.gather(*waits)
    assert sorted(u.time for item in items if isinstance(item, ap.Updates) for u in item) == [0, 1, 2]


async def test_an_error_does_not_look_like_the_end(mem: ap.Client) -> None:
    """A listen that failed fails again; one that goes on from its cursor misses nothing."""
    faults = Faults()
    url = f"mem://{uuid.uuid4().hex}"
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    options = ap.Settings(retry_timeout_s=0.02, watch_timeout_s=0.05)
    async with (
        ap.open(blob=ap.open_blob(url), consensus=consensus, settings=options) as client,
        ap.open(url) as other,
    ):
        writer = await filled(other, 2)
        reader = await client.reader("s", SCHEMA)
        listen = await reader.listen(as_of=0)
        assert (await anext(listen.steps())).upper == ap.Antichain(2)
        faults.rates = {Outcome.REFUSED: 1.0}
        for _ in range(3):
            with pytest.raises(ap.StorageUnavailable):
                async with asyncio.timeout(50):
                    await anext(listen)
        faults.heal()
        await add(writer, 2)
        async with reader.listen(cursor=listen.cursor) as again, asyncio.timeout(50):
            assert (await anext(again.steps())).updates.rows() == [("k", 2, 2, 1)]
