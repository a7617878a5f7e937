"""A random game in one process: tasks of several clients make calls on tables (`moves.py`), while the stores
fail, answers get lost, calls are cancelled, two clients make one call, views become resident and others
again, and everything is compacted and collected. `verdict.py` checks what they were told.
"""

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.conftest import StoreUrls
from tests.support.virtual import played
from tests.table.history import Event
from tests.table.moves import JOURNAL, RATES, TABLES, Move, Player, drawn
from tests.table.verdict import verify

FAULTS = {Outcome.REFUSED: 0.02, Outcome.LOST: 0.03, Outcome.DROPPED: 0.02, Outcome.LATE: 0.01}
LIMITS = {"row_group_bytes": 200, "blob_target_size": 400, "open_timeout_s": 50.0}
RESIDENT = (0, 450, 900, 2**26)  # nothing, few keys, all


@dataclass(frozen=True)
class Size:
    """Of a game; one of each is drawn."""

    clients: tuple[int, ...] = (2, 3)
    tasks: tuple[int, ...] = (2, 6)
    """Of each client."""
    moves: int = 12
    """Of each task."""
    cuts: int = 40
    """Commit times at which all tables are read."""
    maintaining: float = 0.03


BRIEF = Size(tasks=(1, 2, 3), moves=6, cuts=3, maintaining=0.1)


class Troubles(Faults):
    """Hints come: one that lands late would be waited for."""

    def outcome(self, op: str) -> Outcome:
        return Outcome.DONE if op == "watch" else super().outcome(op)


class Actor:
    """A client, and what its tasks do."""

    def __init__(self, player: Player, faults: Faults, game: "Game") -> None:
        self.player = player
        self.faults = faults
        self.game = game
        self.turning = game.rng.choice([0.0, 0.1])

    async def play(self, task: int, rng: random.Random) -> None:
        size = self.game.size
        for number in range(size.moves):
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
            if rng.random() < size.maintaining:
                await self._maintain(rng)
            if rng.random() < self.turning:
                await self._turn(rng)
            await self._make(drawn(rng, f"{self.player.name}{task}-{number}", self.game.rates), rng)

    async def _make(self, move: Move, rng: random.Random) -> None:
        other = rng.choice(self.game.actors) if move.once and rng.random() < 0.4 else self
        work = asyncio.ensure_future(self._told(move, other))
        if rng.random() < self.game.cancelling:
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            work.cancel()
            self.game.counts["cancelled"] += 1
        await asyncio.wait([work])
        if not work.cancelled():
            work.result()

    async def _told(self, move: Move, other: "Actor") -> None:
        """Make it, again and again if it has an id, perhaps with another client at the same moment."""
        counts = self.game.counts
        counts["both"] += other is not self
        players = [self.player] if other is self else [self.player, other.player]
        while not all(await asyncio.gather(*(player.do(move) for player in players))):
            counts["untold"] += 1
            if move.once is None:
                return
            counts["again"] += 1
            await asyncio.sleep(0.001)
        counts[move.kind] += 1
        if move.once and other is not self:
            await other.player.do(move)

    async def _turn(self, rng: random.Random) -> None:
        """A view becomes resident, or is no longer; calls are under way."""
        name, resident = rng.choice(TABLES), rng.choice([True, False, None])
        before = (await self.player.tables[name].view()).resident
        try:
            now = await self.player.client.table(name, str, str, resident=resident).view()
        except (ap.StorageUnavailable, ap.Indeterminate):
            return
        self.game.counts["became resident" if now.resident else "became partial"] += now.resident != before

    async def _maintain(self, rng: random.Random) -> None:
        client = self.player.client
        try:
            await rng.choice([client.admin.force_compaction, client.force_gc])(rng.choice([*TABLES, JOURNAL]))
            await self.faults.land()
            self.game.counts["maintained"] += 1
        except (ap.MissingPart, ap.StorageUnavailable, ap.Indeterminate):
            pass


class Game:
    """See the header."""

    def __init__(
        self,
        seed: int,
        rates: Mapping[str, float] = RATES,
        urls: StoreUrls | None = None,
        *,
        calm: bool = False,
        size: Size = Size(),
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.rates = dict(rates)
        self.calm = calm
        self.size = size
        self.cancelling = 0.0 if calm else 0.1
        self.events: list[Event] = []
        self.actors: list[Actor] = []
        self.counts: Counter[str] = Counter()
        self.urls = urls or StoreUrls(*2 * [f"mem://{uuid.uuid4().hex}"])

    async def _actor(self, stack: AsyncExitStack, name: str) -> None:
        faults = Troubles(self.rng.randrange(10**6), latency_s=(0.0, 0.002))
        faults.losing_hints = self.rng.random() < 0.3  # then views learn by heads alone
        settings = ap.Settings(
            watch_timeout_s=1.0 if faults.losing_hints else 0.02,
            retry_timeout_s=self.rng.choice([0.0, None]),
            inline_writes_single_max_bytes=self.rng.choice([0, 16384]),
            table_resident_bytes=self.rng.choice(RESIDENT),
            **LIMITS,
        )
        blob, consensus = ap.open_blob(self.urls.blob), ap.open_consensus(self.urls.consensus)
        stack.push_async_callback(blob.aclose)
        stack.push_async_callback(consensus.aclose)
        opening = ap.open(
            blob=FaultyBlob(blob, faults),
            consensus=FaultyConsensus(consensus, faults),
            settings=settings,
            maintenance=False,
        )
        client = await stack.enter_async_context(opening)
        player = await Player(name, client, self.events.append).open()
        self.actors.append(Actor(player, faults, self))
        faults.rates = {} if self.calm or self.rng.random() < 0.2 else dict(FAULTS)

    async def play(self) -> Counter[str]:
        async with AsyncExitStack() as stack:
            opening = ap.open(blob=self.urls.blob, consensus=self.urls.consensus, maintenance=False)
            honest = await stack.enter_async_context(opening)
            await Player("setup", honest, self.events.append).prepare()
            for name in "xyz"[: self.rng.choice(self.size.clients)]:
                await self._actor(stack, name)
            games = [
                actor.play(task, random.Random(self.rng.randrange(10**6)))
                for actor in self.actors
                for task in range(self.rng.choice(self.size.tasks))
            ]
            async with asyncio.timeout(150):
                await asyncio.gather(*games)
            await self._end(honest)
        return self.counts

    async def _end(self, honest: ap.Client) -> None:
        for actor in self.actors:
            actor.faults.heal()
        for actor in self.actors:
            await actor.faults.land()
            for table in actor.player.tables.values():  # behind what cancelled calls have sent
                await table.delete("nothing")
        await verify(honest, self.events, f"tables {self.seed}", cuts=self.size.cuts)
        for name in TABLES:
            final = dict([entry async for entry in honest.table(name, key=str, val=str).items()])
            for actor in self.actors:
                table = actor.player.tables[name]
                assert await table.get_many(final) == final, (actor.player.name, name)
                assert await table.get_many(final, stale=True) == final, (actor.player.name, name)
                view = await table.view()
                assert not view.resident or view.keys == len(final)


async def play(seed: int, **options: Any) -> Counter[str]:
    """One game; what happened in it. A failure names the seed."""
    try:
        return await Game(seed, **options).play()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


def play_brief(seed: int, **options: Any) -> Counter[str]:
    """A small one, in no time (`tests/support/virtual.py`)."""
    return played(seed, lambda: Game(seed, size=BRIEF, **options).play())
