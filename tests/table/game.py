"""A random game: tasks of several clients work on the keys of two tables, while the stores fail, answers get
lost, calls are cancelled, and everything is compacted and collected. `history.py` checks what they were told.

Every val is put by one call alone, so a val says whose it is.
"""

import asyncio
import random
import uuid
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.table.history import BOTH, History, Op

RATES = {Outcome.REFUSED: 0.02, Outcome.LOST: 0.03, Outcome.DROPPED: 0.02, Outcome.LATE: 0.01}
LIMITS = {"watch_timeout_s": 0.02, "row_group_bytes": 200, "blob_target_size": 400, "open_timeout_s": 50.0}
TABLES = ("t", "u")
KEYS = "abc"
UNTOLD = (ap.Indeterminate, ap.StorageUnavailable)


class Troubles(Faults):
    """Hints come: one that lands late would be waited for."""

    def outcome(self, op: str) -> Outcome:
        return Outcome.DONE if op == "watch" else super().outcome(op)


class Actor:
    """A client, and what its tasks do."""

    def __init__(self, name: str, client: ap.Client, faults: Faults, game: "Game") -> None:
        self.name = name
        self.client = client
        self.faults = faults
        self.game = game
        self.tables = {name: client.table(name, str, str) for name in TABLES}

    async def play(self, rng: random.Random, moves: int) -> None:
        for _ in range(moves):
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
            await self._move(rng)

    async def _move(self, rng: random.Random) -> None:
        kind = rng.choices(
            ["put", "update", "insert", "delete", "get", "get_many", "stale", "as_of", "put_many", "other"],
            [5, 5, 2, 2, 4, 2, 1, 1, 2, 1],
        )[0]
        table = rng.choice(TABLES)
        keys = tuple(rng.sample(KEYS, rng.choice([1, 2]) if kind in ("put_many", "delete") else 1))
        if kind == "get_many":
            keys = tuple(KEYS)
        if kind == "other":
            await self._maintain(rng, table)
            return
        op = self.game.history.begin(self.name, table, kind, keys)
        once = f"id{op.id}" if rng.random() < 0.5 else None
        other = rng.choice(self.game.actors)
        if once is None or rng.random() < 0.6 or kind not in ("put", "put_many", "delete"):
            other = self
        op.client = self.name if other is self else BOTH
        work = asyncio.ensure_future(self._told(op, once, other))
        if rng.random() < 0.1:
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            work.cancel()
            self.game.counts["cancelled"] += 1
        await asyncio.wait([work])
        if not work.cancelled():
            work.result()

    async def _told(self, op: Op, once: str | None, other: "Actor") -> None:
        """Do it, again and again if it has an id, perhaps with another client at the same moment; what came
        of it goes into the history."""
        history = self.game.history
        while True:
            try:
                if other is self:
                    await self._do(op, once)
                else:
                    self.game.counts["both"] += 1
                    answers = await asyncio.gather(
                        self._do(op, once), other._do(op, once), return_exceptions=True
                    )
                    for error in filter(lambda answer: isinstance(answer, BaseException), answers):
                        raise error  # type: ignore[misc]
            except ap.KeyExists:
                op.result = "there"
            except UNTOLD:
                self.game.counts["untold"] += 1
                if once is not None:
                    self.game.counts["again"] += 1
                    await asyncio.sleep(0.001)
                    continue
                return
            history.end(op)
            self.game.counts[op.kind] += 1
            return

    async def _do(self, op: Op, once: str | None) -> None:
        table, key = self.tables[op.table], op.keys[0]
        if op.kind == "put":
            op.time = await table.put(key, op.val(key), once)
        elif op.kind == "put_many":
            op.time = await table.put_many({k: op.val(k) for k in op.keys}, once=once)
        elif op.kind == "insert":
            op.time = await table.insert(key, op.val(key), once)
        elif op.kind == "delete":
            op.time = await table.delete(*op.keys, once=once)
        elif op.kind == "update":
            found = await table.update(key, lambda old: op.val(key, old), once)
            if isinstance(found, ap.Repeated):
                op.time = found.time
            else:
                assert found == op.val(key, op.old), (found, op)
        elif op.kind == "as_of":
            op.time = (await table.view()).upper.time - 1
            op.result = {key: await table.get(key, as_of=op.time)} if op.time > 0 else {}
        else:
            found = await table.get_many(op.keys, stale=op.kind == "stale")
            op.result = {key: found.get(key) for key in op.keys}

    async def _maintain(self, rng: random.Random, table: str) -> None:
        try:
            await rng.choice([self.client.force_compaction, self.client.force_gc])(table)
            await self.faults.land()
            self.game.counts["maintained"] += 1
        except (ap.UnknownShard, ap.MissingPart, *UNTOLD):
            pass


