"""A random history of consumers under faults, and what must be true of it.

One producer writes numbered updates. Consumers of several kinds, each with two clients that fight for its
name, take steps and acknowledge them: alone, with an append to a shard (`Subscription.commit`), or with a
transaction. Calls are cancelled, answers are lost or late, openings are abandoned, since is moved and
everything is compacted. At the end the log of the shard, which has each version that was ever written, is
compared with what the openings were given and have acknowledged:

- an opening gets exactly the updates behind the position that it began at, in order: none is skipped;
- a position only moves forward, only by its owner, and only to what that one has acknowledged; one that was
  told to be durable is; since never passes it;
- each output is there once if its input was acknowledged, else not at all.
"""

import asyncio
import random
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import aiopersist as ap
from aiopersist.state.diff import decode_diff
from aiopersist.state.position import Position
from aiopersist.testing.faults import Faults, FaultyConsensus, Outcome
from tests.conftest import StoreUrls
from tests.support.schemas import SCHEMA
from tests.support.virtual import played

RATES = {Outcome.REFUSED: 0.02, Outcome.LOST: 0.05, Outcome.DROPPED: 0.03, Outcome.LATE: 0.02}
KINDS = ("ack", "commit", "same", "transact", "half[0/2]", "half[1/2]")
CLIENTS_MAX = 60  # pairs, one after the other
LIMITS = {"watch_timeout_s": 0.02, "ack_every_s": 0.005, "row_group_bytes": 300, "blob_target_size": 600}


class WritesLate(Faults):
    """A request that only reads is not worth a late answer."""

    def outcome(self, op: str) -> Outcome:
        found = super().outcome(op)
        is_write = op.startswith("compare_and_set")
        return Outcome.DONE if found is Outcome.LATE and not is_write else found


@dataclass
class Opened:
    """What one opening was given, and has tried to acknowledge."""

    key: str
    begins_at: Position
    steps: list[Any] = field(default_factory=list)
    tried: list[Position] = field(default_factory=list)


def order(position: Position) -> tuple[Any, ...]:
    """Of positions: the contents come before all that follows their time."""
    if position.contents is None:
        return position.as_of + 1, 0
    return position.contents.as_of, 1, position.contents.rows


