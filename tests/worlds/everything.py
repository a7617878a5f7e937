"""A world in which everything takes part, and what must be true of it at its end.

Machines that crash run programs: `writer` appends numbered updates, `counter` counts once per request,
`mover` moves money between accounts in transactions, `biller` follows a subscription and acknowledges in
the transaction that writes, `streamer` writes to streams of an `Indexed`, `reader` takes snapshots,
`keeper` compacts, collects and sweeps. A `Ledger`, which no crash touches, has what each was told;
`verdict` compares it with what is there."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiopersist as ap
from aiopersist.testing.simulation import STORMY, Played, Weather, World, simulate
from tests.support.schemas import SCHEMA

LIMITS: Any = {
    "row_group_bytes": 300,
    "blob_target_size": 600,
    "open_timeout_s": 300.0,
    "ack_every_s": 20.0,
    "reader_lease_s": 60.0,
    "writer_lease_s": 60.0,
}
ACCOUNTS = ("ann", "bob", "eve")
EACH = 100
MINE = (ap.StorageUnavailable, ap.Indeterminate)
HONEST = (*MINE, ap.LeaseExpired, ap.BatchExpired, ap.MissingPart)
GAP_S = 0.3


@dataclass
class Ledger:
    """What the programs were told."""

    sent: set[int] = field(default_factory=set)
    told: dict[int, int] = field(default_factory=dict)
    """The times of the updates whose commit was acknowledged."""
    counted: Counter[str] = field(default_factory=Counter)
    """Requests to count that were acknowledged, by machine."""
    moved: Counter[str] = field(default_factory=Counter)
    snapshots: list[tuple[int, list[Any]]] = field(default_factory=list)
    log: list[tuple[str, int, int, int]] = field(default_factory=list)
    """All updates, as one listener was told them."""
    frontier: int = 0
    over: bool = False


class Everything:
    """See the header."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dice = world.dice
        self.ledger = Ledger()
        self.writes = world.size("writes", 1, 12)
        self.settings = ap.Settings(
            **LIMITS,
            watch_timeout_s=self.dice.choice([0.2, 5.0]),
            inline_writes_single_max_bytes=self.dice.choice([0, 16384]),
            retry_timeout_s=self.dice.choice([0.5, None]),
        )

    async def play(self) -> None:
        async with self.world.open(settings=self.settings) as honest:
            await honest.table("money", str, int).put_many(dict.fromkeys(ACCOUNTS, EACH))
            await honest.table("counts", str, int).put("all", 0)
            await honest.table("bills", str, int).put("all", 0)
            await (await honest.writer("events", SCHEMA)).aclose()
            observer = await honest.subscription("events", SCHEMA, name="observer")
            watching = asyncio.create_task(self.observe(observer))
            if self.dice.random() < 0.5:
                await honest.retain("events", 0)
            await self.run_programs()
            await self.world.heal()
            await self.finish(honest, watching)

    async def run_programs(self) -> None:
        """All at once, each on a machine of its own; the ones that have no end stop when the others are
        done."""
        programs = [self.writer] * self.world.size("writers", 1, 2) + [self.counter] * 2 + [self.mover] * 2
        programs += [self.streamer] * self.world.size("streamers", 0, 1)
        endless = [self.biller] * self.world.size("billers", 0, 2)
        endless += [self.reader, self.keeper, self.keeper][: self.world.size("others", 0, 3)]
        tasks = [self.task(at, program) for at, program in enumerate([*programs, *endless])]
        for task in tasks[: len(programs)]:
            await task
        self.ledger.over = True
        for task in tasks[len(programs) :]:
            await task

    def task(self, number: int, program: Any) -> Any:
        machine = self.world.machine(f"{program.__name__}{number}")
        app = partial(program, machine.name)
        supervised = machine.supervise(app, settings=self.settings, within_s=self.dice.choice([0.05, 0.5]))
        return asyncio.create_task(supervised)

    async def pause(self) -> None:
        await self.world.sleep(self.dice.choice([0, 0.01, GAP_S]))

    # --- programs --------------------------------------------------------------------------------

    async def writer(self, name: str, client: ap.Client) -> None:
        """A number is sent once only, whatever becomes of it."""
        async with client.writer("events", SCHEMA) as handle:
            while len([n for n in self.ledger.sent if n % 100 == int(name[6:])]) < self.writes:
                number = len(self.ledger.sent) * 100 + int(name[6:])
                self.ledger.sent.add(number)
                try:
                    self.ledger.told[number] = await self.append(handle, number)
                except ap.LeaseExpired:
                    return
                await self.pause()

    async def append(self, handle: Any, number: int) -> int:
        row = (f"k{number % 7}", number)
        if self.dice.random() < 0.5:
            return int(await handle.write([(*row, 1)]))
        while True:
            time = (await handle.fetch_recent_upper()).time
            try:
                await handle.compare_and_append([(*row, time, 1)], time, time + 1)
            except ap.UpperMismatch:
                self.world.counts["mismatches"] += 1
            else:
                return int(time)

    async def counter(self, name: str, client: ap.Client) -> None:
        """Each request counts once, however often it is repeated."""
        counts = client.table("counts", str, int)
        while (number := self.ledger.counted[name]) < self.writes:
            await counts.update("all", lambda count: (count or 0) + 1, once=f"{name}-{number}")
            self.ledger.counted[name] = number + 1
            await self.pause()

    async def mover(self, name: str, client: ap.Client) -> None:
        """What there is in all accounts stays the same, at any time."""
        money = client.table("money", str, int)
        moves = client.table("moves", str, int)

        async def move(tx: ap.Transaction) -> None:
            have, has = await tx.get(money, one) or 0, await tx.get(money, other) or 0
            tx.put(money, one, have - 1)
            tx.put(money, other, has + 1)
            tx.put(moves, f"{name}-{number}", 1)

        while (number := self.ledger.moved[name]) < self.writes:
            one, other = self.dice.sample(ACCOUNTS, 2)
            await client.transact(move, once=f"{name}-{number}")
            self.ledger.moved[name] = number + 1
            found = await money.get_many(ACCOUNTS)
            assert sum(found.values()) == EACH * len(ACCOUNTS), found
            await self.pause()

    async def biller(self, name: str, client: ap.Client) -> None:
        """Both write a bill for each event, and fight for the subscription."""
        bills = client.table("bills", str, int)

        async def bill(tx: ap.Transaction) -> None:
            for update in step.updates:
                tx.put(bills, str(update.val), (await tx.get(bills, str(update.val)) or 0) + update.diff)

        try:
            async with client.subscription("events", SCHEMA, name="billing") as sub:
                while (step := await self.next_step(sub)) is not None:
                    await client.transact(bill, acks=[(sub, step)])
                    self.world.counts["billed"] += 1
        except ap.OpaqueMismatch:
            self.world.counts["taken over"] += 1
        except ap.InvalidUsage as error:
            if error.kind is not ap.UsageKind.CONSUMED:
                raise
        if not self.ledger.over:
            raise ap.StorageUnavailable("again")

    async def next_step(self, sub: Any) -> Any:
        while not self.ledger.over:
            coming = asyncio.ensure_future(anext(sub))
            await asyncio.wait([coming], timeout=2.0)
            coming.cancel()
            with suppress(asyncio.CancelledError):
                return await coming
        return None

    async def streamer(self, name: str, client: ap.Client) -> None:
        """Streams of an `Indexed` take updates at any time, and are sealed."""
        indexed = await client.indexed("streams")
        async with indexed:
            stream = await indexed.register("one", str, int)
            for number in range(self.writes):
                time = self.ledger.counted["sealed"] + number
                await indexed.write([(stream, [(f"s{number}", number, time, 1)])])
                await self.pause()

    async def reader(self, name: str, client: ap.Client) -> None:
        while not self.ledger.over:
            try:
                async with client.reader("events", SCHEMA) as reader, reader.snapshot() as snapshot:
                    self.ledger.snapshots.append((snapshot.as_of, await snapshot.rows()))
                    self.world.counts["snapshots"] += 1
            except (ap.LeaseExpired, ap.NotReadable):
                self.world.counts["not readable"] += 1
            await self.pause()

    async def keeper(self, name: str, client: ap.Client) -> None:
        while not self.ledger.over:
            shard = self.dice.choice(["events", "money", "counts", "bills"])
            act = self.dice.choice(["force_compaction", "force_gc", "sweep_leaked_blobs", "maintain"])
            try:
                if act == "sweep_leaked_blobs":
                    await client.sweep_leaked_blobs(dry_run=False)
                else:
                    await (client.maintain() if act == "maintain" else getattr(client, act)(shard))
                self.world.counts[act] += 1
            except HONEST:
                self.world.counts["not maintained"] += 1
            if self.dice.random() < 0.05:
                await self.world.sleep(100.0)  # leases of who is cut off run out
            await self.pause()

    async def observe(self, sub: Any) -> None:
        async for step in sub:
            self.ledger.log += [(u.key, u.val, u.time, u.diff) for u in step.updates]
            self.ledger.frontier = step.upper.time
            await sub.ack(step)

    # --- the end ---------------------------------------------------------------------------------

    async def finish(self, honest: ap.Client, watching: Any) -> None:
        await self.check(honest, watching)
        await self.world.sleep(200.0)  # all leases of crashed machines
        for shard in ("events", "money", "counts", "bills", "moves"):
            await honest.force_compaction(shard)
            await honest.force_gc(shard)
            report = await honest.fsck(shard)
            assert report.ok, (shard, report.problems)
        await honest.sweep_leaked_blobs(dry_run=False)
        await self.check(honest, watching)
        watching.cancel()

    async def check(self, honest: ap.Client, watching: Any) -> None:
        """What the programs were told, against what is there."""
        upper = (await honest.upper("events")).time
        while self.ledger.frontier < upper:  # type: ignore[operator]
            await self.world.sleep(0.1)
            assert not watching.done() or watching.result()
        self.check_events()
        if upper:
            async with honest.reader("events", SCHEMA) as reader, reader.snapshot() as snapshot:
                assert await snapshot.rows() == self.contents(upper)
        counts = await honest.table("counts", str, int).get("all")
        assert counts == sum(self.ledger.counted[f"counter{n}"] for n in range(20)), counts
        found = await honest.table("money", str, int).get_many(ACCOUNTS)
        assert sum(found.values()) == EACH * len(ACCOUNTS), found
        moves = await honest.table("moves", str, int).count()
        assert moves == sum(self.ledger.moved.values()), moves
        await self.check_bills(honest)

    def check_events(self) -> None:
        times = Counter({val: diff for _, val, _, diff in self.ledger.log})
        assert len(self.ledger.log) == len(times), "an update is there twice"
        assert set(times.values()) <= {1} and times.keys() <= self.ledger.sent
        there = {val: time for _, val, time, _ in self.ledger.log}
        wrong = {n: (time, there.get(n)) for n, time in self.ledger.told.items() if there.get(n) != time}
        assert not wrong, f"told, and there: {wrong}"
        for as_of, rows in self.ledger.snapshots:
            assert rows == self.contents(as_of + 1), f"contents at {as_of}"

    def contents(self, before: int) -> list[Any]:
        return sorted((key, val, diff) for key, val, time, diff in self.ledger.log if time < before)

    async def check_bills(self, honest: ap.Client) -> None:
        """Each event that the subscription has passed is billed once, and no other."""
        view = (await honest.subscriptions("events")).get("billing")
        bills = {key: val async for key, val in honest.table("bills", str, int).items() if key != "all"}
        assert set(bills.values()) <= {1}, bills
        if view is None or view.contents:
            return
        passed = {str(val) for _, val, time, _ in self.ledger.log if time < view.position}
        assert bills.keys() == passed, (bills.keys() ^ passed, view)


async def everything(world: World) -> None:
    await Everything(world).play()


def play(seed: int, weather: Weather = STORMY) -> Played:
    return simulate(everything, seed, weather)
