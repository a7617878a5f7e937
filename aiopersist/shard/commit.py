"""The one loop that makes commands durable: for one shard, or for several at one moment.

1. Run each command on the newest state that is known. It says what it changes, or it refuses.
2. Read the bytes of the diffs back: a change that they leave out would be known in this process alone, and a
   version that no process can read ends the shard. This takes a sixth of an append of one row in memory, a
   twentieth on disk, and a fiftieth of an append of a hundred rows on disk.
3. Write the diffs by compare-and-set, all of them or none. This module is the only caller of
   `Consensus.compare_and_set` for shards.
4. On a mismatch, and before a refusal is raised, read the newer versions and begin again.

A small append has a shorter way (`commit_small`): its version is made in one step, of values that JSON can
say, so its bytes are not read back. It is tried once; where it is not made, or loses its race, `commit_all`
begins from the start.

Once the compare-and-set has won, nothing that follows counts as its failure: `Register.committed` notifies
the listeners and keeps the errors that they raise.

**Outcomes.** An attempt writes version `e + 1`, with a commit id of its own. The statement runs in
a task of the client: when the caller is cancelled it stops waiting, and the statement goes on. Where the
answer is lost, the attempt is *settled* before its slot does anything else:
- Version `e + 1` exists: its commit id says whether it is ours.
- It is vacant: nothing is known, since the statement may still be on its way. So the same bytes are sent
  again, to the same version, until the version exists. After a cancellation no caller wants the attempt any
  more: then a heartbeat (`Occupy`) takes the version, which decides the attempt as well.
- It was truncated: the state tells, if the command leaves a proof there (`happened`).

**Several shards.** Their statement needs every head to be the expected one, so any one of the versions
decides for all: if it is ours, all are; if it is another's, none is and none ever will be. So each handle can
settle its own shard by itself, and all reach the same answer."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aiopersist.ending import told
from aiopersist.errors import Corruption, Indeterminate, InvalidUsage, StorageUnavailable, Unsupported
from aiopersist.shard.attempt import Attempt, SentStatement, Slot, Unknowable
from aiopersist.shard.register import Register
from aiopersist.state.command import Command, Commit, Context
from aiopersist.state.diff import Diff, apply, decode_commit, diff_of, reads_as
from aiopersist.state.invariants import check_version
from aiopersist.state.model import State
from aiopersist.state.seal import sealed
from aiopersist.storage.consensus import Entry

if TYPE_CHECKING:
    from aiopersist.state.small_append import SmallAppend

ANSWER_S = 1.0  # settling waits so long for the statement's own answer, then it looks at the store


class Intent(NamedTuple):
    """A command for a shard, and the slot of the handle that gives it."""

    register: Register
    command: Command
    slot: Slot


async def commit(register: Register, command: Command, slot: Slot | None = None) -> Any:
    """Apply `command` and return its result, or raise its refusal. `Indeterminate` only if the store
    fails for longer than it is retried, or the version and every proof of it are gone. Then, and
    after a cancellation, the attempt stays in `slot` until `settle`; a caller that passes no slot never
    settles."""
    return (await commit_all([Intent(register, command, slot or Slot())]))[0]


async def commit_all(intents: Sequence[Intent]) -> list[Any]:
    """`commit` for different shards of one client: all commands become versions at one moment, or none does.
    The results are in the order of `intents`; a refusal names its shard."""
    in_order = sorted(intents, key=lambda intent: intent.register.shard)  # the same for all: no deadlock
    metrics, fresh = in_order[0].register.stack.metrics, False
    began = metrics.now()
    while True:
        turns: list[Register] = []
        try:
            for intent in in_order:
                if await intent.register.take_turn():
                    turns.append(intent.register)  # noqa: PERF401  # a cancelled wait releases those taken
            now = await max(intents, key=lambda intent: intent.register.is_wall).register.now()
            attempts: list[Attempt] = []
            diffs: list[Diff] = []
            results = [_run(intent, now, attempts, diffs) for intent in intents]
            refusals = [result for result in results if isinstance(result, _Rejection)]
            if refusals and fresh:
                metrics.refused()
                raise refusals[0].error
            if not refusals and not attempts:
                return results
            if not refusals and await _attempt(attempts, diffs):
                metrics.committed(began, len(attempts))
                return results
            if not refusals:
                metrics.lost_race()
        finally:
            for register in turns:
                register.release_turn()
        for intent in intents:
            await intent.register.refresh()
        fresh = True


async def commit_small(register: Register, append: "SmallAppend", slot: Slot) -> bool:
    """Try the append once. `False`: it is not written and never will be, so `commit_all` is to decide. Errors
    and cancellations are those of `commit`."""
    stack = register.stack
    began = stack.metrics.now()
    if not await register.take_turn():
        return False
    try:
        now = await register.now()
        before = register.state
        version = append.version(before, now, stack.runtime.token())
        if before is None or version is None:
            return False
        after, commit, data = version
        ours = await _write(
            [Attempt(register, append, slot, before, after, before.seqno, commit, data, None)]
        )
    finally:
        register.release_turn()
    stack.metrics.committed(began, 1) if ours else stack.metrics.lost_race()
    return ours


class _Rejection(NamedTuple):
    error: Exception


def _run(intent: Intent, now: float, attempts: list[Attempt], diffs: list[Diff]) -> Any:
    """The result of the command; the version that it needs, if any, is added to `attempts` and `diffs`."""
    register, state = intent.register, intent.register.state
    seen = register.stack.clock.seen
    context = Context(now=now, pinned=min(register.pins, default=None), seen=seen)
    outcome = intent.command(state, context)
    if isinstance(outcome, Commit):
        attempt, diff = _prepared(intent, state, outcome, now)
        attempts.append(attempt)
        diffs.append(diff)
    elif outcome.error is not None:
        outcome.error.shard_id, outcome.error.label = register.shard, register.label_of()
        return _Rejection(outcome.error)
    return outcome.result


def _prepared(intent: Intent, state: State | None, outcome: Commit, now: float) -> tuple[Attempt, Diff]:
    """The version after `state`, checked."""
    token, shard = intent.register.stack.runtime.token(), intent.register.shard
    diff, data = sealed(diff_of(outcome.changes, state, commit=token, at=now), shard)
    after = apply(diff, state)
    check_version(diff, state, after)
    expected = None if state is None else state.seqno
    return Attempt(*intent, state, after, expected, diff.commit, data, outcome.result), diff


async def _attempt(attempts: Sequence[Attempt], diffs: Sequence[Diff]) -> bool:
    """Write all these versions, and say whether they are ours. `Corruption`, before any is sent, if one
    cannot be read back."""
    for attempt, diff in zip(attempts, diffs, strict=True):
        await attempt.register.stack.compute_few(len(attempt.data), reads_as, attempt.data, diff)
    return await _write(attempts)


async def _write(attempts: Sequence[Attempt]) -> bool:
    """Write all these versions, which surely can be read, and say whether they are ours."""
    for attempt in attempts:
        attempt.slot.pending = attempt
    try:
        ours = await _send(attempts)
    except (StorageUnavailable, Unsupported):  # determinate
        _clear(attempts)
        raise
    _clear(attempts)
    if ours:
        for attempt in attempts:
            attempt.register.committed(attempt.before, attempt.after)
    return ours


def _clear(attempts: Sequence[Attempt]) -> None:
    for attempt in attempts:
        attempt.slot.pending = None


async def _send(attempts: Sequence[Attempt]) -> bool:
    """Send the statement until it is known whether the versions are these attempts'. `StorageUnavailable`
    only if they surely were not written; any other error, and a cancellation, leaves it unknown."""
    stack, sending = attempts[0].register.stack, SentStatement()
    runtime, limit_s = stack.runtime, stack.settings.retry_timeout_s
    began, delays = runtime.monotonic(), runtime.delays()
    stall = stack.stall_log(lambda: f"the outcome of a commit to {_labels(attempts)}")
    for attempt in attempts:
        attempt.sending = sending
    while True:
        answer = await _send_once(attempts, sending)
        if not isinstance(answer, bool):
            stack.metrics.unanswered()
        cause = None if isinstance(answer, bool) else answer
        decided = answer if isinstance(answer, bool) else await _look_at_all(attempts, cause)
        if decided is not None:
            return decided
        stall.note(cause or "another sending of it was refused")
        delay = next(delays)
        if limit_s is not None and runtime.monotonic() - began + delay > limit_s:
            text = f"version {attempts[0].seqno} may still be written: it was sent {sending.sent} times"
            raise Indeterminate(text, shard_id=attempts[0].register.shard) from cause
        await runtime.sleep(delay)


def _labels(attempts: Sequence[Attempt]) -> str:
    return ", ".join(attempt.register.label_of() for attempt in attempts)


async def _send_once(attempts: Sequence[Attempt], sending: SentStatement) -> bool | Exception | None:
    """The answer where it decides; else `None` or the error, and nothing is known. A second sending decides
    only if it won: its refusal, or its determinate error, says nothing about the first."""
    is_first = not sending.sent
    sending.sent += 1
    spawn = partial(attempts[0].register.stack.supervisor.spawn, name="write a version", eager=True)
    sending.statement, answer = told(partial(_statement, attempts), spawn)
    try:
        ours: bool = await answer  # a cancellation ends this wait, not the statement
    except (Corruption, InvalidUsage):
        raise
    except Exception as error:
        if is_first and isinstance(error, StorageUnavailable | Unsupported):
            raise
        return error
    return ours if ours or is_first else None


async def _statement(attempts: Sequence[Attempt]) -> bool:
    consensus = attempts[0].register.stack.consensus
    entries = [Entry(a.register.key, a.expected, a.data) for a in attempts]
    if len(entries) == 1:
        return await consensus.compare_and_set(*entries[0])
    return await consensus.compare_and_set_many(entries)


async def _look_at_all(attempts: Sequence[Attempt], cause: BaseException | None) -> bool | None:
    """`_look` at one version after the other: the first that is decided decides for all."""
    unknowable: Unknowable | None = None
    for attempt in attempts:
        try:
            if (decided := await _look(attempt, cause)) is not None:
                return decided
        except Unknowable as error:
            unknowable = error
    if unknowable is not None:
        raise unknowable
    return None


async def _look(attempt: Attempt, cause: BaseException | None) -> bool | None:
    """Whether the attempt happened, as the store shows now; `None` if its version is vacant."""
    register = attempt.register
    consensus = register.stack.consensus
    try:
        while not (versions := await consensus.scan(register.key, attempt.seqno, 1)):
            head = await consensus.head(register.key)
            seqno = None if head is None else head.seqno
            if seqno == attempt.expected:
                return None
            if seqno is None or seqno < attempt.seqno:
                state = await register.refresh()  # raises if the store was restored
                if state is not None and state.finalized:  # even the tombstone is gone
                    break
        if versions and versions[0].seqno == attempt.seqno:
            return decode_commit(versions[0].data) == attempt.commit
        state = await register.refresh()
    except StorageUnavailable as error:
        raise Indeterminate(
            f"version {attempt.seqno} may have been written: its answer was lost, then the store: {error}",
            shard_id=register.shard,
        ) from cause
    happened = getattr(attempt.command, "happened", lambda state: False)(state)
    if happened is None:
        text = f"version {attempt.seqno} may have been written: it is no longer there, nor is its writer"
        raise Unknowable(text, shard_id=register.shard) from cause
    return bool(happened)


async def settle(slot: Slot) -> Attempt | None:
    """Decide the pending attempt of `slot` and return it; `None` if there is none."""
    attempt = slot.pending
    if attempt is None:
        return None
    try:
        attempt.happened = await _settle(attempt)
    except Unknowable:
        slot.pending = None  # it is decided, and no process can find out how
        raise
    if attempt.happened:
        await attempt.register.refresh()
    slot.pending = None  # last: a caller that is cancelled before settles again
    return attempt


async def _settle(attempt: Attempt) -> bool:
    sending = attempt.sending
    if sending.statement is not None:
        await asyncio.wait([sending.statement], timeout=ANSWER_S)
        if sending.statement.done() and not sending.statement.cancelled():
            error = sending.statement.exception()
            if error is None and (sending.statement.result() or sending.sent == 1):
                return bool(sending.statement.result())
            if isinstance(error, StorageUnavailable | Unsupported) and sending.sent == 1:
                return False
    while (decided := await _look(attempt, None)) is None:
        await _occupy(attempt)
    return decided


async def _occupy(attempt: Attempt) -> None:
    """Write version `attempt.seqno` as a heartbeat, unless it is there."""
    from aiopersist.state.writing import Occupy  # a process that only reads hardly ever needs it

    register = attempt.register
    now = await register.stack.consensus.now()
    state = register.state
    if state is None or state.seqno != attempt.expected:
        await register.refresh()
        return
    occupy = Occupy(getattr(attempt.command, "writer", ""))
    outcome = occupy(state, Context(now=now))
    prepared, diff = _prepared(Intent(register, occupy, Slot()), state, outcome, now)
    await _attempt([prepared], [diff])
