"""Bugs of the commit loop, of settling, and of appends."""

from typing import Any
from unittest.mock import ANY

import pytest
from msgspec.structs import replace

from aiopersist.base.errors import UpperMismatch
from aiopersist.indexed import commands
from aiopersist.shard import commit
from aiopersist.shard.register import Register
from aiopersist.state import consuming, writing
from aiopersist.state.command import Keep
from aiopersist.state.once import Once
from aiopersist.write import combine, pending, session
from tests.worlds.planted import Bug

EVENTS = "writer repeater stager joint racer"
ANYWHERE = ""
RACER = "racer"


def a_lost_answer_is_a_refusal(patch: pytest.MonkeyPatch) -> None:
    """What had no answer is taken for what did not happen."""

    async def look(attempts: Any, cause: Any) -> bool:
        return False

    patch.setattr(commit, "_look_at_all", look)


def a_lost_answer_is_a_success(patch: pytest.MonkeyPatch) -> None:
    async def look(attempts: Any, cause: Any) -> bool:
        return True

    patch.setattr(commit, "_look_at_all", look)


def the_second_sending_decides(patch: pytest.MonkeyPatch) -> None:
    """Its refusal is taken for that of the first, too."""
    statement, look = commit._statement, commit._look_at_all
    refused: list[bool] = []

    async def send(attempts: Any, **how: Any) -> bool:
        refused.clear()
        if not (ours := await statement(attempts, **how)):
            refused.append(True)
        return ours

    async def look_at_all(attempts: Any, cause: Any) -> Any:
        return False if cause is None and refused else await look(attempts, cause)

    patch.setattr(commit, "_statement", send)
    patch.setattr(commit, "_look_at_all", look_at_all)


def any_version_is_ours(patch: pytest.MonkeyPatch) -> None:
    """Whose version it is that took the place is not compared."""
    patch.setattr(commit, "decode_commit", lambda data: ANY)


def a_version_is_never_ours(patch: pytest.MonkeyPatch) -> None:
    """Where a version took the place, it is another's."""
    patch.setattr(commit, "decode_commit", lambda data: None)


def a_refusal_by_an_old_state(patch: pytest.MonkeyPatch) -> None:
    """No look at a fresh state comes before it."""
    planned = commit._planned

    async def at_once(attempts: Any, registers: Any, *, final: bool) -> Any:
        return await planned(attempts, registers, final=True)

    patch.setattr(commit, "_planned", at_once)


def a_statement_for_each_shard(patch: pytest.MonkeyPatch) -> None:
    """Several shards are written one after the other."""

    async def one_by_one(attempts: Any) -> bool:
        for a in attempts:
            if not await a.register.stack.consensus.compare_and_set(a.register.key, a.expected, a.data):
                return False
        return True

    patch.setattr(commit, "_sending", one_by_one)


def no_token_is_a_proof(patch: pytest.MonkeyPatch) -> None:
    """An append whose version was truncated did not happen, whatever the state says."""
    patch.setattr(writing, "token_is_there", lambda state, writer, token: False)


def a_vacant_version_stays_vacant(patch: pytest.MonkeyPatch) -> None:
    """Settling takes what did not happen yet for what never will."""

    async def settle(attempt: Any) -> bool:
        return bool(await commit._look(attempt, None))

    patch.setattr(commit, "_settle", settle)


def an_occupation_that_is_not_written(patch: pytest.MonkeyPatch) -> None:
    """Settling believes that it took the version."""
    look = commit._look

    async def decided(attempt: Any, cause: Any) -> Any:
        found = await look(attempt, cause)
        return False if found is None and attempt.statement is not None and cause is None else found

    patch.setattr(commit, "_look", decided)


def settling_believes_any_statement(patch: pytest.MonkeyPatch) -> None:
    """The refusal of the last sending is that of all."""
    settle = commit._settle

    async def trusting(attempt: Any) -> bool:
        attempt.sent = 1
        return await settle(attempt)

    patch.setattr(commit, "_settle", trusting)


def a_cancelled_append_did_not_happen(patch: pytest.MonkeyPatch) -> None:
    """Its attempt is forgotten, not settled."""

    async def forget(slot: Any) -> None:
        slot.pending = None

    patch.setattr(session, "settle", forget)
    patch.setattr(pending.PendingAppend, "answer", lambda self: pending.NotCommitted())


def parts_in_doubt_are_deleted(patch: pytest.MonkeyPatch) -> None:
    """A cancelled append deletes what it uploaded, though its version may still be written."""
    release = pending.PendingAppend.release

    def hasty(self: Any) -> Any:
        if self.outcome is None:
            return [task for upload in self.uploads if (task := upload.discard()) is not None]
        return release(self)

    patch.setattr(pending.PendingAppend, "release", hasty)


def leases_by_the_own_clock(patch: pytest.MonkeyPatch) -> None:
    """Now is what the machine's clock says, not the store's."""

    async def now(self: Any) -> float:
        return float(self.stack.runtime.wall())

    patch.setattr(Register, "now", now)


