"""Shares: n consumers divide the keys, each with a position of its own."""

import asyncio
from enum import Enum
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.subscription.share import within_share
from tests.subscription.kit import SMALL, in_time, steps_until, write
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import refused


async def keys_within(sub: Any, upper: ap.Antichain) -> list[str]:
    """The keys of all updates before `upper`; all is acknowledged."""
    steps = await steps_until(sub, lambda found: bool(found) and found[-1].upper >= upper)
    await sub.ack(steps[-1], durable=True)
    return [update.key for step in steps for update in step.updates]


class Consumers(str, Enum):  # noqa: UP042 - a StrEnum is written as its text
    BILLING = "billing"


async def test_a_name_that_is_a_member_of_an_enum(client: ap.Client) -> None:
    """Goal: it names what its text names, though it is written otherwise."""
    await write(client, ("a", 1))
    async with client.subscription("s", SCHEMA, name=Consumers.BILLING, share=(0, 1)) as sub:
        assert await keys_within(sub, ap.Antichain(1)) == ["a"]
    assert list(await client.admin.subscriptions("s")) == ["billing[0/1]"]
    async with client.reader("s", hold=1, hold_name=Consumers.BILLING):
        assert (await client.admin.inspect("s")).readers.keys() >= {"name:billing"}


async def test_they_divide_the_keys(client: ap.Client) -> None:
    """Contents and later updates: each key belongs to one share, always the same."""
    names = [f"k{number}" for number in range(100)]
    await write(client, *((name, 1) for name in names))
    subs = [await client.subscription("s", SCHEMA, name="sub", share=(i, 3)) for i in range(3)]
    first = [await keys_within(sub, ap.Antichain(1)) for sub in subs]
    await write(client, *((name, 2) for name in names))
    second = [await keys_within(sub, ap.Antichain(2)) for sub in subs]
    assert sorted(key for some in first for key in some) == sorted(names)
    assert all(len(some) > 10 for some in first)
    assert [sorted(some) for some in second] == [sorted(some) for some in first]
    for sub in subs:
        await sub.aclose()


def test_the_division_is_the_same_on_every_machine() -> None:
    """A hash that Python salts, or that depends on a library, would give a key to two consumers, or none."""
    keys = {"strings": ["apple", "bär", "", "漢"], "ints": [1, 2, 3, 2**60]}
    divided = {
        kind: [within_share(pa.table({"key": some}), (i, 4)).column("key").to_pylist() for i in range(4)]
        for kind, some in keys.items()
    }
    assert divided == {
        "strings": [[], ["apple"], ["漢"], ["bär", ""]],
        "ints": [[2**60], [2], [], [1, 3]],
    }


async def test_each_has_its_own_position_and_owner(place: Place) -> None:
    """One that crashes goes on where it was; the other is not touched, nor fenced."""
    client = await place.client(**SMALL)
    names = [f"k{number:03}" for number in range(80)]
    await write(client, *((name, 1) for name in names))
    async with client.subscription("s", SCHEMA, name="sub", share=(0, 2)) as other:
        found: list[str] = []
        while len(found) < len(names):
            async with client.subscription("s", SCHEMA, name="sub", share=(1, 2)) as sub:
                step = await in_time(anext(sub))
                await sub.ack(step)
                found += [update.key for update in step.updates]
                if not step.contents or step.upper == ap.Antichain(1):
                    break
        views = await client.admin.subscriptions("s")
        assert {name: view.position for name, view in views.items()} == {
            "sub[0/2]": ap.Antichain(0),
            "sub[1/2]": ap.Antichain(1),
        }
        rest = await keys_within(other, ap.Antichain(1))
    assert sorted(found + rest) == names
    assert found == sorted(found)


async def test_another_number_of_shares(place: Place) -> None:
    """Is refused while positions are there; after a drop of the name it may change."""
    client = await place.client()
    await write(client, ("a", 1))
    for i in range(2):
        await (await client.subscription("s", name="sub", share=(i, 2))).aclose()
    for share in ((0, 3), None):
        assert await refused(client.subscription("s", name="sub", share=share)) is ap.UsageKind.INVALID_SHARE
    await client.admin.drop_subscription("s", "sub")
    assert await client.admin.subscriptions("s") == {}
    for i in range(3):
        await (await client.subscription("s", name="sub", share=(i, 3))).aclose()
    assert await refused(client.subscription("s", name="sub")) is ap.UsageKind.INVALID_SHARE
    with pytest.raises(LookupError):
        await client.admin.drop_subscription("s", "sub[0/3]")


async def test_shares_hold_history_each(place: Place) -> None:
    client = await place.client()
    await write(client, ("a", 1))
    subs = [await client.subscription("s", name="sub", share=(i, 2)) for i in range(2)]
    for number in range(9):
        await write(client, ("a", number))
    await client.admin.retain("s", 0)
    await steps_until(subs[0], lambda found: bool(found) and found[-1].upper == ap.Antichain(10))
    await keys_within(subs[1], ap.Antichain(10))
    await client.admin.force_compaction("s")
    assert (await client.admin.inspect("s")).since == ap.Antichain(0)
    await asyncio.gather(*(sub.aclose() for sub in subs))
