"""Goal: the commit protocol, in all orders of the requests of two writers: with lost and late answers, a
cancellation, a truncation, and versions that are occupied, each append happens once or not at all, and
whoever was told its outcome was told the truth.

Each rule is needed: without it an order is found in which that is not so."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.errors import Indeterminate, UpperMismatch
from aiopersist.base.frontier import Antichain
from aiopersist.gc.collect import collect
from aiopersist.gc.rollup import write_rollup
from aiopersist.shard import commit
from aiopersist.shard.attempt import Attempt, Slot, Unknowable
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.commit import commit_all, settle
from aiopersist.shard.shard import Shard
from aiopersist.state.lifecycle import Create
from aiopersist.state.model import HollowBatch
from aiopersist.state.writing import AppendHollow, HeartbeatWriter, RegisterWriter, Write
from tests.exhaustive.kit import Cast, Model, played
from tests.support.schemas import SCHEMA
from tests.worlds.planted import commits

SHARD, OTHER = (ShardId(f"s00000000-0000-4000-8000-00000000000{n}") for n in (1, 2))
BATCH = HollowBatch(lower=Antichain(0), upper=Antichain(1), since=Antichain(0))
LEASE_S = 1e9
Act = Callable[[], Awaitable[None]]


class Appends:
    """A shard, or two, that two writers append to, and what each was told. `racing`: only one of them can
    win; else each can append, one after the other."""

    def __init__(self, model: Model, *, racing: bool) -> None:
        self.model = model
        self.racing = racing
        self.told: dict[str, bool] = {}

    async def begin(self, *writers: str, shards: int = 1) -> None:
        self.ids = [SHARD, OTHER][:shards]
        for shard_id in self.ids:
            shard = Shard(await self.stack("setup"), shard_id)
            await commit.commit(shard.register, Create(shard_id, SCHEMA.to_record(), Antichain(0)))
            for writer in writers:
                await commit.commit(shard.register, RegisterWriter(writer, LEASE_S))
        self.shards = {who: [await self.model.shard(who, shard) for shard in self.ids] for who in writers}

    async def stack(self, who: str) -> Any:
        from tests.support.internals import stack_of

        return stack_of(await self.model.client(who))

    def command(self, who: str) -> Any:
        if self.racing:
            return AppendHollow(who, f"of {who}", BATCH, {}, 1000)
        return Write(who, f"of {who}", BATCH, {}, 1000)

    def writer(self, who: str) -> Act:
        async def write() -> None:
            given = [Attempt(shard.register, self.command(who), Slot()) for shard in self.shards[who]]
            try:
                await commit_all(given)
            except UpperMismatch:
                self.told[who] = False
            except Indeterminate:
                pass
            except asyncio.CancelledError:
                await self.settle(who, given)
            else:
                self.told[who] = True

        return write

    async def settle(self, who: str, given: list[Attempt]) -> None:
        """All of its shards give the same answer."""
        try:
            attempts = [await settle(attempt.slot) for attempt in given]
        except Unknowable:
            return
        happened = {attempt is not None and bool(attempt.happened) for attempt in attempts}
        assert len(happened) == 1, "one shard was written without the other"
        self.told[who] = happened.pop()

    def truncater(self, who: str) -> Act:
        """Writes a version and a rollup of it, and collects up to it."""

        async def truncate() -> None:
            (shard,) = self.shards[who]
            await commit.commit(shard.register, HeartbeatWriter(who))
            await write_rollup(shard, who)
            await collect(shard)

        return truncate

    async def check(self) -> None:
        uppers = set()
        for shard_id in self.ids:
            state = (await self.model.shard("check", shard_id)).state
            upper = state.upper.time
            assert isinstance(upper, int)
            uppers.add(upper)
            there = {who for who, record in state.writers.items() if record.token == f"of {who}"}
            for who, happened in self.told.items():
                assert happened == (who in there), f"{who} was told {happened}, and it is {who in there}"
            assert upper == len(there), f"{len(there)} appends happened, and {upper} are there: one twice"
            assert not self.racing or upper <= 1, "both have won"
        assert len(uppers) == 1, f"one shard was written without the other: {uppers}"


def race(*faults: str, racing: bool, cancels: int = 0, shards: int = 1) -> Cast:
    """Two writers; what may happen happens to the first."""

    async def cast(model: Model) -> Any:
        scene = Appends(model, racing=racing)
        await scene.begin("a", "b", shards=shards)
        model.faults["a"], model.cancels["a"] = list(faults), cancels
        return {"a": scene.writer("a"), "b": scene.writer("b")}, scene.check

    return cast


def truncated(*faults: str, cancels: int = 0) -> Cast:
    """A writer, and a collection that truncates its version."""

    async def cast(model: Model) -> Any:
        scene = Appends(model, racing=False)
        await scene.begin("a", "t")
        model.faults["a"], model.cancels["a"] = list(faults), cancels
        return {"a": scene.writer("a"), "t": scene.truncater("t")}, scene.check

    return cast


CASTS: dict[str, Cast] = {
    "race, lost": race("lost", racing=True),
    "race, late": race("late", racing=True),
    "race, cancelled": race(racing=True, cancels=1),
    "both, lost": race("lost", racing=False),
    "both, late": race("late", racing=False),
    "both, cancelled": race(racing=False, cancels=1),
    "two shards, lost": race("lost", racing=False, shards=2),
    "truncated, lost": truncated("lost"),
}
LARGER: dict[str, Cast] = {
    "two shards, cancelled": race(racing=False, cancels=1, shards=2),
    "both, late and cancelled": race("late", racing=False, cancels=1),
    "both, all": race("lost", "late", racing=False, cancels=1),
    "two shards, all": race("lost", "late", racing=False, cancels=1, shards=2),
    "truncated, all": truncated("lost", "late", cancels=1),
}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settling looks at once: whether the answer came before is a matter of the order."""
    monkeypatch.setattr(commit, "ANSWER_S", 0.0)


@pytest.mark.parametrize("name", CASTS)
def test_all_are_told_the_truth(name: str) -> None:
    runs = played(CASTS[name])
    print(f"{runs} runs")
    assert runs > 2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LARGER)
def test_all_are_told_the_truth_in_larger_models(name: str) -> None:
    runs = played(LARGER[name])
    print(f"{runs} runs")
    assert runs > 100


WITHOUT: dict[str, tuple[Any, str]] = {
    "answers that decide": (commits.a_lost_answer_is_a_refusal, "both, lost"),
    "answers that must come": (commits.a_lost_answer_is_a_success, "both, late"),
    "a second sending": (commits.the_second_sending_decides, "both, late"),
    "commit ids": (commits.any_version_is_ours, "both, late"),
    "commit ids that are compared": (commits.a_version_is_never_ours, "both, lost"),
    "one statement": (commits.a_statement_for_each_shard, "two shards, cancelled"),
    "proofs in the state": (commits.no_token_is_a_proof, "truncated, lost"),
    "occupation": (commits.a_vacant_version_stays_vacant, "both, cancelled"),
    "occupation that is written": (commits.an_occupation_that_is_not_written, "both, cancelled"),
    "whose answer it is": (commits.settling_believes_any_statement, "both, late and cancelled"),
}


@pytest.mark.parametrize("without", WITHOUT)
def test_without_a_rule_somebody_is_told_a_lie(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name = WITHOUT[without]
    plant(monkeypatch)
    with pytest.raises((AssertionError, ap.Error), match=r"told|there|shard was written|both|restored"):
        played((CASTS | LARGER)[name])