def an_append_that_came_late_is_told_as_done(patch: pytest.MonkeyPatch) -> None:
    """Where another append came first, nothing is written, and nobody is told."""
    call = writing.AppendHollow.__call__

    def told(self: Any, state: Any, context: Any) -> Any:
        found = call(self, state, context)
        if isinstance(found, Keep) and isinstance(found.error, UpperMismatch):
            return Keep(result=writing.Appended(state.upper, wrote=True))
        return found

    patch.setattr(writing.AppendHollow, "__call__", told)


def an_append_in_memory_only(patch: pytest.MonkeyPatch) -> None:
    """It is told before the store has it: a crash loses it."""
    write = commit._write

    async def hasty(attempts: Any, **how: Any) -> bool:
        if len(attempts) > 1 or not isinstance(attempts[0].command, writing.AppendHollow):
            return await write(attempts, **how)
        (attempt,) = attempts
        attempt.register.stack.supervisor.spawn(commit._sending(attempts), "write a version")
        attempt.register.committed(attempt.before, attempt.after, attempt.slot)
        return True

    patch.setattr(commit, "_write", hasty)


def an_append_without_an_answer_begins_anew(patch: pytest.MonkeyPatch) -> None:
    """It is made again, though it may have happened."""
    look = commit._look_at_all

    async def gone(attempts: Any, cause: Any) -> bool | None:
        is_append = isinstance(attempts[0].command, writing.AppendHollow)
        return False if is_append else await look(attempts, cause)

    patch.setattr(commit, "_look_at_all", gone)


def the_upper_of_an_append_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    """It is written wherever the shard is."""
    call = writing.AppendHollow.__call__

    def anywhere(self: Any, state: Any, context: Any) -> Any:
        batch = self.batch.replace(lower=state.upper)
        return call(replace(self, batch=batch), state, context)

    patch.setattr(writing.AppendHollow, "__call__", anywhere)


def a_batch_that_is_never_spent(patch: pytest.MonkeyPatch) -> None:
    """A batch that was handed over is appended by each that has it."""
    patch.setattr(consuming, "is_consumed", lambda state, writer, batch: False)


def numbers_of_transactions_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writing, "repeated", lambda state, transactions: frozenset())


def ids_are_not_looked_up(patch: pytest.MonkeyPatch) -> None:
    """An append does not ask whether its id of `once=` is recorded."""
    patch.setattr(Once, "done_at", lambda self, known, now: None)


def a_call_that_its_group_leaves_out(patch: pytest.MonkeyPatch) -> None:
    """Of the writes of one handle that wait, one commit has the first two only, and answers all."""
    append_group = combine.Combiner._append_group

    async def shorter(self: Any, group: Any, upper: Any) -> Any:
        return await append_group(self, group[:2], upper)

    patch.setattr(combine.Combiner, "_append_group", shorter)


def replicas_append_what_is_there(patch: pytest.MonkeyPatch) -> None:
    """Definite data that the shard has is not cut off."""
    patch.setattr(writing, "truncate", lambda batch, lower: batch.replace(lower=lower))


def an_owner_that_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    """An instance of an `Indexed` that was taken over goes on."""
    patch.setattr(commands, "_owner", lambda state: ANY)


BUGS = [
    Bug("commit loop", a_lost_answer_is_a_refusal, ANYWHERE),
    Bug("commit loop", a_lost_answer_is_a_success, ANYWHERE),
    Bug("commit loop", the_second_sending_decides, ANYWHERE),
    Bug("commit loop", any_version_is_ours, ANYWHERE),
    Bug("commit loop", a_version_is_never_ours, ANYWHERE),
    Bug("commit loop", a_refusal_by_an_old_state, ANYWHERE),
    Bug("commit loop", a_statement_for_each_shard, ANYWHERE),
    Bug("commit loop", no_token_is_a_proof, EVENTS),
    Bug("commit loop", an_append_that_came_late_is_told_as_done, ANYWHERE),
    Bug("appends", an_append_in_memory_only, RACER),
    Bug("appends", an_append_without_an_answer_begins_anew, RACER),
    Bug("appends", the_upper_of_an_append_is_not_compared, RACER),
    Bug("settling", a_vacant_version_stays_vacant, ANYWHERE),
    Bug("settling", an_occupation_that_is_not_written, ANYWHERE),
    Bug("settling", settling_believes_any_statement, ANYWHERE),
    Bug("settling", a_cancelled_append_did_not_happen, "writer"),
    Bug("settling", parts_in_doubt_are_deleted, "writer"),
    Bug("holds", leases_by_the_own_clock, ANYWHERE),
    Bug("batches", a_batch_that_is_never_spent, "stager"),
    Bug("transactions", numbers_of_transactions_are_not_compared, "repeater"),
    Bug("transactions", ids_are_not_looked_up, "repeater counter mover evolver heir"),
    Bug("group commit", a_call_that_its_group_leaves_out, "writer"),
    Bug("appends", replicas_append_what_is_there, "replica"),
    Bug("Indexed", an_owner_that_is_not_compared, "streamer"),
]