class Game:
    """See the header."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.history = History()
        self.actors: list[Actor] = []
        self.counts: Counter[str] = Counter()
        self.url = f"mem://{uuid.uuid4().hex}"

    def _opening(self, faults: Faults, retries: float | None, inline: int) -> Any:
        return ap.open(
            blob=FaultyBlob(ap.open_blob(self.url), faults),
            consensus=FaultyConsensus(ap.open_consensus(self.url), faults),
            settings=ap.Settings(retry_timeout_s=retries, inline_writes_single_max_bytes=inline, **LIMITS),
            maintenance=False,
        )

    async def play(self) -> Counter[str]:
        async with AsyncExitStack() as stack:
            honest = await stack.enter_async_context(ap.open(self.url, maintenance=False))
            for name in TABLES:
                await honest.table(name, str, str)
                await honest.retain(name, None)  # so that the whole history can be checked
            holds = [await stack.enter_async_context(honest.critical_since(name, "all")) for name in TABLES]
            actors = self.actors
            for number in range(self.rng.choice([2, 3])):
                faults = Troubles(self.rng.randrange(10**6), latency_s=(0.0, 0.002))
                retries, inline = self.rng.choice([0.0, None]), self.rng.choice([0, 16384])
                client = await stack.enter_async_context(self._opening(faults, retries, inline))
                actors.append(Actor(f"c{number}", client, faults, self))
                await asyncio.gather(*actors[-1].tables.values())
                faults.rates = dict(RATES) if self.rng.random() < 0.8 else {}
            games = [
                actor.play(random.Random(self.rng.randrange(10**6)), 12)
                for actor in actors
                for _ in range(self.rng.choice([2, 6]))
            ]
            async with asyncio.timeout(50):
                await asyncio.gather(*games)
            await self._end(honest, actors)
            assert holds
        return self.counts

    async def _end(self, honest: ap.Client, actors: list[Actor]) -> None:
        for actor in actors:
            actor.faults.heal()
        for actor in actors:
            await actor.faults.land()
            for table in actor.tables.values():  # behind what cancelled calls have sent
                await table.delete("nothing")
        for name in TABLES:
            schema = actors[0].tables[name].schema
            now = (await honest.upper(name)).time
            updates = []
            async with honest.reader(name, schema) as reader, reader.listen(0, until=now) as listen:
                async for step in listen.steps():
                    updates += list(step.updates)
            async with honest.reader(name, schema) as reader, reader.snapshot() as snapshot:
                contents = await snapshot.rows()
            self.history.check(name, updates, contents)
            final = {key: val for key, val, _ in contents}
            for actor in actors:
                found = await actor.tables[name].get_many(KEYS)
                assert found == final, (actor.name, name, found, final)
                assert await actor.tables[name].get_many(KEYS, stale=True) == final, (actor.name, name)
            report = await honest.fsck(name)
            assert report.ok, report.problems


async def play(seed: int) -> Counter[str]:
    """One game; what happened in it. A failure names the seed."""
    try:
        return await Game(seed).play()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
