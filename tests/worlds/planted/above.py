"""Bugs of tables, subscriptions, listens, `Indexed` and stashes."""

from collections.abc import Sequence
from typing import Any

import pytest

from aiopersist.base import frontier
from aiopersist.base.frontier import Antichain
from aiopersist.data.updates import times
from aiopersist.indexed import maintenance
from aiopersist.read import listen, shared_read
from aiopersist.stash import memory, session
from aiopersist.stash.model import Fence
from tests.subscription import test_planted as of_subscriptions
from tests.table import test_planted as of_tables
from tests.worlds.planted import Bug

TABLES = "counter putter mover guard biller sharer"
CONSUMERS = "biller sharer relay"
NOBODY = "nobody"  # no world can show it; other tests do


def a_cursor_that_is_too_far(patch: pytest.MonkeyPatch) -> None:
    """Who resumes by it misses a time."""
    encode = listen.encode

    def further(cursor: Any) -> str:
        time = cursor.frontier.time
        return encode(cursor._replace(frontier=Antichain(time + 1) if time else cursor.frontier))

    patch.setattr(listen, "encode", further)


def a_position_that_is_never_passed(patch: pytest.MonkeyPatch) -> None:
    """A step that was acknowledged is acknowledged once more, with what is written beside it."""
    from aiopersist.state import subscriptions
    from aiopersist.subscription import consumer

    acknowledged = subscriptions.acknowledged

    def again(state: Any, acks: Any, now: float, token: str, *, is_strict: bool) -> Any:
        return acknowledged(state, acks, now, token, is_strict=False)

    patch.setattr(subscriptions, "acknowledged", again)
    patch.setattr("aiopersist.state.writing.acknowledged", again)
    patch.setattr(consumer.Consumer, "check_not_passed", lambda self, mark: None)


def a_subscription_that_begins_behind_the_contents(patch: pytest.MonkeyPatch) -> None:
    from aiopersist.state import subscriptions
    from aiopersist.state.position import Position

    patch.setattr(subscriptions, "_begun", lambda start, state: Position(frontier=state.upper))


def a_write_before_the_seal(patch: pytest.MonkeyPatch) -> None:
    """A stream takes updates at times that are sealed."""
    patch.setattr(times.Seen, "first_below", lambda self, bound: None)


def a_drain_that_loses(patch: pytest.MonkeyPatch) -> None:
    """Sealed updates move to the trace without the last part."""
    drain = maintenance.work.drain

    async def fewer(*args: Any) -> Any:
        output = await drain(*args)
        if output is not None:
            object.__setattr__(
                output, "batch", output.batch.replace(parts=output.batch.parts[:-1], updates=0)
            )
        return output

    patch.setattr(maintenance.work, "drain", fewer)


def a_trim_that_loses(patch: pytest.MonkeyPatch) -> None:
    """What a drain leaves of an unsealed batch has no updates."""
    trim = maintenance.work.trim

    async def fewer(*args: Any) -> Any:
        return (await trim(*args)).replace(parts=())

    patch.setattr(maintenance.work, "trim", fewer)


def a_stash_without_a_fence(patch: pytest.MonkeyPatch) -> None:
    """An opener that was taken over goes on writing, and reading."""
    patch.setattr(Fence, "__eq__", lambda self, other: True)
    patch.setattr(Fence, "__ne__", lambda self, other: False)


def revisions_of_a_stash_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A change is made though another one came between."""
    patch.setattr(memory, "holds", lambda change, there, version: not change.created)


def a_stash_forgets_what_it_sent(patch: pytest.MonkeyPatch) -> None:
    """A change with a lost answer is sent again under another token."""
    send = session.StashSession._send

    async def fresh(self: Any, opener: Any, change: Any, token: str) -> Any:
        return await send(self, opener, change, self.runtime.token())

    patch.setattr(session.StashSession, "_send", fresh)


def a_stash_believes_that_nothing_landed(patch: pytest.MonkeyPatch) -> None:
    """A change with a lost answer did not happen."""

    async def landed(self: Any, opener: Any, token: str, sent: bool) -> bool:
        self._token = await self.store.token(opener.id) or self._token
        return False

    patch.setattr(session.StashSession, "_landed", landed)


def a_piece_that_is_not_read(patch: pytest.MonkeyPatch) -> None:
    divide = shared_read.divide

    async def fewer(*args: Any) -> Any:
        found = await divide(*args)
        return found[:-1] or found

    patch.setattr(shared_read, "divide", fewer)


def product_times_are_in_one_order(patch: pytest.MonkeyPatch) -> None:
    """The first component decides."""
    patch.setattr(frontier, "less_equal", lambda a, b: a <= b)


def product_times_advance_to_one_element(patch: pytest.MonkeyPatch) -> None:
    """Of a since of several, the first one counts."""

    def first(table: Any, since: Any) -> Any:
        return times.advance(table, Antichain(*since.elements[:1]))

    patch.setattr("aiopersist.parts.fetch.advance", first)


def _known(area: str, plants: Sequence[Any], roles: str) -> list[Bug]:
    return [Bug(area, plant, roles) for plant in plants]


BUGS = [
    *_known("tables", of_tables.BUGS, TABLES),
    *_known("subscriptions", of_subscriptions.BUGS, CONSUMERS),
    Bug("subscriptions", a_position_that_is_never_passed, CONSUMERS),
    Bug("subscriptions", a_subscription_that_begins_behind_the_contents, CONSUMERS),
    Bug("reads", a_piece_that_is_not_read, NOBODY),
    Bug("times", product_times_are_in_one_order, NOBODY),
    Bug("times", product_times_advance_to_one_element, NOBODY),
    Bug("listens", a_cursor_that_is_too_far, "listener"),
    Bug("Indexed", a_write_before_the_seal, "streamer"),
    Bug("Indexed", a_drain_that_loses, "streamer"),
    Bug("Indexed", a_trim_that_loses, "streamer"),
    Bug("stash", a_stash_without_a_fence, "stasher"),
    Bug("stash", revisions_of_a_stash_are_not_compared, "stasher"),
    Bug("stash", a_stash_forgets_what_it_sent, "stasher"),
    Bug("stash", a_stash_believes_that_nothing_landed, "stasher"),
]
