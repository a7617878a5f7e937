"""A subscription to a shard: it begins where its user says, and goes on behind what was acknowledged."""

import asyncio
import math
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob
from tests.subscription.kit import SMALL, acked, contents_of, in_time, rows, rows_of, steps_until, write
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import refused


async def test_it_goes_on_behind_the_last_acknowledgement(client: ap.Client) -> None:
    """The contents, then what comes; what was not acknowledged comes again."""
    await write(client, ("a", 1), ("b", 2))
    async with client.subscription("s", SCHEMA, name="sub") as sub:
        step = await in_time(anext(sub))
        assert (step.contents, rows_of([step])) == (True, [("a", 1), ("b", 2)])
        assert step.upper == await client.upper("s")
        await sub.ack(step)
        await write(client, ("c", 3))
        step = await in_time(anext(sub))
        assert (step.contents, step.updates.rows()) == (False, [ap.Update("c", 3, 1, 1)])
    for _ in range(2):
        async with client.subscription("s", name="sub") as sub:
            assert await rows(sub, 1) == [("c", 3)]
    await write(client, ("d", 4))
    async with client.subscription("s", name="sub", start="snapshot") as sub:
        assert await acked(sub, 2) == [("c", 3), ("d", 4)]
    await write(client, ("e", 5))
    async with client.subscription("s", name="sub") as sub:
        assert await rows(sub, 1) == [("e", 5)]


async def test_where_it_begins(quiet: ap.Client) -> None:
    """At the upper, strictly after a time, with the contents; each name has a position of its own."""
    times = [await write(quiet, (f"k{number}", number)) for number in range(3)]
    cases: dict[str, tuple[Any, int]] = {
        "now": ("now", 3),
        "at": (times[1], 2),
        "first": (times[0], 1),
        "contents": ("snapshot", 0),
        "default": (None, 0),
    }
    for name, (start, _) in cases.items():
        await (await quiet.subscription("s", name=name, start=start)).aclose()
    await write(quiet, ("k3", 3))
    for name, (_, first) in cases.items():
        for start in ("now", "snapshot", times[1]):  # it is there: these say nothing
            async with quiet.subscription("s", name=name, start=start) as sub:
                assert await rows(sub, 4 - first) == [(f"k{n}", n) for n in range(first, 4)], name


