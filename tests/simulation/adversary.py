"""Random actors on one shard, and their observations, compared with the list of all updates.

Every actor is a task in a process of its own, or in one that it shares: a process is a client, with
settings that are tiny more often than not. Writers append by every way there is, and may be cut off in the
middle of any call; readers take snapshots at any time, follow, go away and come back by cursor, some with
holds that must keep their promise; movers give up history; and the background of every client, forced
calls, and a compactor of the game's own compact and collect, since *any* legal compaction at any moment
must stay invisible. The stores refuse, lose answers, drop requests and land some of them late; their clock
jumps, so that leases run out; processes are killed, and others take over (`world.py`).

Nothing is checked on the way: what was seen is written down, and compared at the end, when the
outcome of every append is known, or which ones are possible (`verdict.py`). `play(seed)` is one game.
"""

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import reduce
from typing import Any

from verdict import Piece, Seen, Told, lists  # type: ignore[import-not-found]  # beside this file
from world import HONEST, Complaints, World, kill  # type: ignore[import-not-found]

import aiopersist as ap
from aiopersist.data.updates.consolidate import diff_sum
from aiopersist.data.updates.times import advance
from aiopersist.parts.fetch import Fetch, Selection
from aiopersist.parts.upload import Upload
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.compaction import Replace, Total
from aiopersist.testing.faults import Faults
from aiopersist.testing.model import Model
from tests.support.shards import RATES

KEYS = ["", "a", "b", "ab", "é", "zz" * 40]
REFUSED = (ap.UpperMismatch, ap.LeaseExpired, ap.BatchExpired)  # an append that surely did not happen
ENDLESS_S = 1e9  # a lease that no jump of the clock ends
Act = Callable[..., Awaitable[None]]


