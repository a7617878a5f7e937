"""What the moves of a game share: its stores, who is there, what is possible, and its story."""

import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiopersist as ap
from aiopersist.indexed import Stream
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyConsensus
from tests.indexed.game.model import Model
from tests.indexed.game.worlds import Possible
from tests.indexed.line import LineBlob, kill
from tests.indexed.seeded_loop import SeededRuntime, Wire

NAME = "game"
TRANSIENT = (ap.StorageUnavailable, ap.Indeterminate)
SPINS = 300  # turns of the loop in which whatever is due has happened

TYPES: list[tuple[Any, Any]] = [(str, int), (int, str), (str, str)]
SCHEMAS = [ap.Schema(key, val) for key, val in TYPES]
VALUES: dict[Any, list[Any]] = {str: ["", "a", "b", "é" * 20], int: [0, 1, -1, 2**40]}


def kind_of(name: str) -> int:
    return int(name[1:]) % len(TYPES)


def stream(name: str) -> Stream[Any, Any]:
    return Stream(name, SCHEMAS[kind_of(name)])


@dataclass(eq=False)
class Player:
    """An instance in a process of its own, and what it has open."""

    line: Wire
    client: Any
    ix: Any
    background: bool = False
    fenced: bool = False
    snapshots: list[tuple[Any, str, Any]] = field(default_factory=list)
    listeners: list["Listening"] = field(default_factory=list)
    flights: dict[str, Any] = field(default_factory=dict)
    """Requests in flight, by stream."""


@dataclass(eq=False)
class Listening:
    """A listener, and how far it was told."""

    name: str
    events: Any
    start: int
    seal: int
    taken: int = 0
    owners: bool = True


class Game:
    """One game of `play.py`."""

    def __init__(self, seed: int, *, faulty: bool) -> None:
        self.seed = seed
        self.faulty = faulty
        self.rng = random.Random(f"{seed} {faulty}")
        self.lag = random.Random(f"lag {seed}")
        self.runtime = SeededRuntime(seed)
        self.faults = Faults(seed, {})
        self.blob, self.consensus = MemoryBlob(), MemoryConsensus(runtime=self.runtime)
        self.settings = self.chosen_settings()
        self.counts: Counter[str] = Counter()
        self.possible = Possible(self.counts)
        self.owner: Player | None = None
        self.ghost: Player | None = None
        self.reader: Player | None = None
        self.rude = faulty
        """Something was cut off, or made in vain: blobs may be left to the sweep."""
        self.responses: list[tuple[str, Any]] = []
        self.story: list[str] = []
        self.fresh = 0

    def chosen_settings(self) -> ap.Settings:
        pick = self.rng.choice
        return ap.Settings(
            rollup_every=pick([4, 6, 8, 20]),
            watch_timeout_s=0.02,
            blob_target_size=pick([40, 150, 150, 2**20]),
            row_group_bytes=pick([40, 80, 2**20]),
            inline_writes_single_max_bytes=pick([0, 0, 60, 300]),
            indexed_inline_total_max_bytes=pick([100, 500, 2**20]),
            blob_cache_bytes=0,
            retry_timeout_s=pick([0.0, 0.0, 0.05, None]),
            listen_queue_max=pick([1, 2, 3, 100]),
            compaction_memory_bytes=pick([1, 400, 2**20]),
            indexed_step_s=0.002,
            fetch_max_outstanding_parts=pick([1, 3]),
        )

    @property
    def model(self) -> Model:
        return self.possible.model

    @property
    def decided(self) -> bool:
        return self.possible.is_decided

    def note(self, text: str) -> None:
        self.story.append(text)
        self.counts[re.split(r"\W", text)[0]] += 1

    async def open(self, *, readonly: bool = False, background: bool = False) -> Player:
        """An instance that is there in the end, however often it takes."""
        while True:
            line, client = Wire(self.faults, self.lag), None
            try:
                client = await self.opened_client(line)
                ix = await client.indexed(NAME, readonly=readonly, background=background)
                return Player(line, client, ix, background)
            except TRANSIENT:
                assert self.faulty
                if client is not None:
                    await client.aclose()

    async def opened_client(self, line: Wire) -> Any:
        between: Any = line
        stores = {
            "blob": LineBlob(self.blob, between),
            "consensus": FaultyConsensus(self.consensus, between),
        }
        return await ap.open(**stores, settings=self.settings, maintenance=False, runtime=self.runtime)

    async def maintainer(self) -> Any:
        while True:
            try:
                return await self.opened_client(Wire(self.faults, self.lag))
            except TRANSIENT:
                assert self.faulty

    async def kill(self, player: Player) -> None:
        await kill(player.line, player.client)
        await self.faults.land()
