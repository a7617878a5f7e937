"""Goal: an object that a store damaged, lost, or mistook for another one is told, and never served as other
contents: each read gives what was written, or `Corruption` (`InvalidLocation` for the id of a location)."""

import asyncio
from collections import Counter
from random import Random
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from tests.fuzz.damage import (
    READS,
    SETTINGS,
    TOLD,
    Damage,
    DamagedBlob,
    DamagedConsensus,
    Place,
    damages,
    fill,
    objects,
)

pytestmark = pytest.mark.several_shards
NOTHING = Damage(Place("nothing"), "sound", None)
SOME = 30


class Trial:
    """A location, and what its reads give."""

    async def open(self) -> None:
        self.blob, self.consensus = MemoryBlob(), MemoryConsensus()
        opening = ap.open(blob=self.blob, consensus=self.consensus, settings=SETTINGS, maintenance=False)
        async with opening as client:
            await fill(client)
        self.truth, told = await self.read(NOTHING)
        assert not told
        self.stored = await objects(self.blob, self.consensus)

    async def read(self, damage: Damage) -> tuple[dict[str, Any], dict[str, Exception]]:
        """What each read gives, or raises. A client of its own for each, that knows nothing."""
        found: dict[str, Any] = {}
        told: dict[str, Exception] = {}
        for name, read in READS.items():
            try:
                opening = ap.open(
                    blob=DamagedBlob(self.blob, damage),
                    consensus=DamagedConsensus(self.consensus, damage),
                    settings=SETTINGS,
                    readonly=True,
                )
                async with asyncio.timeout(20), opening as client:
                    found[name] = await read(client)
            except TOLD as error:
                told[name] = error
            except BaseException as error:
                error.add_note(f"{name}: {damage.place} {damage.how}: {damage.data!r:.600}")
                raise
        return found, told

    async def check(self, damage: Damage) -> bool:
        """Whether it was told."""
        found, told = await self.read(damage)
        for name, value in found.items():
            assert value == self.truth[name], f"{name}: {damage.place} {damage.how}"
        return bool(told)


async def tried(chosen: int | None) -> Counter[str]:
    """How often the damage of each kind of object was told, and was not: then no read needed the object."""
    trial = Trial()
    await trial.open()
    cases, counts = damages(trial.stored, Random(1)), Counter[str]()
    if chosen is not None:
        well_formed = [case for case in cases if "digit" in case.how and case.place.kind == "shard"]
        cases = Random(2).sample(cases, chosen) + Random(3).sample(well_formed, chosen)
    for damage in cases:
        told = await trial.check(damage)
        counts[f"{damage.place.kind} {'told' if told else 'not needed'}"] += 1
    return counts


@pytest.mark.slow
async def test_some_damage() -> None:
    counts = await tried(SOME)
    assert {kind for kind in counts if kind.endswith("told")} >= {"shard told", "parquet told", "name told"}


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_all_damage() -> None:
    counts = await tried(None)
    print(dict(counts))
    kinds = ("shard", "indexed", "parquet", "rollup", "name", "indexed-name", "identity")
    assert not [kind for kind in kinds if not counts[f"{kind} told"]]