class Game:
    """One shard, its actors, and what they saw."""

    def __init__(self, seed: int, blob: str, consensus: str) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.product = self.rng.random() < 0.3
        self.definite = not self.product and self.rng.random() < 0.4  # all writers are replicas of one
        self.schema = ap.Schema(key=str, val=int, time=2 if self.product else 1)
        self.name = f"game {uuid.uuid4()}"
        self.faults = Faults(seed, RATES if self.rng.random() < 0.7 else {})
        self.faults.losing_hints = self.rng.random() < 0.2
        self.world = World(self.faults, blob, consensus)
        self.deadly = self.rng.random() < 0.4
        self.seen = Seen()
        self.counts: Counter[str] = Counter()
        self.writing = True

    @property
    def least(self) -> ap.Antichain:
        return ap.Antichain((0, 0) if self.product else 0)

    # --- what the writers write ----------------------------------------------------------------------

    def rows(self, rng: random.Random, times: list[Any]) -> list[Any]:
        """Updates at some of `times`; in a game of replicas the same for all writers."""
        if self.definite:
            return [row for time in times for row in self.definite_rows(time)]
        many = rng.choice([0, 1, 2, 5, 40])
        return [
            (rng.choice(KEYS), rng.randrange(3), rng.choice(times), rng.choice([-2, -1, 1, 1, 3]))
            for _ in range(many if times else 0)
        ]

    def definite_rows(self, time: Any) -> list[Any]:
        rng = random.Random(f"{self.seed} {time}")
        return [
            (rng.choice(KEYS), rng.randrange(3), time, rng.choice([-1, 1, 2]))
            for _ in range(rng.randrange(4))
        ]

    def after(self, rng: random.Random, upper: ap.Antichain) -> ap.Antichain:
        """A frontier at or beyond `upper`, not far."""
        if not self.product:
            (time,) = upper.elements
            return ap.Antichain(time + rng.choice([0, 1, 1, 2, 5]))  # type: ignore[operator]
        moved = [
            tuple(c + rng.choice([0, 1, 2]) for c in rng.choice(upper.elements))  # type: ignore[union-attr]
            for _ in range(rng.choice([1, 2]))
        ]
        return upper.join(ap.Antichain(*moved))

    def within(self, lower: ap.Antichain, upper: ap.Antichain) -> list[Any]:
        """The times in `[lower, upper)`, a few of them where they are without end."""
        if not self.product:
            return list(range(lower.elements[0], upper.elements[0]))  # type: ignore[arg-type]
        top = 2 + max(c for e in (*lower.elements, *upper.elements) for c in e)  # type: ignore[union-attr]
        grid = [(a, b) for a in range(top) for b in range(top)]
        return [t for t in grid if lower.less_equal(t) and not upper.less_equal(t)]

    # --- processes -----------------------------------------------------------------------------------

    def settings(self, rng: random.Random) -> ap.Settings:
        return ap.Settings(
            rollup_every=rng.choice([3, 3, 20]),
            watch_timeout_s=0.02,
            blob_target_size=rng.choice([10, 200, 2**20]),
            row_group_bytes=rng.choice([16, 100, 2**20]),
            inline_writes_single_max_bytes=rng.choice([0, 60, 300, 16384]),
            inline_writes_total_max_bytes=rng.choice([400, 2000, 2**20]),
            blob_cache_bytes=rng.choice([0, 2**20]),
            compaction_inputs_min=rng.choice([2, 2, 8]),
            compaction_idle_s=rng.choice([0.02, 0.1, 10]),
            compaction_memory_bytes=rng.choice([1, 4000, 2**28]),
            compactions_max=rng.choice([1, 2]),
        )

    @asynccontextmanager
    async def client(self, rng: random.Random) -> AsyncIterator[ap.Client]:
        opening = self.world.open(self.world.line(), self.settings(rng), maintenance=rng.random() < 0.8)
        async with opening as client:
            yield client

    async def process(self, rng: random.Random, act: Act, *args: Any) -> None:
        """`act` by a client of its own; in a deadly game it may be killed, twice at most, and begun anew."""
        for _ in range(rng.choice([0, 1, 2]) if self.deadly else 0):
            if await self.life(rng, act, *args):
                return
        async with self.client(rng) as client:
            await act(rng, client, *args)

    async def life(self, rng: random.Random, act: Act, *args: Any) -> bool:
        """Whether it came to its end before it was killed; then its leases run out a moment later, since some
        wait for that."""
        line, born = self.world.line(), []

        async def live() -> None:
            client = await self.world.open(line, self.settings(rng), maintenance=rng.random() < 0.8)
            born.append(client)
            await act(rng, client, *args)
            await client.aclose()

        running = asyncio.create_task(live())
        try:
            await asyncio.wait([running], timeout=rng.choice([0.01, 0.03, 0.1, 0.3]))
            if running.done():
                await running
                return True
        finally:
            await kill(line, born[0] if born else None, running)
        self.counts["killed"] += 1
        asyncio.get_running_loop().call_later(rng.choice([0.05, 0.5]), self.world.clock.jump, 4000)
        return False

    # --- writers -------------------------------------------------------------------------------------

    async def writer(self, rng: random.Random, client: ap.Client, moves: int) -> None:
        handle: ap.WriteHandle[str, int] = await client.writer(self.name, self.schema)
        for _ in range(moves):
            await pause(rng)
            if rng.random() < 0.1:
                await handle.aclose()
                handle = await client.writer(self.name, self.schema)
            if self.definite or self.product or rng.random() < 0.6:
                await self.append(rng, handle)
            else:
                await self.write(rng, handle)
        await handle.aclose()

    async def append(self, rng: random.Random, handle: ap.WriteHandle[str, int]) -> None:
        lower = handle.upper if rng.random() < 0.7 else await handle.fetch_recent_upper()
        upper = self.after(rng, lower)
        rows = self.rows(rng, self.within(lower, upper))
        rng.shuffle(rows)
        piece = Piece(rows, lower, upper)
        if self.definite and not self.product and rng.random() < 0.5:
            (time,) = lower.elements
            begin = max(0, time - rng.choice([0, 1, 4]))  # type: ignore[operator]
            rows = self.rows(rng, list(range(begin, upper.elements[0])))  # type: ignore[arg-type]
            call = handle.append(rows, begin, upper)
        else:
            call = handle.compare_and_append(rows, lower, upper)
        await self.cut_off(rng, handle, call, piece)

    async def write(self, rng: random.Random, handle: ap.WriteHandle[str, int]) -> None:
        piece = Piece(self.rows(rng, [0]))
        if piece.rows:
            await self.cut_off(rng, handle, handle.write([(k, v, d) for k, v, _, d in piece.rows]), piece)

    async def cut_off(
        self, rng: random.Random, handle: ap.WriteHandle[str, int], call: Awaitable[Any], piece: Piece
    ) -> None:
        """Note what became of the call, perhaps by `settle` after it was cut off. If this process is killed
        meanwhile, the outcome is unknown."""
        self.seen.pieces.append(piece)
        try:
            if rng.random() < 0.6:
                result = await call
            else:
                async with asyncio.timeout(rng.choice([0, 0.0002, 0.001, 0.004, 0.02])):
                    result = await call
        except REFUSED as error:
            self.counts[type(error).__name__] += 1
            piece.happened = False
        except (TimeoutError, ap.Indeterminate):
            self.counts["cut off"] += 1
            await self.settled(handle, piece)
        else:
            piece.happened = True
            if piece.lower is None:
                piece.at(result)

    async def settled(self, handle: ap.WriteHandle[str, int], piece: Piece) -> None:
        try:
            outcome = await handle.settle()
        except ap.Indeterminate:  # its registration and its version are gone
            self.counts["unknowable"] += 1
            return
        piece.happened = isinstance(outcome, ap.Committed)
        self.counts["and committed"] += piece.happened
        if isinstance(outcome, ap.Committed) and piece.lower is None:
            piece.at(outcome.upper.elements[0] - 1)  # type: ignore[operator]

    # --- readers -------------------------------------------------------------------------------------

    async def reader(self, rng: random.Random, client: ap.Client, moves: int) -> None:
        handle, held = await self.open_reader(rng, client)
        for _ in range(moves):
            await pause(rng)
            if rng.random() < 0.1:
                await handle.aclose()
                handle, held = await self.open_reader(rng, client)
            try:
                if held and rng.random() < 0.3:
                    await self.give_up(rng, handle)
                if rng.random() < 0.2:
                    await self.share(rng, client, handle)
                else:
                    await self.look(rng, handle)
            except ap.SinceViolation as error:
                kept = held and handle.since.less_equal(error.as_of)
                self.seen.promise(not kept and not error.since.less_equal(error.as_of), error)
                self.counts["history given up"] += 1
            except ap.NotReadable as error:
                self.seen.promise(error.as_of is None or error.upper.less_equal(error.as_of), error)
            except ap.LeaseExpired:  # of the reader that a process shares, under an open snapshot
                self.counts["lease expired"] += 1
        await handle.aclose()

    async def open_reader(
        self, rng: random.Random, client: ap.Client
    ) -> tuple[ap.ReadHandle[str, int], bool]:
        """A reader, and whether it has a hold, which never expires: not where it may be killed, since the
        hold would stay for ever."""
        handle: ap.ReadHandle[str, int] = await client.reader(self.name, self.schema, create=True)
        if self.deadly or rng.random() < 0.4:
            return handle, False
        try:
            held = await client.reader(self.name, self.schema, hold=handle.since, lease_s=ENDLESS_S)
        except ap.SinceViolation:  # it has moved on
            return handle, False
        await handle.aclose()
        return held, True

    async def give_up(self, rng: random.Random, handle: ap.ReadHandle[str, int]) -> None:
        """Some of the history that the handle holds."""
        kept = handle.upper.elements
        targets = [t for t in self.within(handle.since, handle.upper) if t not in kept]
        if targets:
            await handle.downgrade_since(ap.Antichain(*rng.choices(targets, k=rng.choice([1, 2]))))

    def some_time(self, rng: random.Random, handle: ap.ReadHandle[str, int]) -> Any:
        """To read at, perhaps beyond what is complete; for int times also `None`."""
        if rng.random() < 0.3 and not self.product:
            return None
        times = self.within(handle.since, self.after(rng, self.after(rng, handle.upper)))
        return rng.choice(times or [(0, 0) if self.product else 0])

    async def share(self, rng: random.Random, client: ap.Client, handle: ap.ReadHandle[str, int]) -> None:
        """A snapshot in pieces, some of which another process reads."""
        opening = client.shared_read(self.name, self.some_time(rng, handle), wait=False)
        async with opening as read, self.client(rng) as other:
            rows = []
            for piece in await read.pieces(rng.choice([1, 3])):
                await (nap(rng) if rng.random() < 0.1 else pause(rng))
                async for batch in rng.choice([client, other]).read_piece(piece):
                    rows += [(r["key"], r["val"], r["diff"]) for r in batch.to_pylist()]
            self.seen.snapshots.append((read.as_of, rows))
            self.counts["shared reads"] += 1

    async def look(self, rng: random.Random, handle: ap.ReadHandle[str, int]) -> None:
        async with handle.snapshot(self.some_time(rng, handle), wait=False) as snapshot:
            await (nap(rng) if rng.random() < 0.1 else pause(rng))
            way = rng.randrange(4)
            if way == 0:
                seen = await snapshot.rows()
            elif way == 1:
                seen = [row async for row in patient(rng, aiter(snapshot))]
            elif way == 2:
                tables = [batch.to_pylist() async for batch in patient(rng, snapshot.batches())]
                seen = [(r["key"], r["val"], r["diff"]) for rows in tables for r in rows]
            else:
                seen = (await snapshot.to_polars()).rows()
            self.seen.snapshots.append((snapshot.as_of, seen))

    # --- followers -----------------------------------------------------------------------------------

    async def follower(self, rng: random.Random, client: ap.Client, told: Told) -> None:
        """Follows to the end, with pauses; goes away and comes back by cursor, perhaps after its process was
        killed. Whoever holds on to what it was not told yet must never find history given up."""
        named = {"hold_name": told.name, "lease_s": ENDLESS_S} if told.faithful == "named" else {}
        async with client.reader(self.name, self.schema, create=True, **named) as handle:
            hold: Any = handle
            if told.faithful == "critical":
                hold = await client.critical_since(self.name, told.name)
            while True:
                try:
                    async with await self.listen(rng, handle, hold, told) as listen:
                        if await self.follow(rng, handle, hold, listen, told):
                            return
                except ap.LeaseExpired:
                    self.counts["lease expired"] += 1
                except ap.SinceViolation as error:
                    self.counts["history given up"] += 1
                    self.seen.promise(not told.faithful, error)
                    return

    async def listen(self, rng: random.Random, handle: Any, hold: Any, told: Told) -> ap.Listen:
        if not told.cursor:
            return await self.begin(rng, handle, hold, told)
        self.counts["resumed"] += 1
        assert told.cursor.isascii() and told.cursor.replace("-", "").replace("_", "").isalnum()
        return await (handle.listen if rng.random() < 0.5 else handle.subscribe)(cursor=told.cursor)

    async def begin(self, rng: random.Random, handle: Any, hold: Any, told: Told) -> ap.Listen:
        upper = await handle.fetch_recent_upper()
        time = rng.choice(
            self.within(hold.since, self.after(rng, upper)) or [upper.join(hold.since).elements[0]]
        )
        way = rng.choice(["listen", "subscribe", "listen at", "subscribe at"])
        if told.faithful or self.product:
            way = rng.choice(["listen at", "subscribe at"])
        if way == "listen":
            listen = await handle.listen()
        elif way == "subscribe":
            listen = await handle.subscribe()
        else:
            listen = await (handle.listen if "listen" in way else handle.subscribe)(as_of=time)
        told.snapshot = "subscribe" in way and listen.as_of is not None
        told.as_of, told.begin = listen.as_of, listen.frontier
        told.frontier, told.cursor = listen.frontier, listen.cursor
        self.seen.follows.append(told)
        return listen

    async def follow(self, rng: random.Random, handle: Any, hold: Any, listen: Any, told: Told) -> bool:
        """For a while; whether all has been told."""
        steps = rng.random() < 0.5
        while rng.random() < 0.9:
            if await self.done(handle, listen):
                return True
            updates = await (self.step(rng, listen) if steps else self.items(rng, listen))
            told.seen += updates
            told.frontier, told.cursor = listen.frontier, listen.cursor
            if rng.random() < 0.3 and told.faithful:
                await self.let_go(hold, told)
            await (nap(rng) if rng.random() < 0.1 else pause(rng))
        return False

    async def let_go(self, hold: Any, told: Told) -> None:
        """Of what lies before the cursor. A snapshot that was not told yet begins at its frontier."""
        assert told.frontier is not None
        done = told.frontier != told.begin or not told.snapshot
        since = ap.Antichain(*(max(e - 1, 0) if done else e for e in told.frontier.elements))
        try:
            if told.faithful == "named":
                await hold.downgrade_since(since)
            else:
                await hold.compare_and_downgrade_since(hold.opaque, hold.opaque, since)
        except ap.Indeterminate:
            self.counts["unknowable"] += 1

    async def sleeper(self, rng: random.Random, client: ap.Client, moves: int) -> None:
        """Falls asleep over what it has open, until its lease has run out and what it held is compacted and
        collected: when it wakes up it is told so, or reads on rightly."""
        for _ in range(moves // 5):
            told = Told()
            try:
                async with (
                    client.reader(self.name, self.schema, create=True) as handle,
                    await self.begin(rng, handle, handle, told) as listen,
                    handle.snapshot(self.any_time(rng, handle), wait=False) as snapshot,
                ):
                    await self.forget_all(rng)
                    await self.follow(rng, handle, handle, listen, told)
                    self.seen.snapshots.append((snapshot.as_of, await snapshot.rows()))
            except ap.LeaseExpired:
                self.counts["lease expired"] += 1
            except (ap.SinceViolation, ap.NotReadable):
                self.counts["history given up"] += 1

    async def forget_all(self, rng: random.Random) -> None:
        """Let the leases of readers run out, and keep nothing but the newest time."""
        self.world.clock.jump(rng.choice([500, 1000]))
        async with self.client(rng) as other:
            try:
                await other.retain(self.name, timedelta(0) if self.product else 1)
                await other.force_compaction(self.name)
                await other.force_gc(self.name)
                await other.retain(self.name, None)
            except HONEST as error:
                self.counts[f"forget: {type(error).__name__}"] += 1

    def any_time(self, rng: random.Random, handle: Any) -> Any:
        least = (0, 0) if self.product else 0
        return rng.choice(self.within(handle.since, self.after(rng, handle.upper)) or [least])

    async def step(self, rng: random.Random, listen: ap.Listen) -> list[Any]:
        try:
            async with asyncio.timeout(rng.choice([0, 0.001, 0.01, 0.1])):
                step = await anext(listen.steps())
        except TimeoutError:
            return []
        assert step.upper == listen.frontier
        return step.updates.rows()

    async def items(self, rng: random.Random, listen: ap.Listen) -> list[Any]:
        """Items up to the next progress. Before anything came the wait may be given up."""
        pending: list[Any] = []
        while True:
            try:
                item = await asyncio.wait_for(anext(listen), rng.choice([0, 0.001, 0.01, 0.1]))
            except TimeoutError:
                if not pending and rng.random() < 0.5:
                    return []
                continue
            if isinstance(item, ap.Progress):
                assert item.upper == listen.frontier
                return pending
            pending += item.rows()

    async def done(self, handle: Any, listen: ap.Listen) -> bool:
        if self.writing:
            return False
        upper = await handle.fetch_recent_upper()
        due = listen.frontier == ap.Antichain(listen.as_of) if listen.as_of is not None else False
        return bool(upper <= listen.frontier) or (due and upper.less_equal(listen.as_of))

    # --- actors that forget ----------------------------------------------------------------------------

    async def mover(self, rng: random.Random, client: ap.Client, moves: int) -> None:
        """Gives up history by a hold of its own, and forgets it by compactions of its own."""
        reader: ap.ReadHandle[str, int] = await client.reader(self.name, self.schema, create=True)
        writer: ap.WriteHandle[str, int] = await client.writer(self.name, self.schema)
        for _ in range(moves):
            await pause(rng)
            try:
                await (self.give_up(rng, reader) if rng.random() < 0.3 else self.compact(rng, writer))
            except (ap.LeaseExpired, ap.BatchExpired):
                self.counts["lease expired"] += 1
                await reader.aclose()
                reader = await client.reader(self.name, self.schema)
        await writer.aclose()
        await reader.aclose()

    async def owner(self, rng: random.Random, client: ap.Client, moves: int) -> None:
        """Takes a critical since over from another owner, moves it, and is fenced in its turn."""
        async with client.critical_since(self.name, "owned", opaque=1) as critical:
            opaque = critical.opaque
            for _ in range(moves):
                await pause(rng)
                if rng.random() < 0.3:
                    opaque = critical.opaque
                times = self.within(critical.since, (await self.upper(client)))
                since = ap.Antichain(rng.choice(times)) if times else critical.since
                try:
                    mine = rng.randrange(1, 2**30)
                    moved = await critical.compare_and_downgrade_since(opaque, mine, since)
                    opaque = mine
                    self.seen.promise(since <= moved, f"asked for {since} and got {moved}")
                except ap.OpaqueMismatch as error:
                    self.counts["fenced"] += 1
                    self.seen.promise(error.actual != opaque, error)
                except ap.Indeterminate:
                    self.counts["unknowable"] += 1

    async def upper(self, client: ap.Client) -> ap.Antichain:
        return (await client.inspect(self.name)).upper

    async def keeper(self, rng: random.Random, client: ap.Client, moves: int) -> None:
        """Asks for every kind of maintenance; that it is asked for at a bad moment is told honestly."""
        for _ in range(moves):
            await pause(rng)
            what = rng.choice(
                ["compact", "compact", "share", "gc", "gc", "sweep", "maintain", "retain", "fsck"]
            )
            try:
                await self.maintenance(rng, client, what)
                self.counts[what] += 1
            except HONEST as error:
                self.counts[f"{what}: {type(error).__name__}"] += 1

    async def maintenance(self, rng: random.Random, client: ap.Client, what: str) -> None:
        if what == "compact":
            await client.force_compaction(self.name)
        elif what == "share":
            await self.share_compaction(rng, client)
        elif what == "gc":
            collected = await client.force_gc(self.name)
            self.counts["parts collected"] += collected.parts
        elif what == "sweep":
            found = await client.sweep_leaked_blobs(dry_run=False)
            self.counts["blobs swept"] += len(found.keys)
        elif what == "maintain":
            done = await client.maintain()
            honest = all(
                text.startswith(tuple(e.__name__ for e in HONEST)) for text in done.failures.values()
            )
            self.seen.promise(honest, done.failures)
        elif what == "retain":
            times = [timedelta(seconds=rng.choice([0, 600]))] if self.product else [1, 3, 8]
            await client.retain(self.name, rng.choice([None, timedelta(seconds=300), *times]))
        else:
            report = await client.fsck(self.name)
            self.seen.promise(report.ok, report.problems)

    async def share_compaction(self, rng: random.Random, client: ap.Client) -> None:
        """Some rounds, whose pieces another process does in part."""
        goal = None
        async with self.client(rng) as other:
            for _ in range(rng.choice([1, 5])):
                async with client.shared_compaction(self.name, goal) as compaction:
                    goal, results = compaction.goal, []
                    for piece in await compaction.pieces(rng.choice([1, 3])):
                        await pause(rng)
                        results.append(await rng.choice([client, other]).compact_piece(piece))
                    if compaction.is_needed:
                        self.counts["compacted together"] += await compaction.apply(results)

    async def clock(self, rng: random.Random, client: ap.Client, moves: int) -> None:
        """Jumps: a reader has a lease of 900 s, a writer one of 3600 s."""
        for _ in range(moves):
            await asyncio.sleep(rng.choice([0.001, 0.01, 0.05]))
            self.world.clock.jump(rng.choice([-30, 100, 500, 1000, 4000]))

    async def compact(self, rng: random.Random, writer: Any) -> None:
        """Replace some neighbouring batches by one, with times advanced to since."""
        shard = writer._shard
        state = shard.state
        ordinals = list(state.batches)
        if not ordinals or writer.writer_id not in state.writers:
            return
        first = rng.randrange(len(ordinals))
        chosen = ordinals[first : first + rng.choice([1, 2, 5])]
        batches = [state.batches[o] for o in chosen]
        since = reduce(ap.Antichain.join, (b.since for b in batches), state.since)
        upload = Upload(shard, self.schema, 0, writer.writer_id, batches[0].lower, one_blob=True, since=since)
        named = [(batch, part) for batch in batches for part in batch.parts]
        table = await Fetch(shard, self.schema).table(named, Selection(), "")
        await upload.add(advance(table, since))
        batch = await upload.finish(batches[-1].upper)
        inputs = dict(zip(chosen, batches, strict=True))
        read = Total(table.num_rows, diff_sum(table))
        flush = Replace(writer.writer_id, inputs, batch, read, upload.wrote)
        slot = Slot()
        try:
            self.counts["compacted"] += bool(await commit(shard.register, flush, slot))
        except ap.BatchExpired:
            pass

    # --- the game and its end ------------------------------------------------------------------------

    async def play(self) -> None:
        rng = self.rng
        async with self.client(rng) as shared:
            await (await shared.writer(self.name, self.schema)).aclose()
            shard_id = await shared.shard_id(self.name)

            async def actor(act: Act, *args: Any) -> None:
                mine = random.Random(rng.random())
                if mine.random() < 0.4:
                    await act(mine, shared, *args)
                else:
                    await self.process(mine, act, *args)

            told = [Told(rng.choice(self.faiths), f"f{n}") for n in range(rng.choice([1, 2, 4]))]
            followers = [asyncio.create_task(actor(self.follower, one)) for one in told]
            landing = asyncio.create_task(self.land())
            try:
                async with asyncio.TaskGroup() as group:
                    for act, moves in self.cast(rng):
                        group.create_task(actor(act, moves))
                await asyncio.sleep(0)
            except BaseException:
                for follower in followers:
                    follower.cancel()
                await asyncio.wait(followers)
                raise
            finally:
                self.writing = False
                landing.cancel()
                self.faults.heal()
                await self.faults.land()
            await asyncio.gather(*followers)
        await self.faults.land()
        await self.verify(shard_id)

    @property
    def faiths(self) -> list[str]:
        return [""] if self.product else ["", "", "named", "critical"]

    def cast(self, rng: random.Random) -> list[tuple[Act, int]]:
        """Who plays, beside the followers, and for how many moves."""
        writers: list[tuple[Act, int]] = [
            (self.writer, rng.choice([5, 15])) for _ in range(rng.choice([1, 2, 3]))
        ]
        readers = [(self.reader, rng.choice([3, 10])) for _ in range(2)]
        others = [
            (self.mover, 0.6),
            (self.owner, 0.4),
            (self.owner, 0.3),
            (self.keeper, 0.5),
            (self.keeper, 0.3),
            (self.clock, 0.4),
            (self.sleeper, 0.3),
        ]
        return writers + readers + [(act, rng.choice([5, 15])) for act, rate in others if rng.random() < rate]

    async def land(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            await self.faults.land()

    async def verify(self, shard_id: str) -> None:
        """After a quiet moment: all observations are explained, the shard is sound, and once no registration
        is left no blob is without a name."""
        line, settings = self.world.line(), self.settings(random.Random(0))
        async with self.world.open(line, settings, maintenance=False) as client:
            upper = await self.look_at_the_end(client)
            self.seen.check(self.models(upper))
            self.world.clock.jump(10_000)
            await client.force_gc(self.name)
            report = await client.fsck(self.name)
            assert report.ok, report.problems
            await client.sweep_leaked_blobs(dry_run=False)
            there, named = await self.world.blobs(shard_id), await self.world.named(shard_id)
            assert there == named, f"leaked {there - named}, lost {named - there}"
            await client.force_compaction(self.name)
            await client.force_gc(self.name)
            assert await self.look_at_the_end(client) == upper
            self.seen.check(self.models(upper))

    async def look_at_the_end(self, client: ap.Client) -> ap.Antichain:
        """The upper; the contents at the ends of what can be read are written down."""
        async with client.reader(self.name, self.schema) as reader:
            upper, since = await reader.fetch_recent_upper(), reader.since
            readable = [t for t in self.within(self.least, upper) if since.less_equal(t)]
            for time in readable[:5] + readable[-5:]:
                async with reader.snapshot(time) as snapshot:
                    self.seen.snapshots.append((time, await snapshot.rows()))
        return upper

    def models(self, upper: ap.Antichain) -> Any:
        """All that was committed, in order: every list that is possible."""
        if not self.definite:
            return lists(self.seen.pieces, self.least, upper)
        model = Model(self.least.elements)
        rows = [row for time in self.within(self.least, upper) for row in self.definite_rows(time)]
        model.append(rows, self.least.elements, upper.elements)
        return iter([model])


async def pause(rng: random.Random) -> None:
    for _ in range(rng.choice([0, 0, 1, 3])):
        await asyncio.sleep(0)
    if rng.random() < 0.05:
        await asyncio.sleep(0.002)


async def nap(rng: random.Random) -> None:
    """Long enough for others to compact, to collect, and to let a lease run out."""
    await asyncio.sleep(rng.choice([0.02, 0.1]))


async def patient(rng: random.Random, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """All items, by waits some of which are given up and repeated."""
    while True:
        try:
            item = await asyncio.wait_for(anext(items), rng.choice([0, 0.0005, 1]))
        except TimeoutError:
            continue
        except StopAsyncIteration:
            return
        yield item


async def play(seed: int, blob: str = "", consensus: str = "") -> Counter[str]:
    """One game; what happened in it, by kind."""
    url = f"mem://{uuid.uuid4().hex}"
    game = Game(seed, blob or url, consensus or url)
    try:
        with Complaints() as complaints:
            async with asyncio.timeout(60):
                await game.play()
        assert not complaints.heard, complaints.heard
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        await game.world.aclose()
    game.counts["snapshots"] += len(game.seen.snapshots)
    game.counts["followed"] += sum(len(told.seen) for told in game.seen.follows)
    return game.counts
