"""Goal: two openings that take a subscription over from each other, in all orders of their commands on the
real state, to a bound: what is written with its acknowledgement is written once, without a gap, and by the
owner alone.

Each rule is needed: without it a path is found on which that is not so."""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from aiopersist.base.frontier import Antichain
from aiopersist.shard.catalog import ShardId
from aiopersist.state.command import Commit, Context
from aiopersist.state.diff import apply, diff_of
from aiopersist.state.lifecycle import Create
from aiopersist.state.model import State
from aiopersist.state.position import Position
from aiopersist.state.subscriptions import Ack, Acknowledge, LeaveSubscription, OpenSubscription
from aiopersist.state.writing import CloseTo
from tests.subscription import test_planted as planted
from tests.support.schemas import SCHEMA
from tests.worlds.planted import above

SHARD = ShardId("s00000000-0000-4000-8000-000000000001")
NAME = "sub"
NOW = Context(now=1.7e9)
UPPER_MAX = 2
STATES_MAX = 200_000


class Consumer(NamedTuple):
    """One process that opens the subscription, again and again."""

    openings: int = 0
    owner: str | None = None
    begun: int = 0
    """Where it reads on."""
    read: int | None = None
    """How far it has read a step that it has not acknowledged."""


class World(NamedTuple):
    """A state, the consumers, and the steps that were written: from where, to where, by which opening."""

    state: State
    consumers: tuple[Consumer, Consumer]
    written: tuple[tuple[int, int, str], ...] = ()
    owners: tuple[str, ...] = ()
    """All openings, in order."""

    @property
    def key(self) -> Any:
        record = self.state.subscriptions.get(NAME)
        position = record and (record.position.frontier.time, record.owner, record.token)
        return self.state.upper.time, position, self.consumers, self.written


def changed(state: State | None, command: Any) -> tuple[State | None, Any]:
    """The state after the command, and its result; `None` if it is refused."""
    outcome = command(state, NOW)
    if not isinstance(outcome, Commit):
        return (None, outcome.error) if outcome.error is not None else (state, outcome.result)
    return apply(diff_of(outcome.changes, state, commit="c", at=NOW.now), state), outcome.result


def begun() -> World:
    state, _ = changed(None, Create(SHARD, SCHEMA.to_record(), Antichain(0)))
    assert state is not None
    return World(state, (Consumer(), Consumer()))


def following(world: World, openings: int) -> Iterator[World]:
    """All worlds after one step more."""
    if (upper := world.state.upper.time) < UPPER_MAX:  # type: ignore[operator]
        state, _ = changed(world.state, CloseTo(Antichain(upper + 1)))  # type: ignore[operator]
        yield world._replace(state=state)
    for number, one in enumerate(world.consumers):
        if one.openings < openings:
            yield from opened(world, number, one)
        if one.owner is not None:
            if one.read is None and one.begun < upper:  # type: ignore[operator]
                yield put(world, number, one._replace(read=upper))
            if one.read is not None:
                yield from acknowledged(world, number, one)
            ack = Ack(NAME, one.owner, Position(frontier=Antichain(one.begun)))
            state, _ = changed(world.state, LeaveSubscription(ack, f"left {one.owner}"))
            yield put(world._replace(state=state), number, one._replace(owner=None, read=None))


def put(world: World, number: int, one: Consumer) -> World:
    consumers = list(world.consumers)
    consumers[number] = one
    return world._replace(consumers=(consumers[0], consumers[1]))


def opened(world: World, number: int, one: Consumer) -> Iterator[World]:
    owner = f"{number}.{one.openings}"
    start = Position(frontier=Antichain(0))
    state, record = changed(world.state, OpenSubscription(NAME, None, owner, 60.0, None, start))
    assert state is not None, record
    at = record.position.frontier.time
    after = world._replace(state=state, owners=(*world.owners, owner))
    yield put(after, number, Consumer(one.openings + 1, owner, at))


def acknowledged(world: World, number: int, one: Consumer) -> Iterator[World]:
    """What it made of the step is written in the same commit; or it is refused, and ends."""
    assert one.owner is not None and one.read is not None
    ack = Ack(NAME, one.owner, Position(frontier=Antichain(one.read)))
    command = Acknowledge((ack,), f"{one.owner} {one.read}", is_strict=True)
    state, _ = changed(world.state, command)
    if state is None:
        yield put(world, number, one._replace(owner=None, read=None))
        return
    written = (*world.written, (one.begun, one.read, one.owner))
    after = world._replace(state=state, written=written)
    yield put(after, number, one._replace(begun=one.read, read=None))
    yield put(after, number, one._replace(read=one.read))  # its answer was lost: it sends it again


def check(world: World) -> None:
    """See the goal."""
    ends = [0, *(to for _, to, _ in world.written)]
    begins = [begin for begin, _, _ in world.written]
    assert begins == ends[:-1], f"written twice, or not: {world.written}"
    order = [world.owners.index(owner) for _, _, owner in world.written]
    assert order == sorted(order), f"written by an opening that was taken over: {world.written}"
    record = world.state.subscriptions.get(NAME)
    if record is not None:
        assert record.position.frontier.time == ends[-1], f"at {record.position}, written {world.written}"


def explored(openings: int) -> int:
    """How many worlds there are, all of which are checked."""
    first = begun()
    seen, left = {first.key}, deque([first])
    while left:
        for world in following(left.popleft(), openings):
            if world.key in seen:
                continue
            check(world)
            seen.add(world.key)
            left.append(world)
            assert len(seen) < STATES_MAX
    return len(seen)


def test_a_step_is_written_once_by_its_owner() -> None:
    worlds = explored(2)
    print(f"{worlds} worlds")
    assert worlds > 100


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_step_is_written_once_by_its_owner_in_larger_models() -> None:
    worlds = explored(4)
    print(f"{worlds} worlds")
    assert worlds > 1000


WITHOUT = [
    planted.a_take_over_that_does_not_fence,
    above.a_position_that_is_never_passed,
    above.a_subscription_that_begins_behind_the_contents,
]


@pytest.mark.parametrize("plant", WITHOUT, ids=lambda plant: plant.__name__)
def test_without_a_rule_a_step_is_written_twice_or_not(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"written"):
        explored(2)
