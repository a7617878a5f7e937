"""Goal: after updates, seals, drains, trims and merges in any order, reads agree with a plain list of
updates; and the promises about batches hold at every moment."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopersist.indexed import arrangement as rules
from aiopersist.indexed.arrangement import Compaction, Drain, Trim
from aiopersist.state import streams_invariants as invariants
from aiopersist.state.record import HollowPart, decoder, encode
from aiopersist.state.streams import Arrangement, Rearrangement, TraceBatch, UnsealedBatch, rearranged

Update = tuple[str, int, int]
"""Key, time, diff."""


class Blobs:
    """The data of batches, by the keys of their parts."""

    def __init__(self) -> None:
        self.held: dict[str, list[Update]] = {}

    def put(self, updates: list[Update]) -> tuple[HollowPart, ...]:
        if not updates:
            return ()
        key = f"blob{len(self.held)}"
        self.held[key] = updates
        return (HollowPart(key=key, size=1, rows=len(updates), checksum=""),)

    def read(self, *batches: UnsealedBatch | TraceBatch) -> list[Update]:
        return [u for batch in batches for part in batch.parts for u in self.held[part.key or ""]]


def consolidated(updates: list[Update], since: int = 0) -> list[Update]:
    sums: Counter[tuple[str, int]] = Counter()
    for key, time, diff in updates:
        sums[key, max(time, since)] += diff
    return sorted((*at, diff) for at, diff in sums.items() if diff)


class Game:
    """An arrangement, its data, and beside it the plain list."""

    def __init__(self) -> None:
        self.now = Arrangement()
        self.blobs = Blobs()
        self.written: list[Update] = []
        self.seqno = 0
        self.rewritten = 0

    def make(self, changes: Rearrangement | None) -> None:
        assert changes is not None
        self.now = rearranged(changes, self.now)
        assert invariants.broken(self.now) == []
        plan = rules.contents(self.now)
        unsealed = [u for u in self.blobs.read(*plan.unsealed) if u[1] >= plan.trace_upper]
        read = self.blobs.read(*plan.trace) + unsealed
        assert consolidated(read, plan.since) == consolidated(self.written, plan.since)

    def write(self, updates: list[Update]) -> None:
        """As a commit of one write."""
        self.seqno += 1
        if not updates:
            return
        self.written += updates
        self.make(rules.appended(self.now, self.batch(updates, self.now.seqno, self.seqno)))

    def batch(self, updates: list[Update], lower: int, upper: int) -> UnsealedBatch:
        times = [time for _, time, _ in updates]
        return UnsealedBatch(
            seqno_lower=lower,
            seqno_upper=upper,
            time_least=min(times),
            time_greatest=max(times),
            parts=self.blobs.put(updates),
        )

    def drain(self, plan: Drain | None) -> bool:
        if plan is None:
            return False
        assert plan.upper == self.now.seal
        read = [u for u in self.blobs.read(*plan.batches) if plan.lower <= u[1] < plan.upper]
        if not read:
            return False
        updates = consolidated(read)
        batch = TraceBatch(
            lower=plan.lower,
            upper=plan.upper,
            since=0,
            level=0,
            updates=len(updates),
            parts=self.blobs.put(updates),
        )
        self.make(rules.drained(self.now, plan, batch))
        return True

    def evict(self) -> bool:
        changes = rules.evicted(self.now)
        if changes is not None:
            self.make(changes)
        return changes is not None

    def trim(self, plan: Trim | None) -> bool:
        if plan is None:
            return False
        kept = [u for u in self.blobs.read(plan.batch) if u[1] >= plan.lower]
        self.make(
            rules.trimmed(self.now, plan, self.batch(kept, plan.batch.seqno_lower, plan.batch.seqno_upper))
        )
        return True

    def merged(self, plan: Compaction) -> TraceBatch:
        read = self.blobs.read(plan.older, plan.younger)
        self.rewritten += len(read)
        updates = consolidated(read, plan.since)
        return TraceBatch(
            lower=plan.older.lower,
            upper=plan.younger.upper,
            since=plan.since,
            level=rules.level_after(plan, len(updates)),
            updates=len(updates),
            parts=self.blobs.put(updates),
        )

    def compact(self, plan: Compaction | None) -> bool:
        if plan is not None:
            self.make(rules.compacted(self.now, plan, self.merged(plan)))
        return plan is not None

    def settle(self) -> None:
        """Every step, until there is none."""
        while (
            self.drain(rules.to_drain(self.now))
            or self.evict()
            or self.trim(rules.to_trim(self.now))
            or self.compact(rules.to_compact(self.now))
        ):
            pass


KEYS = ("a", "b", "c")


def play(seed: int, moves: int) -> Game:
    chance, game = random.Random(seed), Game()
    held: Compaction | None = None  # in flight
    for _ in range(moves):
        seal = game.now.seal
        match chance.choice(["write"] * 4 + ["seal", "since", "drain", "evict", "trim", "ask", "answer"]):
            case "write":
                times = [seal + chance.randrange(8) for _ in range(chance.choice([0, 1, 1, 4]))]
                game.write([(chance.choice(KEYS), time, chance.choice([1, 1, -1])) for time in times])
            case "seal":
                game.make(rules.sealed(game.now, seal + chance.choice([0, 1, 1, 3, 9])))
            case "since":
                since = game.now.since + chance.choice([0, 1, 2, 5])
                game.make(rules.compaction_allowed(game.now, min(since, seal + 5)))
            case "drain":
                game.drain(rules.to_drain(game.now))
            case "evict":
                game.evict()
            case "trim":
                game.trim(rules.to_trim(game.now))
            case "ask":
                held = rules.to_compact(game.now)
            case "answer" if held is not None:
                changes = rules.compacted(game.now, held, game.merged(held))
                if changes is not None:
                    game.make(changes)
    return game


@pytest.mark.parametrize("seed", range(60))
def test_any_steps_in_any_order_change_nothing_that_is_read(seed: int) -> None:
    game = play(seed, 150)
    game.make(rules.sealed(game.now, game.now.seal + 20))
    game.make(rules.compaction_allowed(game.now, max(game.now.since, game.now.seal)))
    game.settle()
    levels = [batch.level for batch in game.now.trace.values()]
    assert len(set(levels)) == len(levels)  # they fall strictly: all are merged that can be
    assert not game.now.unsealed or game.now.trace_upper < game.now.seal


def test_the_trace_stays_small_and_so_does_the_work() -> None:
    """Goal: batches of one distinct update each: as many as there are bits, each rewritten once per bit."""
    game, n = Game(), 256
    for time in range(n):
        game.write([(f"k{time:04}", time, 1)])
        game.make(rules.sealed(game.now, time + 1))
        game.make(rules.compaction_allowed(game.now, time + 1))
        game.settle()
        assert len(game.now.trace) <= (time + 1).bit_length()
    assert [batch.level for batch in game.now.trace.values()] == [8]
    assert game.rewritten == n * 8


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=6), st.data())
def test_unsealed_batches_of_an_interval(ranges: list[tuple[int, int]], data: Any) -> None:
    """Goal: all that may hold a time of the interval, and no other."""
    game = Game()
    for least, more in ranges:
        game.write([("a", least, 1), ("b", least + more, 1)])
    lower = data.draw(st.integers(0, 14))
    upper = data.draw(st.none() | st.integers(lower, 15))
    found = rules.unsealed_between(game.now, lower, upper)
    assert found == [
        batch
        for batch in game.now.unsealed.values()
        if any(
            batch.time_least <= time <= batch.time_greatest
            for time in range(lower, 20 if upper is None else upper)
        )
    ]


def unsealed(lower: int, upper: int, least: int = 0, greatest: int = 0, rows: int = 1) -> UnsealedBatch:
    parts = (HollowPart(key="k", size=1, rows=rows, checksum=""),) if rows else ()
    return UnsealedBatch(
        seqno_lower=lower, seqno_upper=upper, time_least=least, time_greatest=greatest, parts=parts
    )


def trace(lower: int, upper: int, *, since: int = 0, level: int = 0, updates: int = 1) -> TraceBatch:
    return TraceBatch(lower=lower, upper=upper, since=since, level=level, updates=updates)


def arranged(*batches: TraceBatch, seal: int = 10, since: int = 10, seqno: int = 0) -> Arrangement:
    return Arrangement(seal=seal, since=since, seqno=seqno, trace={batch.lower: batch for batch in batches})


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        pytest.param(unsealed(3, 4, 5, 5, rows=0), r"\[3, 4\) is empty", id="empty"),
        pytest.param(unsealed(2, 4, 5, 5), "does not begin at seqno 3", id="too early"),
        pytest.param(unsealed(4, 5, 5, 5), "does not begin at seqno 3", id="too late"),
        pytest.param(unsealed(3, 3, 5, 5), "does not begin at seqno 3", id="no command"),
        pytest.param(unsealed(3, 4, 3, 9), r"holds time 3, .* upper is \{4\}", id="in the trace"),
    ],
)
def test_batches_that_cannot_be_appended(batch: UnsealedBatch, why: str) -> None:
    now = arranged(trace(0, 4), seqno=3)
    with pytest.raises(ValueError, match=why):
        rules.appended(now, batch)
    assert rearranged(rules.appended(now, unsealed(3, 7, 4, 9)), now).seqno == 7


def test_an_interval_may_be_empty_and_not_reversed() -> None:
    now = rearranged(rules.appended(Arrangement(), unsealed(0, 1, 2, 5)), Arrangement())
    assert rules.unsealed_between(now, 3, 3) == []
    with pytest.raises(ValueError, match=r"upper \{2\} is before lower \{3\}"):
        rules.unsealed_between(now, 3, 2)


def test_frontiers_do_not_go_back() -> None:
    now = Arrangement(seal=5, since=7)
    assert rules.sealed(now, 4) is None
    assert rules.compaction_allowed(now, 6) is None
    assert rearranged(rules.sealed(now, 5) or Rearrangement(), now).seal == 5
    assert rearranged(rules.compaction_allowed(now, 9) or Rearrangement(), now).since == 9  # beyond seal


def test_nothing_is_drained_where_nothing_is() -> None:
    """Goal: the trace stays behind where no unsealed batch can hold anything; what cancels leaves a batch."""
    now = Arrangement(seal=3)
    assert rules.to_drain(now) is None
    now = rearranged(rules.appended(now, unsealed(0, 1, 3, 5)), now)
    assert rules.to_drain(now) is None
    now = rearranged(rules.sealed(now, 4) or Rearrangement(), now)
    plan = rules.to_drain(now)
    assert plan == Drain(0, 4, (unsealed(0, 1, 3, 5),))
    after = rearranged(rules.drained(now, plan, trace(0, 4, updates=0)) or Rearrangement(), now)
    assert (after.trace_upper, rules.to_drain(after)) == (4, None)
    assert rules.drained(after, plan, trace(0, 4)) is None
    with pytest.raises(ValueError, match="is not what"):
        rules.drained(now, plan, trace(0, 3))


def test_evict_and_trim() -> None:
    now = Arrangement(
        seal=4,
        seqno=9,
        unsealed={
            b.seqno_lower: b for b in (unsealed(0, 1, 0, 3), unsealed(1, 2, 3, 4), unsealed(2, 9, 4, 6))
        },
        trace={0: trace(0, 4)},
    )
    assert rules.evicted(now) == Rearrangement(drop_unsealed=(0,))
    plan = rules.to_trim(now)
    assert plan == Trim(unsealed(1, 2, 3, 4), 4)
    after = rearranged(rules.trimmed(now, plan, unsealed(1, 2, 4, 4)) or Rearrangement(), now)
    assert (after.unsealed[1], rules.to_trim(after)) == (unsealed(1, 2, 4, 4), None)
    assert rules.trimmed(after, plan, unsealed(1, 2, 4, 4)) is None


@pytest.mark.parametrize(
    ("levels", "since", "pair"),
    [
        pytest.param([0, 0, 0], 9, 0, id="the oldest pair first"),
        pytest.param([1, 0, 0], 9, 1, id="of equal level"),
        pytest.param([2, 1, 0], 9, None, id="none is equal"),
        pytest.param([1, 0, 0], 3, 1, id="since is at the upper of the younger"),
        pytest.param([1, 0, 0], 2, None, id="since is before it"),
    ],
)
def test_what_is_merged(levels: list[int], since: int, pair: int | None) -> None:
    batches = [trace(at, at + 1, level=level) for at, level in enumerate(levels)]
    found = rules.to_compact(arranged(*batches, since=since))
    assert found == (None if pair is None else Compaction(batches[pair], batches[pair + 1], since))


@pytest.mark.parametrize(
    ("older", "younger", "updates", "rises"),
    [
        (4, 4, 5, True),
        (4, 4, 4, False),
        (4, 9, 9, False),
        (9, 4, 9, False),
        (9, 4, 10, True),
        (0, 0, 0, False),
        (0, 0, 1, True),
    ],
)
def test_when_a_level_rises(older: int, younger: int, updates: int, rises: int) -> None:
    """Goal: only if the result holds more than each of its parents."""
    plan = Compaction(trace(0, 1, level=3, updates=older), trace(1, 2, level=3, updates=younger), 5)
    assert rules.level_after(plan, updates) == 3 + rises


def test_a_response_that_no_longer_fits_changes_nothing() -> None:
    one, two, three = trace(0, 1), trace(1, 2), trace(2, 3)
    now = arranged(one, two, three)
    plan = Compaction(one, two, 10)
    result = trace(0, 2, since=10, level=1, updates=2)
    after = rearranged(rules.compacted(now, plan, result) or Rearrangement(), now)
    assert list(after.trace.values()) == [result, three]
    assert rules.compacted(after, plan, result) is None
    assert rules.compacted(arranged(one, trace(1, 2, updates=2), three), plan, result) is None
    for other in (trace(0, 3), trace(0, 2, since=9, level=1, updates=2), trace(0, 2, since=10, updates=2)):
        with pytest.raises(ValueError, match="is not what"):
            rules.compacted(now, plan, other)


BROKEN = {
    "seqno_intervals_are_in_order": Arrangement(seqno=1, unsealed={0: unsealed(0, 2)}),
    "bounds_of_times_are_bounds": Arrangement(seqno=1, unsealed={0: unsealed(0, 1, 5, 4)}),
    "trace_is_contiguous": arranged(trace(0, 1), trace(2, 3)),
    "trace_is_sealed": arranged(trace(0, 11)),
    "levels_fall": arranged(trace(0, 1), trace(1, 2, level=1)),
    "batches_follow_since": arranged(trace(0, 1, since=11)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name: str) -> None:
    assert invariants.broken(BROKEN[name]) == [name]


def test_an_arrangement_is_json() -> None:
    game = play(3, 80)
    assert decoder(Arrangement)(encode(game.now)) == game.now