async def test_it_begins_at_an_instant(quiet: ap.Client) -> None:
    """Of a shard with a wall clock, also one to come."""
    async with quiet.writer("s", SCHEMA, clock="wall") as writer:
        times = [await writer.write([("a", number)]) for number in range(2)]
        at = datetime.fromtimestamp(times[0] // 10**6, UTC).replace(microsecond=times[0] % 10**6)
        async with quiet.subscription("s", name="sub", start=at) as sub:
            assert await acked(sub, 1) == [("a", 1)]
    await write(quiet, ("a", 1), name="logical")
    for shard, start in (("logical", at), ("s", at.replace(tzinfo=None))):
        opening = quiet.subscription(shard, name="other", start=start)
        assert await refused(opening) is ap.UsageKind.INVALID_TIME


async def test_an_empty_shard(quiet: ap.Client) -> None:
    """There are no contents; the first append comes."""
    async with quiet.writer("s", SCHEMA) as writer:
        async with quiet.subscription("s", name="sub") as sub:
            await writer.write([("a", 1)])
            assert await acked(sub, 1) == [("a", 1)]
        async with quiet.subscription("s", name="sub") as sub:
            await writer.write([("b", 1)])
            assert await rows(sub, 1) == [("b", 1)]


async def test_a_closed_shard_has_an_end(quiet: ap.Client) -> None:
    """Once its upper is empty: the rest, then the iteration ends, also at the next opening."""
    async with quiet.writer("s", SCHEMA) as writer:
        await writer.compare_and_append([("a", 1, 0, 1)], 0, 1)
        await writer.compare_and_append([("b", 1, 1, 1)], 1, ap.Antichain())
    for expected in ([("a", 1), ("b", 1)], []):
        async with quiet.subscription("s", name="sub") as sub:
            found = []
            async for step in sub:
                found.append(step)
                await sub.ack(step)
            assert rows_of(found) == expected
    view = (await quiet.subscriptions("s"))["sub"]
    assert (view.position, view.lag, view.lag_updates) == (ap.Antichain(), 0, 0)


async def test_large_contents_go_on_in_the_middle(place: Place) -> None:
    """The contents come in steps; whichever was the last acknowledged, also by another process, and however
    compacted meanwhile, the rest follows. Nothing is skipped or comes twice, and later updates come then."""
    client = await place.client(**SMALL)
    expected = [(f"k{number:03}", number) for number in range(120)]
    await write(client, *expected)
    found: list[Any] = []
    for turn in range(200):
        async with client.subscription("s", name="sub") as sub:
            step = await in_time(anext(sub))
            await sub.ack(step)
            found += rows_of([step])
        if not step.contents:
            break
        if turn == 1:
            await write(client, ("k000", -1), ("zzz", -2))
            await client.admin.retain("s", 0)
        if turn % 3 == 1:
            await client.admin.force_compaction("s")
            await client.admin.force_gc("s")
            client = await place.client(**SMALL)
    assert turn > 5
    assert found[:-2] == expected
    assert sorted(found[-2:]) == [("k000", -1), ("zzz", -2)]


async def test_a_key_with_many_vals(place: Place) -> None:
    """Steps are bounded; a position may lie between two vals of one key."""
    client = await place.client(**SMALL)
    expected = [(key, number) for key in ("a", "b", "c") for number in range(200)]
    await write(client, *expected)
    found: list[Any] = []
    within: set[Any] = set()
    while len(found) < len(expected):
        async with client.subscription("s", name="sub") as sub:
            step = await in_time(anext(sub))
            assert len(step.updates) < 200
            await sub.ack(step)
            found += rows_of([step])
            record = sub._consumer._record
            within.add(found[-1][0])
        state = await client._shards.at(await client.shard_id("s")).open()
        contents = state.subscriptions["sub"].position.contents
        assert contents is None or contents.rows == len(found)
        assert record is not None
    assert found == expected
    assert within == {"a", "b", "c"}


class Spot(NamedTuple):
    row: int | None
    seat: int


KEYS: dict[str, tuple[Any, list[Any]]] = {
    "floats": (float, [-math.inf, -1.0, 0.0, *map(float, range(1, 60)), math.inf, math.nan]),
    "absent": (str | None, [None, *(f"{number:03}" for number in range(70))]),
    "absent structs": (
        Spot | None,
        [*[None] * 30, *[Spot(None, 1)] * 30, *(Spot(None, seat) for seat in range(2, 40)), Spot(0, 0)],
    ),
    "long": (str, ["x" * 2000 + f"{number:03}" for number in range(20)]),
    "lists": (list[int], [[number] for number in range(70)]),
    "bytes": (bytes, [bytes([number]) for number in range(70)]),
}


@pytest.mark.parametrize("kind", KEYS)
async def test_keys_of_any_type(place: Place, kind: str) -> None:
    """Also those that have no order in conditions, and those that are too long for a position."""
    key, keys = KEYS[kind]
    client = await place.client(**SMALL)
    schema = ap.Schema(key, int)
    async with client.writer("s", schema) as writer:
        await writer.write([(some, number) for number, some in enumerate(keys)])
    found: list[Any] = []
    steps = 0
    while len(found) < len(keys):
        async with client.subscription("s", schema, name="sub") as sub:
            step = await in_time(anext(sub))
            await sub.ack(step)
            found += rows_of([step])
            steps += 1
    assert [val for _, val in found] == list(range(len(keys)))
    assert steps > 3


async def test_cursors_are_those_of_feeds(place: Place) -> None:
    """A step's cursor goes on in a listen; `resume` takes the cursor of a listen, of a subscribe, and one
    within the contents."""
    client = await place.client(**SMALL)
    await write(client, *((f"k{number:03}", number) for number in range(60)))
    async with client.subscription("s", name="sub") as sub:
        steps = await contents_of(sub)
    async with client.reader("s", SCHEMA) as reader:
        await write(client, ("new", 1))
        async with reader.listen(cursor=steps[-1].cursor) as listen:
            async for updates in listen:
                assert isinstance(updates, ap.Updates)
                assert [update.key for update in updates] == ["new"]
                break
        async with reader.subscribe() as listen:
            snapshot = listen.cursor
        async with reader.listen() as listen:
            await write(client, ("last", 2))
            now = listen.cursor
    cases = {
        "within": (steps[2].cursor, 62 - len(rows_of(steps[:3]))),
        "snapshot": (snapshot, 62),
        "now": (now, 1),
    }
    for name, (cursor, count) in cases.items():
        async with client.subscription("s", name=name, resume=cursor) as sub:
            await rows(sub, count)


async def test_resume(place: Place) -> None:
    """A sink keeps the cursor; the subscription goes on behind it, though nothing was acknowledged. Not
    before the position."""
    client = await place.client()
    cursors = []
    await write(client, ("a", 0))
    async with client.subscription("s", name="sub", start="now") as sub:
        for number in range(1, 4):
            await write(client, ("a", number))
            cursors.append((await in_time(anext(sub))).cursor)
    async with client.subscription("s", name="sub", resume=cursors[1]) as sub:
        assert await rows(sub, 1) == [("a", 3)]
    with pytest.raises(ap.SinceViolation):
        await client.subscription("s", name="sub", resume=cursors[0])
    async with client.subscription("s", name="other", resume=cursors[0]) as sub:
        assert await rows(sub, 2) == [("a", 2), ("a", 3)]


async def test_a_cancelled_wait_loses_nothing(place: Place) -> None:
    """At any moment, within the contents and behind them."""
    client = await place.client(**SMALL)
    expected = [(f"k{number:03}", number) for number in range(60)]
    await write(client, *expected)
    found: list[Any] = []
    async with client.subscription("s", name="sub") as sub:
        for turns in range(10_000):
            waiting = asyncio.create_task(anext(sub))
            for _ in range(turns % 7):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            if not waiting.cancelled():
                found += rows_of([waiting.result()])
            if len(found) == len(expected) and (await client.upper("s")).time == 1:
                await write(client, ("last", 1))
            if len(found) > len(expected):
                break
    assert found == [*expected, ("last", 1)]


async def test_bad_arguments(quiet: ap.Client) -> None:
    """Each names what is wrong, and no subscription is made."""
    await write(quiet, ("a", 1))
    async with quiet.subscription("s", name="there") as sub:
        cursor = (await in_time(anext(sub))).cursor
    cases: list[tuple[Any, Any]] = [
        ({"name": ""}, "INVALID_NAME"),
        ({"name": 5}, "INVALID_NAME"),
        ({"name": "a[0/2]"}, "INVALID_NAME"),
        ({"start": "then"}, "INVALID_TIME"),
        ({"start": -1}, "INVALID_TIME"),
        ({"start": 1.5}, "INVALID_TIME"),
        ({"start": (1, 2)}, "INVALID_TIME"),
        ({"resume": "x"}, "INVALID_CURSOR"),
        ({"resume": 5}, "INVALID_CURSOR"),
        ({"resume": cursor, "start": "now"}, "INVALID_CURSOR"),
        ({"share": (2, 2)}, "INVALID_SHARE"),
        ({"share": (0, 0)}, "INVALID_SHARE"),
        ({"share": [0, 1]}, "INVALID_SHARE"),
        ({"share": (True, 2)}, "INVALID_SHARE"),
    ]
    for given, kind in cases:
        found = await refused(quiet.subscription("s", **{"name": "sub", **given}))
        assert found is ap.UsageKind[kind], given
    for wrong in ({"lease_s": 0}, {"expire_after": 5}):
        with pytest.raises(ValueError):
            await quiet.subscription("s", name="sub", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ap.UnknownShard):
        await quiet.subscription("other", name="sub")
    with pytest.raises(ap.CodecMismatch):
        await quiet.subscription("s", ap.Schema(int, int), name="sub")
    async with quiet.writer("product", ap.Schema(str, int, time=2)):
        pass
    assert await refused(quiet.subscription("product", name="sub")) is ap.UsageKind.INVALID_TIME
    assert list(await quiet.subscriptions("s")) == ["there"]


async def test_a_readonly_client_has_none(place: Place) -> None:
    """It may not write: refused before anything is sent; it sees those of others."""
    client = await place.client()
    await write(client, ("a", 1))
    await (await client.subscription("s", name="sub")).aclose()
    async with ap.open(**place.urls._asdict(), readonly=True) as reading:
        with pytest.raises(ap.Unsupported):
            await reading.subscription("s", name="sub")
        with pytest.raises(ap.Unsupported):
            await reading.table("t", str, int).subscription("sub")
        assert list(await reading.subscriptions("s")) == ["sub"]
        with pytest.raises(ap.Unsupported):
            await reading.drop_subscription("s", "sub")


async def test_a_subscription_keeps_what_it_has_not_read(place: Place) -> None:
    """Since does not pass its position, whatever `retain` says; an acknowledgement lets it go, and keeps
    nothing that was read."""
    client = await place.client(**SMALL)
    for number in range(10):
        await write(client, (f"k{number}", number))
    async with client.subscription("s", name="sub", start=3) as sub:
        await client.admin.retain("s", 0)
        await client.admin.force_compaction("s")
        assert (await client.admin.inspect("s")).since == ap.Antichain(3)
        steps = await steps_until(sub, lambda found: len(rows_of(found)) == 6)
        await sub.ack(steps[-1], durable=True)
    await client.admin.force_compaction("s")
    assert (await client.admin.inspect("s")).since == ap.Antichain(9)


@pytest.mark.parametrize("compacted", [True, False])
async def test_a_consumer_far_behind(place: Place, compacted: bool) -> None:
    """It gets steps of bounded size, also where everything is one batch by now; nothing is skipped, and it
    goes on between two of them. Most of the updates lie in a short part of the time."""
    client = await place.client(**{**SMALL, "row_group_bytes": 1000})
    async with client.writer("s", SCHEMA) as writer:
        await writer.compare_and_append([("first", 0, 0, 1)], 0, 1)
        await (await client.subscription("s", SCHEMA, name="sub", start="now")).aclose()
        upper = 1
        for number in range(300):
            time = upper if number else 10**12
            await writer.compare_and_append([(f"k{number}", number, time, 1)], upper, time + 1)
            upper = time + 1
    if compacted:
        await client.admin.retain("s", 0)
        await client.admin.force_compaction("s")
    found: list[int] = []
    sizes: list[int] = []
    while len(found) < 300:
        async with client.subscription("s", SCHEMA, name="sub") as sub:
            for _ in range(7):
                step = await in_time(anext(sub))
                await sub.ack(step)
                found += sorted(update.val for update in step.updates)
                sizes.append(len(step.updates))
                if len(found) == 300:
                    break
    assert found == list(range(300))
    assert max(sizes) < 150
    assert len(sizes) < 60


async def test_one_time_is_one_step(place: Place) -> None:
    """It cannot be cut, however large it is."""
    client = await place.client(**SMALL)
    await write(client, ("a", 0))
    async with client.subscription("s", SCHEMA, name="sub") as sub:
        await acked(sub, 1)
        await write(client, *((f"k{number:03}", number) for number in range(500)))
        step = await in_time(anext(sub))
        assert len(step.updates) == 500


@pytest.mark.parametrize(("memory", "passes_max"), [(2**28, 1), (2**16, 6)])
async def test_a_step_does_not_read_a_large_batch_again(place: Place, memory: int, passes_max: int) -> None:
    """One pass over its parts is for as many steps as fit into memory."""
    sizes = {"row_group_bytes": 2000, "blob_target_size": 3000, "compaction_memory_bytes": 2**18}
    limits = {**SMALL, **sizes, "read_memory_bytes": memory}
    client, faults = await place.client(**limits), Faults()
    async with client.writer("s", SCHEMA) as writer:
        await (await client.subscription("s", SCHEMA, name="sub", start=0)).aclose()
        for time in range(0, 400, 100):
            updates = [(f"k{n * 7919 % 10_000:05}", n, time + n % 100, 1) for n in range(1000)]
            await writer.compare_and_append(updates, time, time + 100)
        await writer.compare_and_append([("z", 0, 400, 1)], 400, 401)
    await client.admin.retain("s", 0)
    await client.admin.force_compaction("s")
    (batch,) = (await client._shards.at(await client.shard_id("s")).open()).batches.values()
    assert len(batch.parts) > 5
    opening = ap.open(
        blob=FaultyBlob(place.blob, faults),
        consensus=place.clock,
        settings=ap.Settings(**{**limits, "blob_cache_bytes": 1}),
        maintenance=False,
    )
    async with opening as other, other.subscription("s", SCHEMA, name="sub") as sub:
        faults.calls.clear()
        steps = await steps_until(sub, lambda found: found[-1:] and found[-1].upper == ap.Antichain(401))
    assert len(steps) > 12
    times = [time for step in steps for time in sorted({time for *_, time, _ in step.updates.rows()})]
    assert times == list(range(1, 401)), "whole times, in their order"
    assert sum(len(step.updates) for step in steps) == 4001 - 10
    assert faults.calls["get"] + faults.calls["get_range"] <= passes_max * len(batch.parts) + 2, faults.calls