class Game:
    """See the header."""

    honest: ap.Client
    """One that nothing happens to."""

    def __init__(self, seed: int, location: StoreUrls, updates: int) -> None:
        self.rng = random.Random(seed)
        self.location = location
        self.stores: list[Any] = []  # opened here, to be closed at the end
        self.updates = updates
        self.written: dict[int, list[tuple[str, int]]] = {}
        """By time, what was written."""
        self.opened: dict[str, Opened] = {}
        """By owner."""
        self.counts: Counter[str] = Counter()
        self.faults: list[Faults] = []
        self.finished = False
        self.reading = 0  # consumers whose clients are open
        self.day = asyncio.Event()
        self.day.set()
        self.first_output = 2**62
        """From this time on the shard may have outputs among its inputs."""

    def client(self, *, honest: bool = False) -> Any:
        rates = {} if honest else RATES
        faults = WritesLate(self.rng.randrange(2**32), rates, latency_s=(0.0, 0.0005))
        self.faults.append(faults)
        blob, inner = ap.open_blob(self.location.blob), ap.open_consensus(self.location.consensus)
        self.stores += [blob, inner]
        consensus = FaultyConsensus(inner, faults)
        limits = ap.Settings(**LIMITS, inline_writes_single_max_bytes=self.rng.choice([0, 16384]))
        return ap.open(blob=blob, consensus=consensus, settings=limits, maintenance=False)

    async def play(self) -> Counter[str]:
        try:
            return await self._play()
        finally:
            for store in self.stores:
                await store.aclose()

    async def _play(self) -> Counter[str]:
        async with self.client(honest=True) as honest:
            self.honest = honest
            await self.produce(honest, 10)
            async with asyncio.TaskGroup() as tasks:
                consumers = [tasks.create_task(self.consume(kind)) for kind in KINDS]
                disturbing = tasks.create_task(self.disturb(honest))
                for number in range(self.updates):
                    if number == self.updates // 2:
                        await self.night(honest)
                    await self.produce(honest, self.rng.choice([1, 1, 2, 5]))
                    await asyncio.sleep(self.rng.choice([0, 0.001, 0.005]))
                self.finished = True
                await asyncio.wait(consumers)
                disturbing.cancel()
            await self.check(honest)
        return self.counts

    async def produce(self, honest: ap.Client, count: int) -> None:
        async with honest.writer("s", SCHEMA) as writer:
            first = sum(map(len, self.written.values()))
            rows = [(f"k{number % 9}", number) for number in range(first, first + count)]
            self.written[await writer.write(rows)] = rows

    async def night(self, honest: ap.Client) -> None:
        """Nobody reads, so that only positions keep since; writes go on."""
        self.day.clear()
        while self.reading:
            await asyncio.sleep(0.005)
        await self.produce(honest, 2)
        await honest.retain("s", 0)
        self.day.set()

    async def disturb(self, honest: ap.Client) -> None:
        """What the world does meanwhile."""
        await honest.retain("s", 0)
        while True:
            await asyncio.sleep(self.rng.uniform(0, 0.02))
            for faults in self.faults:
                await faults.land()
            if self.rng.random() < 0.3:
                await honest.force_compaction("s")

    # --- consumers -------------------------------------------------------------------------------

    async def consume(self, kind: str) -> None:
        """Openings of one name, one after the other or at once, until everything is acknowledged. Clients
        come and go."""
        for _ in range(CLIENTS_MAX):
            await self.day.wait()
            self.reading += 1
            async with self.client() as one, self.client() as two:
                for _ in range(self.rng.randrange(1, 10)):
                    if not self.day.is_set():
                        break
                    if await self.is_done(one, kind):
                        return
                    count = self.rng.choice([1, 1, 2])
                    some = [self.opening(self.rng.choice([one, two]), kind) for _ in range(count)]
                    await asyncio.gather(*some)
            self.reading -= 1
        raise AssertionError(f"{kind} never gets to the end")

    async def is_done(self, client: ap.Client, kind: str) -> bool:
        view = (await client.admin.subscriptions("s")).get(kind)
        if view is None or view.contents:  # its position is behind all, and it was given nothing yet
            return False
        return self.finished and view.position > max(self.written)

    async def opening(self, client: ap.Client, kind: str) -> None:
        """One opening: some steps, then it is closed, abandoned, or fenced."""
        name, _, share = kind.partition("[")
        given: dict[str, Any] = {"share": (int(share[0]), 2)} if share else {}
        try:
            sub = await self.cancellable(client.subscription("s", SCHEMA, name=name, **given), 0.05)
        except ap.OpaqueMismatch:  # another opening has passed it already
            self.counts["fenced"] += 1
            return
        if sub is None:
            return
        consumer = sub._consumer
        opened = self.opened[consumer.owner] = Opened(kind, consumer.begins_at)
        try:
            for _ in range(self.rng.randrange(1, 12)):
                step = await self.next_step(sub)
                if step is None:
                    break
                opened.steps.append(step)
                may_skip = kind not in ("commit", "same", "transact")
                is_skipped = may_skip and self.rng.random() < 0.15
                if not is_skipped and not await self.acknowledge(client, sub, step, opened):
                    break
        except ap.OpaqueMismatch:
            self.counts["fenced"] += 1
        if self.rng.random() < 0.7:
            await self.cancellable(sub.aclose(), 0.2)
        else:
            self.counts["abandoned"] += 1

    async def next_step(self, sub: Any) -> Any:
        while True:
            is_last = self.finished or not self.day.is_set()
            step = await self.cancellable(asyncio.ensure_future(anext(sub)), 0.1, wait_s=0.1)
            if step is not None or is_last:
                return step

    async def acknowledge(self, client: ap.Client, sub: Any, step: Any, opened: Opened) -> bool:
        """Whether the opening may go on: what it makes of a step must not be left out."""
        kind = opened.key
        opened.tried.append(step._mark.position)
        if kind not in ("commit", "same", "transact"):
            await self.ack(sub, step, kind)
            if self.rng.random() < 0.2:  # it changes nothing
                await self.ack(sub, self.rng.choice(opened.steps), kind)
            return True
        while True:
            try:
                done = await self.cancellable(self.output(client, sub, step, kind), 0.3)
            except ap.UpperMismatch:
                self.counts["mismatch"] += 1
                continue
            except ap.InvalidUsage as error:
                self.counts[error.kind.name] += 1
                if error.kind is ap.UsageKind.CONSUMED:
                    return True
                raise
            if done is not None:
                self.counts[kind] += 1
                return True
            if self.rng.random() < 0.2:
                return False  # nobody knows whether it happened

    async def ack(self, sub: Any, step: Any, kind: str) -> None:
        durable = self.rng.random() < 0.3
        answer = await self.cancellable(sub.ack(step, durable=durable), 0.1)
        self.counts["ack"] += 1
        if durable and answer is not None:
            self.counts["durable"] += 1
            there = (await self.honest.subscriptions("s"))[kind]
            position = step._mark.position
            assert position.contents is not None or position.frontier <= there.position, "not durable"

    async def output(self, client: ap.Client, sub: Any, step: Any, kind: str) -> str:
        """What a consumer makes of a step: a row for each of its input."""
        vals = [update.val for update in step.updates if update.key.startswith("k")]
        if kind == "transact":
            table = client.table("counts", int, int)

            async def body(tx: ap.Transaction) -> None:
                known = await tx.get_many(table, vals)
                tx.put_many(table, {val: known.get(val, 0) + 1 for val in vals})

            await client.transact(body, acks=[(sub, step)])
            return "done"
        async with client.writer("same" if kind == "commit" else "s", SCHEMA) as writer:
            upper: Any = (await writer.fetch_recent_upper()).time
            rows = [(kind, val, upper, 1) for val in vals]
            if kind == "same":
                self.first_output = min(self.first_output, upper)
            if kind == "commit" or rows:
                await sub.commit(step, [ap.Append(writer, rows, upper, upper + 1)])
            else:
                await sub.commit(step, [])
        return "done"

    async def cancellable(self, work: Any, chance: float, wait_s: float = 40.0) -> Any:
        """The result; `None` if the call was cancelled, at any of its awaits, or after `wait_s`."""
        task = asyncio.ensure_future(work)
        if self.rng.random() < chance:
            for _ in range(self.rng.randrange(60)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task], timeout=wait_s)
        assert task.done() or wait_s < 1, "a call hangs"
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            self.counts["cancelled"] += 1
            return None
        return task.result() or "done"

    # --- what must be true -----------------------------------------------------------------------

    async def check(self, honest: ap.Client) -> None:
        for faults in self.faults:
            await faults.land()
        await self.read_all(honest)
        for opened in self.opened.values():
            self.check_steps(opened)
        await self.check_positions(honest)
        await self.check_outputs(honest)

    async def read_all(self, honest: ap.Client) -> None:
        """What was written, by the shard itself: its own outputs are among it."""
        async with honest.reader("s", SCHEMA) as reader, reader.snapshot() as snapshot:
            there = Counter({(key, val): diff for key, val, diff in await snapshot.rows()})
        mine = Counter(row for rows in self.written.values() for row in rows)
        assert {row: n for row, n in there.items() if row[0].startswith("k")} == mine
        self.all = there

    def check_steps(self, opened: Opened) -> None:
        """Behind the position at which it began: the rest of the contents, then each interval, whole."""
        place = opened.begins_at
        for step in opened.steps:
            got = [(u.key, u.val, u.time, u.diff) for u in step.updates if u.key.startswith("k")]
            mine = self.of_share(opened.key)
            if place.contents is not None:
                as_of = place.contents.as_of
                early = [row for t, rows in self.written.items() if t <= as_of for row in rows]
                whole = sorted(row for row in early if mine(row[0]))
                assert step.contents
                if opened.key in ("ack", "transact", "commit"):  # all keys, and no output among them yet
                    behind = step._mark.position.contents
                    before = place.contents.rows
                    if as_of < self.first_output:
                        end = len(whole) if behind is None else behind.rows
                        assert [(k, v) for k, v, _, _ in got] == whole[before:end], "a part of the contents"
                assert {(k, v) for k, v, _, _ in got} <= set(whole)
            else:
                lower, upper = place.frontier.time, step.upper.time
                expected = sorted(
                    (k, v, t, 1)
                    for t, rows in self.written.items()
                    if lower <= t < upper
                    for k, v in rows
                    if mine(k)
                )
                assert sorted(got) == expected, f"{opened.key}: the updates of [{lower}, {upper})"
            assert order(place) < order(step._mark.position)
            place = step._mark.position
        self.counts["steps"] += len(opened.steps)

    def of_share(self, key: str) -> Any:
        if not key.startswith("half"):
            return lambda some: True
        number = int(key[5])
        return lambda some: crc32(f'"{some}"'.encode()) % 2 == number

    async def check_positions(self, honest: ap.Client) -> None:
        """By the log: forward only, by its owner, to what that one acknowledged."""
        shard = honest._shards.at(await honest.shard_id("s"))
        versions = await honest._stack.consensus.scan(shard.register.key, 0, 10**6)
        assert versions[0].seqno == 0
        known: dict[str, Any] = {}
        since, upper = 0, 0
        for version in versions:
            changes = decode_diff(version.data).changes
            since = since if changes.since is None else changes.since.time
            for key, record in changes.subscriptions.items():
                self.check_move(key, known.get(key), record)
            if changes.upper is not None:
                is_output, upper = upper > 0 and upper not in self.written, changes.upper.time
                assert not is_output or "same" in changes.subscriptions, "an output without its input"
            known.update(changes.subscriptions)
            for key, record in known.items():
                assert since <= record.position.as_of, f"{key}: its updates were given up"
        assert known.keys() == set(KINDS)

    def check_move(self, key: str, before: Any, record: Any) -> None:
        """Forward, by its owner, to what that one acknowledged."""
        if before is not None and record.position != before.position:
            assert order(before.position) < order(record.position), f"{key}: the position went back"
            owner = self.opened.get(before.owner)
            assert owner is not None, f"{key}: moved by an opening that nobody has"
            assert record.position in owner.tried, f"{key}: not acknowledged by its owner"
            self.counts["moved"] += 1

    async def check_outputs(self, honest: ap.Client) -> None:
        """Each once, of the inputs before the position; none of the others."""
        state = await honest._shards.at(await honest.shard_id("s")).open()
        inputs = [val for rows in self.written.values() for _, val in rows]
        for kind in ("commit", "same", "transact"):
            position = state.subscriptions[kind].position
            assert position.contents is None and position.frontier > max(self.written)
        async with honest.reader("same", SCHEMA) as reader, reader.snapshot() as snapshot:
            outputs = {val: diff for _, val, diff in await snapshot.rows()}
        assert outputs == dict.fromkeys(inputs, 1), "outputs of commits"
        assert {v: n for (k, v), n in self.all.items() if k == "same"} == dict.fromkeys(inputs, 1), (
            "same shard"
        )
        counts = {key: val async for key, val in honest.table("counts", int, int).items()}
        assert counts == dict.fromkeys(inputs, 1), "outputs of transactions"


async def play(seed: int, updates: int = 20, location: StoreUrls | None = None) -> Counter[str]:
    """One game; what happened in it. A failure names the seed."""
    url = f"mem://{uuid.uuid4().hex}"
    try:
        return await Game(seed, location or StoreUrls(url, url), updates).play()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


def play_brief(seed: int) -> Counter[str]:
    """A small one, in no time (`tests/support/virtual.py`)."""
    return played(seed, lambda: Game(seed, StoreUrls(*2 * [f"mem://{uuid.uuid4().hex}"]), 8).play())
