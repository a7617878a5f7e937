"""The game of `test_all_commands.py`: a life of a shard under commands that are drawn by a seed."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiopersist.base.frontier import Antichain
from aiopersist.state import rollup_file
from aiopersist.state.command import Command, Commit, Keep
from aiopersist.state.compaction import ClaimCollection, ReleaseClaim, Replace, TakeClaim, Total
from aiopersist.state.consuming import MarkConsumed, Staged
from aiopersist.state.invariants import check_state
from aiopersist.state.lifecycle import (
    AddRollup,
    EndCollection,
    EvolveSchema,
    ExpireOverdue,
    Finalize,
    FinalizeUnused,
    ForgetTransactions,
    MarkDeleted,
)
from aiopersist.state.model import COLLECTION, Clock, HollowBatch, Rollup, State, Tag
from aiopersist.state.names import live_parts
from aiopersist.state.once import UNMARKED, Once, hash_of
from aiopersist.state.position import Position, WithinContents, subscription_key
from aiopersist.state.reading import ExpireReader, KeepReader, RegisterReader, RenewReader, TakeNamedHold
from aiopersist.state.record import HollowPart
from aiopersist.state.retention import (
    ApplyRetention,
    DowngradeCritical,
    ForgetHistory,
    RegisterCritical,
    ReleaseCritical,
    SetRetention,
)
from aiopersist.state.subscriptions import (
    Ack,
    Acknowledge,
    BeatSubscription,
    Beginning,
    DropSubscription,
    LeaveSubscription,
    OpenSubscription,
    has_expired,
)
from aiopersist.state.tagging import AddTag, DropTag, tagged
from aiopersist.state.writing import (
    Appended,
    AppendHollow,
    CloseTo,
    ExpireWriter,
    HeartbeatWriter,
    Occupy,
    RegisterWriter,
    Write,
)
from tests.state.test_commands import LEASE_S, READERS, ROOM, SHARD, WRITERS, ZERO, History, created

FAR = 2**62  # a time where a frontier is empty
ONCE_KEEP_S = 300.0
SKIPS_S = (1.0, LEASE_S * 2, -500.0, 500.0, 1e6, -1e6)


class Game:
    """A life of a shard."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.history: History = created(self.rng.choice(list(Clock)))
        self.specs: list[dict[int, HollowBatch]] = []
        """What compactions have read, now or earlier."""
        self.counts: Counter[str] = Counter()
        self.ids: dict[str, tuple[float, int]] = {}
        """By hash: when it was recorded last, and the time of that commit."""
        self.latest = 0.0
        """The latest moment of a commit with ids: those that were too old by then may be forgotten."""

    def play(self) -> Counter[str]:
        for _ in range(self.rng.randrange(5, 150)):
            if self.rng.random() < 0.04:
                self.history.now += self.rng.choice(SKIPS_S)
            self.step(self.rng.choice(LIVE if not self.history.live.finalized else OVER)(self))
        return self.counts

    def step(self, command: Command) -> None:
        before = self.history.live
        outcome = self.history.run(command)  # reads the bytes back, and checks what must hold
        if isinstance(command, AppendHollow | Write):
            self.check_ids(command.once, outcome)
        self.counts[type(command).__name__] += isinstance(outcome, Commit)
        if not isinstance(outcome, Commit):
            assert self.history.live is before
            return
        after = self.history.live
        self.check_consumers(command, before, after)
        self.check_tags(command, before, after)
        data = rollup_file.encode_rollup(after)
        read = rollup_file.decode_rollup(data, rollup_file.checksum_of(data))
        assert check_state(read) == after
        assert list(read.batches) == list(after.batches)
        assert {claim.writer for claim in after.claims.values()} <= after.writers.keys()
        holds = [record.since for name in ("readers", "critical") for record in getattr(after, name).values()]
        holds += [policy.hold for policy in after.retention.values()]
        holds += [consumer.hold for consumer in after.subscriptions.values()]
        assert after.finalized or all(after.since <= hold for hold in holds), "since passes a hold"
        if (happened := getattr(command, "happened", None)) is not None:
            assert happened(after) is not False

    def check_ids(self, once: Once, outcome: Commit | Keep) -> None:
        """An id is known again as long as it must be, and never by another time than that of its commit."""
        now, live = self.history.now, self.history.live
        for hashed in once.hashes:
            at, time = self.ids.get(hashed, (-FAR, 0))
            if isinstance(outcome, Commit):
                assert at < max(now, self.latest) - ONCE_KEEP_S
                self.ids[hashed], self.latest = (now, max(_int(live.upper) - 1, 0)), max(now, self.latest)
                self.counts["once"] += 1
            elif isinstance(outcome.result, Appended) and outcome.result.done_at is not None:
                assert (at >= now - ONCE_KEEP_S, outcome.result.done_at) == (True, time)
                self.counts["repeat"] += 1

    def check_consumers(self, command: Command, before: State, after: State) -> None:
        """A position moves forward only, by its owner; what has not expired goes by a drop alone."""
        for key, record in before.subscriptions.items():
            now = after.subscriptions.get(key)
            if has_expired(record, self.history.now):
                continue
            if now is None:
                assert isinstance(command, DropSubscription) or after.finalized
                continue
            assert not now.position.is_before(record.position), "the position went back"
            assert not now.expired
            if now.position != record.position and not isinstance(command, OpenSubscription):
                acks = getattr(command, "acks", ()) or (command.ack,)  # type: ignore[attr-defined]
                assert (key, record.owner) in {(ack.key, ack.owner) for ack in acks}, "by another"
                self.counts["moved"] += 1
        self.counts["expired"] += sum(record.expired for record in after.subscriptions.values())

    def check_tags(self, command: Command, before: State, after: State) -> None:
        """A tag goes by a drop or its expiry alone, and keeps its blobs until then."""
        if after.finalized:
            return
        for name, tag in before.tags.items():
            if tag.has_expired(self.history.now):
                self.counts["tag expired"] += name not in after.tags
                continue
            assert after.tags.get(name) == tag or (isinstance(command, DropTag) and command.name == name)
        assert live_parts(after).issuperset(key for tag in after.tags.values() for key in tag.keys)

    # --- what commands are made of -------------------------------------------------------------------

    @property
    def writer(self) -> str:
        return self.rng.choice(WRITERS)

    @property
    def reader(self) -> str:
        return self.rng.choice(READERS)

    @property
    def upper(self) -> int:
        return _int(self.history.live.upper)

    @property
    def since(self) -> Antichain:
        """One near the shard's, or the empty one."""
        if self.rng.random() < 0.1:
            return Antichain()
        return Antichain(_int(self.history.live.since) + self.rng.randrange(6))

    @property
    def token(self) -> str:
        return f"t{len(self.history.versions)}"

    @property
    def transactions(self) -> dict[str, int]:
        return {self.rng.choice("abc"): self.rng.randrange(9)} if self.rng.random() < 0.3 else {}

    @property
    def once(self) -> Once:
        if self.rng.random() < 0.5:
            return UNMARKED
        return Once((hash_of(str(self.rng.randrange(20))),), ONCE_KEEP_S)

    @property
    def staged(self) -> tuple[Staged, ...]:
        some = range(self.rng.choice((0, 0, 1, 2)))
        return tuple(Staged(self.writer, f"b{self.rng.randrange(4)}", self.rng.random() < 0.5) for _ in some)

    def batch(self, lower: int, upper: int, rows: int = -1, writer: str | None = None) -> HollowBatch:
        """With blobs of that writer, or of any."""
        rng = self.rng
        rows = rng.choice((0, 1, 1, 3, 50, 5000)) if rows < 0 else rows
        whole = rows if lower < upper else 0
        first = whole // rng.choice((1, 2))
        parts = tuple(self.part(n, writer or self.writer) for n in (first, whole - first) if n)
        bounds = {"lower": Antichain(lower), "upper": Antichain(upper), "since": ZERO}
        return HollowBatch(**bounds, parts=parts, runs=(1,) if len(parts) > 1 else ())

    def part(self, rows: int, writer: str) -> HollowPart:
        size = self.rng.randrange(50)
        if self.rng.random() < 0.5:
            return HollowPart(inline=b"x" * size, size=size, rows=rows, checksum="c")
        key = f"{SHARD}/{writer}/{self.rng.random()}.parquet"
        return HollowPart(key=key, size=size, rows=rows, checksum="c")

    @property
    def owner(self) -> str:
        return self.rng.choice("op")

    @property
    def share(self) -> tuple[int, int] | None:
        return self.rng.choice([None, None, None, (0, 2), (1, 2)])

    @property
    def position(self) -> Position:
        time = max(self.upper - self.rng.randrange(5), 0)
        if self.rng.random() < 0.5:
            return Position(frontier=Antichain(time))
        within = WithinContents(as_of=time, key='"k"', past=1, rows=self.rng.randrange(9))
        return Position(frontier=Antichain(time), contents=within)

    @property
    def ack(self) -> Ack:
        """Mostly one that is not refused."""
        live = list(self.history.live.subscriptions.items())
        if live and self.rng.random() < 0.8:
            key, record = self.rng.choice(live)
            return Ack(key, record.owner or self.owner, self.position)
        return Ack(subscription_key("s", self.share), self.owner, self.position)

    def opening(self) -> OpenSubscription:
        start = self.rng.choice([None, None, Beginning.SNAPSHOT, Beginning.NOW, self.position])
        resume = self.position if self.rng.random() < 0.3 else None
        expire_after_s = self.rng.choice([None, 3.0, 20.0])
        name = self.rng.choice("st")
        return OpenSubscription(name, self.share, self.owner, LEASE_S, expire_after_s, start, resume)

    def append(self) -> AppendHollow:
        new = self.batch(self.upper, self.upper + self.rng.randrange(5))
        acks = (self.ack,) if self.rng.random() < 0.1 else ()
        limits: dict[str, Any] = {"staged": self.staged, "transactions_max": self.rng.choice((2, 99))}
        limits["once"] = self.once
        limits["ahead_max_s"], limits["acks"] = self.rng.choice((1.0, 1e9)), acks
        return AppendHollow(
            self.writer, self.token, new, self.transactions, self.rng.choice((ROOM, 200)), False, **limits
        )

    def replicated(self) -> AppendHollow:
        lower = max(self.upper - self.rng.randrange(5), 0)
        new = self.batch(lower, lower + self.rng.randrange(9))
        return AppendHollow(self.writer, self.token, new, {}, ROOM, replica=True)

    def write(self) -> Write:
        new = self.batch(max(self.upper - self.rng.randrange(5), 0), self.upper + 1)
        return Write(self.writer, self.token, new, self.transactions, ROOM, once=self.once)

    def closing(self) -> CloseTo:
        """To an instant beyond the upper, or one that has passed already."""
        near = max(self.upper + self.rng.randrange(-3, 5), 0)
        return CloseTo(Antichain(near if self.rng.random() < 0.9 else min(near + 10**6, FAR)))

    def spec(self) -> dict[int, HollowBatch] | None:
        """Neighbours, as they are or were."""
        there = list(self.history.live.batches.items())
        if there:
            begin = self.rng.randrange(len(there))
            self.specs.append(dict(there[begin : begin + self.rng.choice((1, 2, 3, 9))]))
        return self.rng.choice(self.specs[-3:]) if self.specs else None

    def compaction(self) -> Command:
        spec, writer = self.spec(), self.writer
        if spec is None or self.rng.random() < 0.3:
            return Occupy(writer) if spec is None else TakeClaim(writer, spec)
        first, *_, last = [*spec.values()] * 2
        rows = sum(batch.len for batch in spec.values())
        made = self.batch(0, 1, self.rng.randrange(rows + 1), writer)
        made = made.replace(lower=first.lower, upper=last.upper, since=self.rng.choice((ZERO, self.since)))
        return Replace(writer, spec, made, Total(rows, 7), Total(made.len, 7))

    def rollup(self) -> AddRollup:
        seqno = max(self.history.live.seqno - self.rng.randrange(9), 0)
        writer = self.writer
        key = f"{SHARD}/{writer}/{self.rng.randrange(9)}.rollup"
        return AddRollup(writer, seqno, Rollup(key=key, checksum="c", size=1))

    def tag(self) -> AddTag:
        """Of the newest version, or of one a while ago, whose parts may be gone."""
        writer, states = self.writer, self.history.states
        as_of = max(self.upper - self.rng.randrange(1, 5), 0)
        contents = tagged(states[max(len(states) - self.rng.choice((1, 1, 9, 30)), 0)], as_of)
        if contents.finalized:
            contents = tagged(self.history.live, as_of)
        key = f"{SHARD}/{writer}/{self.rng.random()}.rollup"
        tag = Tag(
            seqno=contents.seqno,
            as_of=Antichain(as_of),
            at=self.history.now,
            expires_at=self.rng.choice((None, self.history.now + 5.0)),
            rollup=Rollup(key=key, checksum="c", size=1),
            parts=tuple(sorted(live_parts(contents))),
        )
        return AddTag(writer, self.rng.choice("uv"), tag)

    def rare(self) -> Command:
        chance = self.rng.random()
        if chance < 0.2:
            return Finalize(SHARD) if chance < 0.1 else FinalizeUnused(SHARD)
        return EvolveSchema(0, {"key": "str2"})

    def collection(self) -> Command:
        live = self.history.live
        return ClaimCollection(self.writer, live.latest_rollup, live.collected)


