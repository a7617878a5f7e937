"""What the programs of a world share: its dice, its ledger and its settings."""

import asyncio
from contextlib import suppress
from typing import Any

import aiopersist as ap
from aiopersist.testing.simulation import World
from tests.support.schemas import SCHEMA
from tests.worlds.ledger import Ledger

LEASE_S = 40.0  # clocks of machines differ by more
LIMITS: Any = {
    "row_group_bytes": 300,
    "blob_target_size": 600,
    "open_timeout_s": 300.0,
    "ack_every_s": 20.0,
    "reader_lease_s": LEASE_S,
    "writer_lease_s": LEASE_S,
}
INLINE: Any = {
    "inline_writes_single_max_bytes": 500,
    "inline_writes_total_max_bytes": 10_000,  # some appends, and there is no room
}
ACCOUNTS = ("ann", "bob", "eve")
EACH = 100
MINE = (ap.StorageUnavailable, ap.Indeterminate)
SLOWLY_S = (0.0, 0.0, 0.3, 2.0, LEASE_S / 2)
HONEST = (*MINE, ap.LeaseExpired, ap.BatchExpired, ap.MissingPart)


class Scene:
    """See the header."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dice = world.dice
        self.counts = world.counts
        self.ledger = Ledger()
        self.is_over = False
        """Whether the programs that have an end are done."""
        self.is_quiet = False
        """Whether all are done but those that keep shards small."""
        self.gap_s = self.dice.choice([0.0, 0.01, 0.3])
        self.writes = world.size("writes", 1, 8)
        self.settings = ap.Settings(
            **LIMITS,
            watch_timeout_s=self.dice.choice([0.2, 5.0]),
            inline_writes_single_max_bytes=self.dice.choice([0, 0, 16384]),
            retry_timeout_s=self.dice.choice([0.5, None]),
        )
        self.inline = self.settings.model_copy(update=INLINE)
        """The settings of programs whose small appends are inline."""
        self.calm = self.settings.model_copy(update={"watch_timeout_s": 60.0})
        """The settings of clients to which nothing happens."""

    def rolled(self, chance: float) -> bool:
        return self.dice.random() < chance

    async def pause(self) -> None:
        await self.world.sleep(self.dice.choice([0, 0.01, self.gap_s]))

    def promise(self, held: bool, what: object) -> None:
        """Fail unless what the library promised has held."""
        assert held, what

    async def slowly(self) -> None:
        """Take a moment, now and then long enough for a heartbeat."""
        await self.world.sleep(self.dice.choice(SLOWLY_S))

    def number(self, name: str) -> int:
        """A new number of an update, which nobody has sent."""
        number = len(self.ledger.sent)
        self.ledger.sent.add(number)
        self.ledger.done[name] += 1
        return number

    def row(self, number: int) -> tuple[str, int]:
        """The key and val of that update."""
        return f"k{number % 7}", number

    async def next_of(self, items: Any, within_s: float = 2.0) -> Any:
        """The next item; `None` once the world is over. The wait is cancelled now and then, and repeated."""
        while not self.is_over:
            coming = asyncio.ensure_future(anext(items))
            await asyncio.wait([coming], timeout=within_s)
            coming.cancel()
            with suppress(asyncio.CancelledError):
                return await coming
        return None

    async def check_contents(self, snapshot: Any) -> None:
        """Note what a snapshot of `events` has: the end compares it."""
        self.ledger.snapshots.append((snapshot.as_of, await snapshot.rows()))
        self.counts["snapshots"] += 1

    def reader(self, client: ap.Client, **options: Any) -> Any:
        """Of `events`."""
        return client.reader("events", SCHEMA, **options)
