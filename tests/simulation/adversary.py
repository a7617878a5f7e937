"""Random actors on one shard, and what they saw, held against the list of all updates.

Every actor is a task with a client of its own, or one that it shares, like threads of several processes.
Writers append by every way there is, and may be cut off in the middle of any call; readers take
snapshots at any time, follow, go away and come back by cursor; a mover gives up history, and a
compactor forgets what was given up: *any* legal compaction at any moment must stay invisible. The
stores refuse, lose answers, drop requests and land some of them late.

Nothing is checked on the way: what was seen is written down, and compared at the end, when the
outcome of every append is known. `play(seed)` is one game.
"""

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import reduce
from typing import Any

import aiopersist as ap
from aiopersist.data.consolidate import diff_sum
from aiopersist.data.times import advance
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.fetch import Fetch, Selection
from aiopersist.shard.upload import Upload
from aiopersist.state.compaction import Replace, Total
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from aiopersist.testing.model import Model, gathered, passed

KEYS = ["", "a", "b", "ab", "é", "zz" * 40]
RATES = {Outcome.REFUSED: 0.03, Outcome.LOST: 0.02, Outcome.DROPPED: 0.02, Outcome.LATE: 0.01}
EXPECTED = (ap.UpperMismatch, ap.SinceViolation, ap.NotReadable)


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
        self.blob = FaultyBlob(ap.open_blob(blob), self.faults)
        self.consensus = FaultyConsensus(ap.open_consensus(consensus), self.faults)
        self.faults.losing_hints = self.rng.random() < 0.2
        self.committed: list[tuple[Any, Any, list[Any]]] = []
        self.snapshots: list[tuple[Any, list[Any]]] = []
        self.follows: list[dict[str, Any]] = []
        self.refusals: list[bool] = []
        self.counts: Counter[str] = Counter()
        self.writing = True

    # --- what the writers write ----------------------------------------------------------------------

    def rows(self, rng: random.Random, times: list[Any]) -> list[Any]:
        """Updates at some of `times`; of a game of replicas the same for everybody."""
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

    # --- clients -------------------------------------------------------------------------------------

    def settings(self, rng: random.Random) -> ap.Settings:
        return ap.Settings(
            rollup_every=3,
            watch_timeout_s=0.02,
            blob_target_size=rng.choice([10, 200, 2**20]),
            row_group_bytes=rng.choice([16, 100, 2**20]),
            inline_writes_single_max_bytes=rng.choice([0, 60, 300, 16384]),
            inline_writes_total_max_bytes=rng.choice([400, 2000, 2**20]),
            blob_cache_bytes=rng.choice([0, 2**20]),
        )

    @asynccontextmanager
    async def client(self, rng: random.Random) -> AsyncIterator[ap.Client]:
        opening = ap.open(blob=self.blob, consensus=self.consensus, settings=self.settings(rng))
        async with opening as client:
            yield client

    # --- writers -------------------------------------------------------------------------------------

    async def writer(self, rng: random.Random, client: ap.Client, moves: int) -> None:
        handle: ap.WriteHandle[str, int] = await client.writer(self.name, self.schema)
        for _ in range(moves):
            await pause(rng)
            if rng.random() < 0.1:
                await handle.aclose()
                handle = await client.writer(self.name, self.schema)
            try:
                if self.definite or self.product or rng.random() < 0.6:
                    await self.append(rng, handle)
                else:
                    await self.write(rng, handle)
            except EXPECTED as error:
                self.counts[type(error).__name__] += 1
        await handle.aclose()

    async def append(self, rng: random.Random, handle: ap.WriteHandle[str, int]) -> None:
        lower = handle.upper if rng.random() < 0.7 else await handle.fetch_recent_upper()
        upper = self.after(rng, lower)
        rows = self.rows(rng, self.within(lower, upper))
        rng.shuffle(rows)
        if self.definite and not self.product and rng.random() < 0.5:
            (time,) = lower.elements
            begin = max(0, time - rng.choice([0, 1, 4]))  # type: ignore[operator]
            rows = self.rows(rng, list(range(begin, upper.elements[0])))  # type: ignore[arg-type]
            call = handle.append(rows, begin, upper)
        else:
            call = handle.compare_and_append(rows, lower, upper)
        outcome = await self.cut_off(rng, handle, call)
        if outcome is not None and not self.definite:
            self.committed.append((lower, upper, rows))

    async def write(self, rng: random.Random, handle: ap.WriteHandle[str, int]) -> None:
        rows = [(k, v, d) for k, v, _, d in self.rows(rng, [0])]
        if not rows:
            return
        outcome = await self.cut_off(rng, handle, handle.write(rows))
        if outcome is not None:
            time = outcome
            at = [(k, v, time, d) for k, v, d in rows]
            self.committed.append((ap.Antichain(time), ap.Antichain(time + 1), at))

    async def cut_off(
        self, rng: random.Random, handle: ap.WriteHandle[str, int], call: Awaitable[Any]
    ) -> Any:
        """Its result (`True` for none), perhaps by `settle` after the call was cut off; `None` if it did
        not happen."""
        try:
            if rng.random() < 0.6:
                result = await call
            else:
                async with asyncio.timeout(rng.choice([0, 0.0002, 0.001, 0.004, 0.02])):
                    result = await call
        except (TimeoutError, ap.Indeterminate):
            self.counts["cut off"] += 1
            settled = await handle.settle()
            if isinstance(settled, ap.Committed):
                self.counts["and committed"] += 1
                return True if self.product else settled.upper.elements[0] - 1  # type: ignore[operator]
            return None
        return True if result is None else result

    # --- readers -------------------------------------------------------------------------------------

    async def reader(self, rng: random.Random, client: ap.Client, moves: int) -> None:
        handle: ap.ReadHandle[str, int] = await client.reader(self.name, self.schema, create=True)
        for _ in range(moves):
            await pause(rng)
            if rng.random() < 0.1:
                await handle.aclose()
                handle = await client.reader(self.name, self.schema)
            try:
                await self.look(rng, handle)
            except ap.SinceViolation as error:
                self.refusals.append(not error.since.less_equal(error.as_of))
            except ap.NotReadable as error:
                self.refusals.append(error.as_of is None or error.upper.less_equal(error.as_of))
        await handle.aclose()

    async def look(self, rng: random.Random, handle: ap.ReadHandle[str, int]) -> None:
        if rng.random() < 0.3 and not self.product:
            opening = handle.snapshot(wait=False)
        else:
            time = rng.choice(
                self.within(handle.since, self.after(rng, self.after(rng, handle.upper))) or [0]
            )
            opening = handle.snapshot((0, 0) if self.product and time == 0 else time, wait=False)
        async with opening as snapshot:
            await pause(rng)
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
            self.snapshots.append((snapshot.as_of, seen))

    async def follower(self, rng: random.Random, client: ap.Client) -> None:
        """Follows to the end, with pauses; goes away and comes back by cursor."""
        handle: ap.ReadHandle[str, int] = await client.reader(self.name, self.schema, create=True)
        seen: list[Any] = []
        listen: ap.Listen | None = None
        try:
            listen, told = await self.begin(rng, handle, seen)
            while True:
                steps = rng.random() < 0.5
                for _ in range(rng.choice([1, 3, 10])):
                    if await self.done(handle, listen):
                        return
                    await (self.step(rng, listen, seen) if steps else self.items(rng, listen, seen))
                    told["frontier"] = listen.frontier
                    await pause(rng)
                if rng.random() < 0.3:
                    cursor = listen.cursor
                    assert cursor.isascii() and cursor.replace("-", "").replace("_", "").isalnum()
                    await listen.aclose()
                    if rng.random() < 0.5:
                        await pause(rng)
                    listen = await (handle.listen if rng.random() < 0.5 else handle.subscribe)(cursor=cursor)
                    self.counts["resumed"] += 1
        except ap.SinceViolation:
            self.counts["history given up"] += 1
        finally:
            if listen is not None:
                await listen.aclose()
            await handle.aclose()

    async def begin(
        self, rng: random.Random, handle: Any, seen: list[Any]
    ) -> tuple[ap.Listen, dict[str, Any]]:
        upper = await handle.fetch_recent_upper()
        time = rng.choice(self.within(handle.since, self.after(rng, upper)) or [upper.elements[0]])
        way = rng.choice(["listen", "subscribe", "listen at", "subscribe at"])
        if way == "listen" and not self.product:
            listen = await handle.listen()
        elif way == "subscribe" and not self.product:
            listen = await handle.subscribe()
        else:
            listen = await (handle.listen if "listen" in way else handle.subscribe)(as_of=time)
        told = {
            "snapshot": "subscribe" in way and listen.as_of is not None,
            "as_of": listen.as_of,
            "begin": listen.frontier,
            "frontier": listen.frontier,
            "seen": seen,
        }
        self.follows.append(told)
        return listen, told

    async def step(self, rng: random.Random, listen: ap.Listen, seen: list[Any]) -> None:
        try:
            async with asyncio.timeout(rng.choice([0, 0.001, 0.01, 0.1])):
                step = await anext(listen.steps())
        except TimeoutError:
            return
        assert step.upper == listen.frontier
        seen += step.updates.rows()

    async def items(self, rng: random.Random, listen: ap.Listen, seen: list[Any]) -> None:
        """Items up to the next progress. Before anything came the wait may be given up."""
        pending: list[Any] = []
        while True:
            try:
                item = await asyncio.wait_for(anext(listen), rng.choice([0, 0.001, 0.01, 0.1]))
            except TimeoutError:
                if not pending and rng.random() < 0.5:
                    return
                continue
            if isinstance(item, ap.Progress):
                assert item.upper == listen.frontier
                seen += pending
                return
            pending += item.rows()

    async def done(self, handle: Any, listen: ap.Listen) -> bool:
        if self.writing:
            return False
        upper = await handle.fetch_recent_upper()
        due = listen.frontier == ap.Antichain(listen.as_of) if listen.as_of is not None else False
        return bool(upper <= listen.frontier) or (due and upper.less_equal(listen.as_of))

    # --- those who forget ----------------------------------------------------------------------------

    async def mover(self, rng: random.Random, client: ap.Client, moves: int) -> None:
        """Gives up history, and forgets it."""
        reader: ap.ReadHandle[str, int] = await client.reader(self.name, self.schema, create=True)
        writer: ap.WriteHandle[str, int] = await client.writer(self.name, self.schema)
        for _ in range(moves):
            await pause(rng)
            if rng.random() < 0.3:
                held = reader.upper.elements
                targets = [t for t in self.within(reader.since, reader.upper) if t not in held]
                if targets:
                    await reader.downgrade_since(ap.Antichain(*rng.choices(targets, k=rng.choice([1, 2]))))
            else:
                await self.compact(rng, writer)
        await writer.aclose()
        await reader.aclose()

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
        upload = Upload(shard, self.schema, 0, writer.writer_id, batches[0].lower, gathered=True, since=since)
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

            async def actor(act: Callable[..., Awaitable[None]], *args: Any) -> None:
                mine = random.Random(rng.random())
                if mine.random() < 0.4:
                    await act(mine, shared, *args)
                else:
                    async with self.client(mine) as client:
                        await act(mine, client, *args)

            followers = [asyncio.create_task(actor(self.follower)) for _ in range(rng.choice([1, 2, 4]))]
            landing = asyncio.create_task(self.land())
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(rng.choice([1, 2, 3])):
                        group.create_task(actor(self.writer, rng.choice([5, 15])))
                    for _ in range(2):
                        group.create_task(actor(self.reader, rng.choice([3, 10])))
                    if rng.random() < 0.7:
                        group.create_task(actor(self.mover, rng.choice([5, 15])))
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
        await self.verify()

    async def land(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            await self.faults.land()

    async def verify(self) -> None:
        async with self.client(random.Random(0)) as client, client.reader(self.name, self.schema) as reader:
            upper, since = await reader.fetch_recent_upper(), reader.since
            model = self.model(upper)
            least = ap.Antichain((0, 0) if self.product else 0)
            readable = [t for t in self.within(least, upper) if since.less_equal(t)]
            for time in readable[:5] + readable[-5:]:
                async with reader.snapshot(time) as snapshot:
                    self.snapshots.append((time, await snapshot.rows()))
        assert all(self.refusals)
        for as_of, seen in self.snapshots:
            assert seen == model.contents(as_of), f"contents at {as_of}"
        for told in self.follows:
            as_of, frontier = told["as_of"], told["frontier"].elements
            ahead = all(not passed(told["begin"].elements, e) for e in frontier)
            assert ahead or told["snapshot"], told
            begin = told["begin"].elements
            expected: Counter[Any] = Counter()
            if not told["snapshot"]:
                expected = model.changes(as_of, lower=begin, upper=frontier)
            elif told["frontier"] != told["begin"]:
                expected = model.changes(as_of, upper=frontier)
                expected.update({(k, v, as_of): d for k, v, d in model.contents(as_of)})
            seen = gathered(told["seen"])
            missing, beyond = expected - seen, seen - expected
            assert seen == expected, f"{missing=} {beyond=} as_of {as_of} {told['begin']}..{told['frontier']}"

    def model(self, upper: ap.Antichain) -> Model:
        """All that was committed, in order. Writes that shared a commit have the same bounds."""
        model = Model([(0, 0)] if self.product else [0])
        least = ap.Antichain(*model.upper)
        if self.definite:
            rows = [row for time in self.within(least, upper) for row in self.definite_rows(time)]
            model.append(rows, least.elements, upper.elements)
            return model
        bounds = {}
        for lower, up, rows in self.committed:
            if lower != up:
                bounds.setdefault((lower, up), []).extend(rows)
        pieces = sorted(bounds.items(), key=lambda item: sum(map(_rank, item[0][0].elements)))
        at = least
        while at != upper:
            (piece,) = [piece for piece in pieces if piece[0][0] == at]
            pieces.remove(piece)
            model.append(piece[1], piece[0][0].elements, piece[0][1].elements)
            at = piece[0][1]
        assert not pieces, pieces
        return model


def _rank(time: Any) -> int:
    return sum(time) if isinstance(time, tuple) else time


async def pause(rng: random.Random) -> None:
    for _ in range(rng.choice([0, 0, 1, 3])):
        await asyncio.sleep(0)
    if rng.random() < 0.05:
        await asyncio.sleep(0.002)


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
        async with asyncio.timeout(60):
            await game.play()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        await game.blob.inner.aclose()
        await game.consensus.inner.aclose()
    game.counts["snapshots"] += len(game.snapshots)
    game.counts["followed"] += sum(len(told["seen"]) for told in game.follows)
    return game.counts
