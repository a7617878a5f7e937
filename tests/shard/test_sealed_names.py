"""Goal: the record of a name is believed only as the version of the name that it was written as; records of
earlier releases, which have no checksum, are read."""

import json

import pytest

import aiopersist as ap
from aiopersist.shard.catalog import ShardId, named
from aiopersist.storage.consensus import Versioned
from tests.support.schemas import SCHEMA


async def records(*names: str) -> dict[str, Versioned]:
    """The records of two shards of those names."""
    consensus = ap.open_consensus("mem://")
    async with ap.open(blob=ap.open_blob("mem://"), consensus=consensus, maintenance=False) as client:
        for name in names:
            async with client.writer(name, SCHEMA):
                pass
        found = {name: await consensus.head(f"name/{name}") for name in names}
    return {name: head for name, head in found.items() if head is not None}


async def test_a_record_of_another_name_or_version_is_told() -> None:
    heads = await records("one", "two")
    assert named("one", heads["one"], ShardId) != named("two", heads["two"], ShardId)
    with pytest.raises(ap.Corruption, match="checksum"):
        named("one", heads["two"], ShardId)
    with pytest.raises(ap.Corruption, match="checksum"):
        named("one", Versioned(2, heads["one"].data), ShardId)


async def test_another_id_is_told() -> None:
    heads = await records("one")
    data = heads["one"].data
    at = data.index(b'"shard": "s') + len(b'"shard": "s')
    other = b"1" if data[at : at + 1] != b"1" else b"2"
    with pytest.raises(ap.Corruption, match="checksum"):
        named("one", Versioned(0, data[:at] + other + data[at + 1 :]), ShardId)


async def test_a_record_without_a_checksum_is_read() -> None:
    heads = await records("one")
    value = json.loads(heads["one"].data)
    assert value.pop("sum")
    plain = Versioned(0, json.dumps(value).encode())
    assert named("one", plain, ShardId) == named("one", heads["one"], ShardId)
