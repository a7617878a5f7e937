"""A location with every kind of object, stores that serve one of them damaged, and all that can be read."""

from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any, NamedTuple

import aiopersist as ap
from aiopersist.storage.consensus import Versioned
from aiopersist.storage.wrapper import WrappedBlob, WrappedConsensus

SCHEMA = ap.Schema(key=str, val=int)
SETTINGS = ap.Settings(inline_writes_single_max_bytes=300, rollup_every=1000, retry_timeout_s=0.0)
SHARDS = ("one", "two")
TOLD = (ap.Corruption, ap.InvalidLocation)


class Place(NamedTuple):
    """One object: a blob, or a version of a key."""

    key: str
    seqno: int | None = None

    @property
    def kind(self) -> str:
        if self.seqno is None:
            return self.key.rpartition(".")[2] if "." in self.key else "identity"
        return "identity" if self.key.startswith("location") else self.key.partition("/")[0]


class Damage(NamedTuple):
    """What is served instead of an object; `None`: nothing."""

    place: Place
    how: str
    data: bytes | None


class DamagedBlob(WrappedBlob):
    """Serves one blob so."""

    def __init__(self, inner: ap.Blob, damage: Damage) -> None:
        super().__init__(inner)
        self.damage = damage

    async def get(self, key: str) -> bytes | None:
        return self.damage.data if self.damage.place == Place(key) else await self.inner.get(key)

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        if self.damage.place == Place(key):
            data = self.damage.data
            return None if data is None else data[offset : offset + length]
        return await self.inner.get_range(key, offset, length)


class DamagedConsensus(WrappedConsensus):
    """Serves one version so."""

    def __init__(self, inner: ap.Consensus, damage: Damage) -> None:
        super().__init__(inner)
        self.damage = damage

    def _served(self, key: str, version: Versioned | None) -> Versioned | None:
        if version is None or self.damage.place != Place(key, version.seqno):
            return version
        return None if self.damage.data is None else Versioned(version.seqno, self.damage.data)

    async def head(self, key: str) -> Versioned | None:
        return self._served(key, await self.inner.head(key))

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        return {key: self._served(key, head) for key, head in (await self.inner.heads(known)).items()}

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        found = [self._served(key, version) for version in await self.inner.scan(key, from_seqno, limit)]
        return [version for version in found if version is not None]


async def fill(client: ap.Client) -> None:
    """Two shards that differ in their contents alone, with parts, inline parts, a rollup and versions behind
    it; a table with ids, and an `Indexed`."""
    for number, name in enumerate(SHARDS):
        async with client.writer(name, SCHEMA) as writer:
            for time in range(4):
                many = 200 if time % 2 else 2
                rows = [(f"{time} {row:03}", row + 1000 * number, time, 1) for row in range(many)]
                await writer.compare_and_append(rows, time, time + 1)
            await client.admin.force_gc(name)
            for time in (4, 5):
                await writer.compare_and_append([(f"late {time}", time + number, time, 1)], time, time + 1)
    table = client.table("stock", str, int)
    for number in range(4):
        await table.put(f"item {number}", number, once=f"request {number}")
    async with client.indexed("orders", background=False) as indexed:
        placed = await indexed.register("placed", str, int)
        await indexed.write([(placed, [("a", 1, 0, 1), ("b", 2, 1, 1)])])
        await indexed.seal([placed], 2)


async def objects(blob: ap.Blob, consensus: ap.Consensus) -> dict[Place, bytes]:
    """Everything that is stored."""
    found: dict[Place, bytes] = {}
    async for key, _ in blob.list(""):
        data = await blob.get(key)
        assert data is not None
        found[Place(key)] = data
    for key in await consensus.list_keys(""):
        for version in await consensus.scan(key, 0, 1000):
            found[Place(key, version.seqno)] = version.data
    return found


def damages(stored: Mapping[Place, bytes], dice: Random) -> list[Damage]:
    """Several of every object."""
    found: list[Damage] = []
    heads = {place.key: max(p.seqno or 0 for p in stored if p.key == place.key) for place in stored}
    for place, data in stored.items():
        for _ in range(3):
            at = dice.randrange(len(data))
            flipped = data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]
            found.append(Damage(place, f"flipped at {at} of {len(data)}", flipped))
        if place.seqno is not None:  # another number, which is well-formed
            digits = [at for at, byte in enumerate(data) if byte in b"0123456789"]
            for at in dice.sample(digits, min(4, len(digits))):
                other = b"%d" % ((data[at] - 48 + dice.randrange(1, 10)) % 10)
                found.append(Damage(place, f"a digit at {at}", data[:at] + other + data[at + 1 :]))
        found.append(Damage(place, "truncated", data[: dice.randrange(1, len(data))]))
        found.append(Damage(place, "longer", data + dice.randbytes(dice.randrange(1, 40))))
        found.append(Damage(place, "emptied", b""))
        others = [other for other in stored if other.kind == place.kind and other.key != place.key]
        of_number = [other for other in others if other.seqno == place.seqno] or others
        found += [Damage(place, f"swapped with {other}", stored[other]) for other in of_number[:3]]
        if place.seqno:
            older = stored.get(Place(place.key, place.seqno - 1))
            found += [Damage(place, "replayed", older)] if older is not None else []
        if (
            place.seqno is None or place.seqno < heads[place.key]
        ):  # a head that is gone: `fill` was not so far
            found.append(Damage(place, "missing", None))
    return [damage for damage in found if damage.data != stored[damage.place]]


Read = Callable[[ap.Client], Awaitable[Any]]


async def _snapshot(client: ap.Client, name: str, as_of: int | None = None) -> Any:
    async with client.reader(name, SCHEMA) as reader, reader.snapshot(as_of) as snapshot:
        return await snapshot.rows()


async def _updates(client: ap.Client, name: str) -> Any:
    async with client.reader(name, SCHEMA) as reader, reader.subscribe(0) as updates:
        found: list[Any] = []
        async for step in updates.steps():
            found += [tuple(update) for update in step.updates]
            if step.upper.time >= 6:
                break
        return sorted(found)


async def _items(client: ap.Client) -> Any:
    table = client.table("stock", str, int)
    return [entry async for entry in table.items()], await table.get("item 2")


async def _ids(client: ap.Client) -> Any:
    return [await client.happened(f"request {number}", "stock") for number in range(5)]


async def _stream(client: ap.Client) -> Any:
    async with client.indexed("orders", readonly=True) as indexed:
        placed = await indexed.load("placed", str, int)
        assert placed is not None
        async with indexed.snapshot(placed) as snapshot:
            return sorted(await snapshot.rows())


async def _names(client: ap.Client) -> Any:
    return sorted((found.name, str(found.shard_id)) for found in await client.admin.overview())


READS: dict[str, Read] = {
    **{f"snapshot of {name}": lambda client, name=name: _snapshot(client, name) for name in SHARDS},  # type: ignore[misc]
    **{f"history of {name}": lambda client, name=name: _snapshot(client, name, 3) for name in SHARDS},  # type: ignore[misc]
    **{f"updates of {name}": lambda client, name=name: _updates(client, name) for name in SHARDS},  # type: ignore[misc]
    "items": _items,
    "ids": _ids,
    "stream": _stream,
    "names": _names,
}
