"""Two stores are one location, or they are refused."""

import asyncio

import pytest

from aiopersist.base.errors import Indeterminate, InvalidLocation, StorageUnavailable
from aiopersist.storage.cache import CacheBlob
from aiopersist.storage.consensus import Versioned
from aiopersist.storage.identity import BLOB_KEY, CONSENSUS_KEY, check_identity, location_key
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome


async def test_the_same_id_for_ever() -> None:
    blob, consensus = MemoryBlob(), MemoryConsensus()
    first = await check_identity(blob, consensus)
    assert await check_identity(blob, consensus) == first
    assert await blob.get(BLOB_KEY) == first.encode()
    assert await consensus.head(CONSENSUS_KEY) == Versioned(1, first.encode())


async def test_racing_first_users_agree() -> None:
    blob, consensus = MemoryBlob(), MemoryConsensus()
    ids = await asyncio.gather(*(check_identity(blob, consensus) for _ in range(10)))
    assert len(set(ids)) == 1


async def test_a_first_user_races_with_another() -> None:
    """Another client creates the location, and data in it, between any two of our steps."""
    for steps in range(12):
        blob, consensus = MemoryBlob(), MemoryConsensus()
        ours = asyncio.create_task(check_identity(blob, consensus))
        for _ in range(steps):
            await asyncio.sleep(0)
        theirs = await check_identity(blob, consensus)
        await blob.set("s/w/part.parquet", b"x")
        await consensus.compare_and_set("shard/s", None, b"x")
        assert await ours == theirs


@pytest.mark.parametrize("moment", ["after the first head", "after the first get"])
async def test_what_was_read_is_old_when_it_arrives(moment: str) -> None:
    """Another client creates the location and writes to it while an answer is on its way to us."""
    stores = MemoryBlob("identity " + moment), MemoryConsensus("identity " + moment)
    theirs: list[str] = []

    async def create() -> None:
        if not theirs:
            theirs.append(await check_identity(*stores))
            await stores[0].set("s/w/part.parquet", b"x")

    class SlowConsensus(MemoryConsensus):
        async def head(self, key: str) -> Versioned | None:
            answer = await super().head(key)
            if moment == "after the first head":
                await create()
            return answer

    class SlowBlob(MemoryBlob):
        async def get(self, key: str) -> bytes | None:
            answer = await super().get(key)
            await create()
            return answer

    ours = await check_identity(SlowBlob("identity " + moment), SlowConsensus("identity " + moment))
    assert ours == theirs[0]


async def test_stores_of_two_locations() -> None:
    blob_a, consensus_a, blob_b, consensus_b = (
        MemoryBlob(),
        MemoryConsensus(),
        MemoryBlob(),
        MemoryConsensus(),
    )
    await check_identity(blob_a, consensus_a)
    await check_identity(blob_b, consensus_b)
    for blob, consensus in ((blob_a, consensus_b), (blob_b, consensus_a)):
        with pytest.raises(InvalidLocation, match="different locations"):
            await check_identity(blob, consensus)


async def test_one_store_of_a_location_and_a_fresh_one() -> None:
    blob, consensus = MemoryBlob(), MemoryConsensus()
    await check_identity(blob, consensus)
    with pytest.raises(InvalidLocation, match="blobs are not"):
        await check_identity(MemoryBlob(), consensus)
    with pytest.raises(InvalidLocation, match="does not know"):
        await check_identity(blob, MemoryConsensus())


async def test_files_of_another_program() -> None:
    blob, consensus = MemoryBlob(), MemoryConsensus()
    await blob.set("photos/cat.jpg", b"x")
    with pytest.raises(InvalidLocation, match="holds data"):
        await check_identity(blob, consensus)
    assert await consensus.head(CONSENSUS_KEY) is None
    assert [key async for key, _ in blob.list("")] == ["photos/cat.jpg"]


@pytest.mark.parametrize("crash", [1, 2, 3])
async def test_after_a_crash_the_next_client_goes_on(crash: int) -> None:
    """The crash comes after the claim or after the blob."""
    blob, consensus = MemoryBlob(), MemoryConsensus()
    await consensus.compare_and_set(CONSENSUS_KEY, None, b"the id")
    if crash >= 2:
        await blob.set(BLOB_KEY, b"the id")
    if crash >= 3:
        await consensus.compare_and_set(CONSENSUS_KEY, 0, b"the id")
    assert await check_identity(blob, consensus) == "the id"
    assert await check_identity(blob, consensus) == "the id"


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED])
async def test_a_lost_answer_is_settled(outcome: Outcome) -> None:
    blob, consensus = MemoryBlob(), MemoryConsensus()
    faults = Faults()
    faults.fail_next("compare_and_set", outcome, times=2)
    first = await check_identity(FaultyBlob(blob, faults), FaultyConsensus(consensus, faults))
    assert await check_identity(blob, consensus) == first


async def test_other_failures_are_raised() -> None:
    faults = Faults()
    faults.fail_next("head", Outcome.DROPPED)
    with pytest.raises(Indeterminate):
        await check_identity(MemoryBlob(), FaultyConsensus(MemoryConsensus(), faults))


async def test_a_key_is_made_of_nothing_but_the_id() -> None:
    """Goal: who stands between and answers in place of the store chooses no key, and is not remembered."""

    class Between(MemoryBlob):
        is_away = True

        async def get(self, key: str) -> bytes | None:
            return b'{"error": "log in"}' if self.is_away else await super().get(key)

    between = Between()
    blob = CacheBlob(between, 1024)
    with pytest.raises(StorageUnavailable, match="is no id of a location"):
        await location_key(blob, "a")
    between.is_away = False
    await check_identity(blob.uncached, MemoryConsensus())
    assert await location_key(blob, "a") == await location_key(CacheBlob(between, 1024), "a")