def _int(frontier: Antichain) -> int:
    return frontier.time if isinstance(frontier.time, int) else FAR


Draw = Callable[[Game], Command]
HOLDS: list[Draw] = [
    lambda g: RegisterReader(g.reader, g.since, LEASE_S, g.rng.random() < 0.5),
    lambda g: RenewReader(g.reader, advance_to=g.since),
    lambda g: RenewReader(g.reader, hold=g.since),
    lambda g: KeepReader(g.reader),
    lambda g: ExpireReader(g.reader),
    lambda g: TakeNamedHold("n", g.rng.choice("ab"), g.since, LEASE_S),
    lambda g: RenewReader("name:n", g.rng.choice("ab"), advance_to=g.since),
    lambda g: RegisterCritical("c", g.rng.randrange(3)),
    lambda g: DowngradeCritical("c", g.rng.randrange(3), g.rng.randrange(3), g.since),
    lambda g: ReleaseCritical("c", g.rng.randrange(3)),
    lambda g: SetRetention(*g.rng.choice([(None, None), (0, None), (3, None), (None, 0.0), (None, 9.0)])),
    lambda g: ApplyRetention(g.rng.random() < 0.5),
    lambda g: ForgetHistory(Antichain(g.rng.randrange(30))),
]
CONSUMERS: list[Draw] = [
    Game.opening,
    lambda g: Acknowledge((g.ack,), g.token, g.rng.random() < 0.3),
    lambda g: Acknowledge((g.ack, g.ack), g.token, g.rng.random() < 0.3),
    lambda g: BeatSubscription(g.ack.key, g.ack.owner),
    lambda g: LeaveSubscription(g.ack, g.token),
    lambda g: DropSubscription(g.rng.choice("st")) if g.rng.random() < 0.3 else Game.opening(g),
]
WRITES: list[Draw] = [
    lambda g: RegisterWriter(g.writer, LEASE_S),
    Game.append,
    Game.append,
    Game.replicated,
    Game.write,
    Game.closing,
]
MAINTENANCE: list[Draw] = [
    Game.compaction,
    Game.compaction,
    Game.rollup,
    Game.collection,
    lambda g: HeartbeatWriter(g.writer),
    lambda g: ExpireWriter(g.writer),
    lambda g: EndCollection(g.rng.randrange(g.history.live.seqno + 1), g.writer),
    lambda g: ReleaseClaim(g.writer, g.rng.choice([COLLECTION, *g.history.live.batches])),
    lambda g: ForgetTransactions(["a", "b"], g.history.now - g.rng.randrange(9)),
    lambda g: MarkConsumed(g.staged),
    Game.tag,
    Game.tag,
    lambda g: DropTag(g.rng.choice("uv")),
]
OVER: list[Draw] = [lambda g: ExpireOverdue(), lambda g: Occupy(g.writer), lambda g: MarkDeleted()]
LIVE = HOLDS * 2 + CONSUMERS * 2 + WRITES * 6 + MAINTENANCE * 2 + OVER[:2] + [Game.rare]


def play(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts += Game(seed).play()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    return counts
