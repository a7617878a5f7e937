"""Bugs of the short way of small appends (`write/small.py`, `commit_small`, `state/small_append.py`)."""

from typing import Any

import pytest

from aiopersist.shard import commit
from aiopersist.state.small_append import SmallAppend
from aiopersist.write import handle, small
from aiopersist.write.outcome import NotCommitted
from tests.worlds.planted import Bug

RACER = "racer"


def _small(attempts: Any) -> bool:
    return isinstance(attempts[0].command, SmallAppend)


def a_small_append_that_lost_is_told_as_done(patch: pytest.MonkeyPatch) -> None:
    """Another version took its place, and the general way is not asked."""
    commit_small = small.commit_small

    async def done(register: Any, append: SmallAppend, slot: Any) -> bool:
        before = register.state.seqno
        won = await commit_small(register, append, slot)
        return won or (register.state.seqno == before and append.lower == register.state.upper)

    patch.setattr(small, "commit_small", done)


def a_small_append_in_doubt_did_not_happen(patch: pytest.MonkeyPatch) -> None:
    """What was cancelled, or has no answer, is forgotten, not settled."""

    async def forgetful(session: Any, *args: Any) -> bool:
        try:
            return await small.append_small(session, *args)
        except BaseException:
            session.pending = session.slot.pending = None
            if session.unsettled is not None:
                session.unsettled.append.outcome = NotCommitted()
            raise

    patch.setattr(handle, "append_small", forgetful)


def a_small_append_without_an_answer_begins_anew(patch: pytest.MonkeyPatch) -> None:
    """The general way appends it, though it may have happened."""
    look = commit._look_at_all

    async def gone(attempts: Any, cause: Any) -> bool | None:
        return False if _small(attempts) else await look(attempts, cause)

    patch.setattr(commit, "_look_at_all", gone)


def the_upper_of_a_small_append_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    """It is written wherever the shard is."""
    version = SmallAppend.version

    def anywhere(self: SmallAppend, state: Any, *args: Any) -> Any:
        lower, self.lower = self.lower, state.upper
        try:
            return version(self, state, *args)
        finally:
            self.lower = lower

    patch.setattr(SmallAppend, "version", anywhere)


def a_small_append_in_memory_only(patch: pytest.MonkeyPatch) -> None:
    """It is told before the store has it: a crash loses it."""
    write = commit._write

    async def hasty(attempts: Any) -> bool:
        if not _small(attempts):
            return await write(attempts)
        (attempt,) = attempts
        attempt.register.stack.supervisor.spawn(commit._statement(attempts), "write a version")
        attempt.register.committed(attempt.before, attempt.after)
        return True

    patch.setattr(commit, "_write", hasty)


BUGS = [
    Bug("short way", a_small_append_that_lost_is_told_as_done, RACER),
    Bug("short way", a_small_append_in_doubt_did_not_happen, RACER),
    Bug("short way", a_small_append_without_an_answer_begins_anew, RACER),
    Bug("short way", the_upper_of_a_small_append_is_not_compared, RACER),
    Bug("short way", a_small_append_in_memory_only, RACER),
]
