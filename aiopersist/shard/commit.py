"""The one loop that makes commands durable: for one shard, or for several at one moment.

1. Run each command on the newest state that is known; it says what it changes, or refuses.
2. Read the bytes of the diffs back: what they do not say would be known here alone, and a version that
   nobody can read ends the shard. A sixth of an append of one row in memory, a twentieth of one on disk, a
   fiftieth of one of a hundred rows.
3. Write the diffs by compare-and-set, all of them or none. This is the only caller of
   `Consensus.compare_and_set` for shards.
4. On a mismatch, or to be sure of a refusal, read what is new and begin again.

Once the compare-and-set has won, nothing that follows is told as its failure: who listens to versions is
told by `Register.committed`, which keeps what listeners raise.

**Outcomes.** An attempt writes version `e + 1`, with a commit id of its own. The statement runs in
a task of the client: a caller that is cancelled stops waiting, the statement goes on. Where the
answer is lost, the attempt is *settled* before its slot does anything else:
- version `e + 1` is there: its commit id says whether it is ours;
- it is vacant: nothing is known, since the statement may still be on its way. So the same bytes
  are sent again, to the same version, until it exists. After a cancellation the caller no longer
  wants it: then the version is occupied by a heartbeat (`Occupy`), which decides it as well;
- it was truncated: the state tells, if the command leaves a proof there (`happened`).

**Several shards.** Their statement needs every head as it was, so any one of the versions decides
for all: if it is ours, all are; if it is another's, none is and none ever will be. So each handle can
settle its own shard by itself, and all come to the same answer.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from aiopersist.errors import Corruption, Indeterminate, InvalidUsage, StorageUnavailable, Unsupported
from aiopersist.shard.attempt import Attempt, Sending, Slot, Unknowable
from aiopersist.shard.register import Register
from aiopersist.state.command import Command, Commit, Context
from aiopersist.state.diff import apply, decode_commit, diff_of, encode_diff, reads_as
from aiopersist.state.invariants import check_version
from aiopersist.state.model import State
from aiopersist.state.writing import Occupy
from aiopersist.storage.consensus import Entry
from aiopersist.storage.stall import StallLog

ANSWER_S = 1.0  # how long settling waits for the statement's own answer before it looks


class Intent(NamedTuple):
    """A command for a shard, and the slot of the handle that wants it."""

    register: Register
    command: Command
    slot: Slot


async def commit(register: Register, command: Command, slot: Slot) -> Any:
    """Apply `command` and return its result, or raise its refusal. `Indeterminate` only if the store
    fails for longer than it is retried, or the version and every proof of it are gone; then, and
    after a cancellation, the attempt stays in `slot` until `settle`."""
    return (await commit_all([Intent(register, command, slot)]))[0]


async def commit_all(jobs: Sequence[Intent]) -> list[Any]:
    """`commit` for different shards of one client, in one order for all callers: all of them happen at
    one moment, or none does. The results are in the order of `jobs`; a refusal names its shard."""
    fresh = False
    while True:
        turns: list[Register] = []
        try:
            for job in sorted(jobs, key=lambda job: job.register.shard) if len(jobs) > 1 else jobs:
                if await job.register.take_turn():
                    turns.append(job.register)  # noqa: PERF401  # one by one: a cancelled wait releases them
            now = await jobs[0].register.stack.consensus.now()
            attempts: list[Attempt] = []
            results = [_run(job, now, attempts) for job in jobs]
            refusals = [result for result in results if isinstance(result, _Rejection)]
            if refusals and fresh:
                raise refusals[0].error
            if not refusals and (not attempts or await _attempt(attempts)):
                return results
        finally:
            for register in turns:
                register.release_turn()
        for job in jobs:
            await job.register.refresh()
        fresh = True


class _Rejection(NamedTuple):
    error: Exception


def _run(job: Intent, now: float, attempts: list[Attempt]) -> Any:
    """The result of the command; what must be written for it is added to `attempts`."""
    register, state = job.register, job.register.state
    context = Context(now=now, pinned=min(register.pins, default=None))
    outcome = job.command(state, context)
    if isinstance(outcome, Commit):
        attempts.append(_prepared(job, state, outcome, now))
    elif outcome.error is not None:
        outcome.error.shard_id, outcome.error.label = register.shard, register.label_of()
        return _Rejection(outcome.error)
    return outcome.result


def _prepared(job: Intent, state: State | None, outcome: Commit, now: float) -> Attempt:
    """The version after `state`, checked."""
    diff = diff_of(outcome.changes, state, commit=job.register.stack.runtime.token(), at=now)
    after = apply(diff, state)
    check_version(diff, state, after)
    expected = None if state is None else state.seqno
    data = encode_diff(diff)
    return Attempt(*job, state, after, expected, diff, data, outcome.result)


async def _attempt(attempts: Sequence[Attempt]) -> bool:
    """Write all these versions; whether they are ours. `Corruption` if one cannot be read back, before any
    is sent."""
    for attempt in attempts:
        await attempt.register.stack.compute_few(len(attempt.data), reads_as, attempt.data, attempt.diff)
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
    """Whether the versions are these attempts'. `StorageUnavailable` only if it surely did not happen;
    anything else, a cancellation too, leaves it unknown."""
    stack, sending = attempts[0].register.stack, Sending()
    runtime, limit_s = stack.runtime, stack.settings.retry_timeout_s
    began, delays = runtime.monotonic(), runtime.delays()
    stall = StallLog(lambda: f"the outcome of a commit to {_labels(attempts)}", runtime)
    for attempt in attempts:
        attempt.sending = sending
    while True:
        sending.sent += 1
        sending.statement = stack.supervisor.spawn(_statement(attempts), "write a version")
        cause: Exception | None = None
        try:
            ours: bool = await asyncio.shield(sending.statement)
            if ours or sending.sent == 1:
                return ours
        except (StorageUnavailable, Unsupported) as error:
            if sending.sent == 1:
                raise
            cause = error
        except (Corruption, InvalidUsage):
            raise
        except Exception as error:
            cause = error
        decided = await _look_at_all(attempts, cause)
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


async def _statement(attempts: Sequence[Attempt]) -> bool:
    consensus = attempts[0].register.stack.consensus
    entries = [Entry(a.register.key, a.expected, a.data) for a in attempts]
    if len(entries) == 1:
        return await consensus.compare_and_set(*entries[0])
    return await consensus.compare_and_set_many(entries)


async def _look_at_all(attempts: Sequence[Attempt], cause: BaseException | None) -> bool | None:
    """Any version that can be decided decides for all."""
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
    """Whether the attempt happened, by what is there now; `None` if its version is vacant."""
    register = attempt.register
    consensus = register.stack.consensus
    try:
        while not (versions := await consensus.scan(register.key, attempt.seqno, 1)):
            head = await consensus.head(register.key)
            seqno = None if head is None else head.seqno
            if seqno == attempt.expected:
                return None
            if seqno is None or seqno < attempt.seqno:
                state = await register.refresh()  # says that the store was restored
                if state is not None and state.finalized:  # or that the shard is long gone
                    break
        if versions and versions[0].seqno == attempt.seqno:
            return decode_commit(versions[0].data) == attempt.diff.commit
        state = await register.refresh()
    except StorageUnavailable as error:
        raise Indeterminate(
            f"version {attempt.seqno} may have been written, its answer and the store were lost: {error}",
            shard_id=register.shard,
        ) from cause
    happened = getattr(attempt.command, "happened", lambda state: False)(state)
    if happened is None:
        raise Unknowable(
            f"version {attempt.seqno} may have been written: it is no longer there, nor is its writer",
            shard_id=register.shard,
        ) from cause
    return bool(happened)


async def settle(slot: Slot) -> Attempt | None:
    """Decide the pending attempt of `slot` and return it; `None` if there is none."""
    attempt = slot.pending
    if attempt is None:
        return None
    try:
        attempt.happened = await _settle(attempt)
    except Unknowable:
        slot.pending = None  # decided long ago, only nobody can tell how
        raise
    if attempt.happened:
        await attempt.register.refresh()
    slot.pending = None  # last: who is cancelled before has it settled again
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
    register = attempt.register
    now = await register.stack.consensus.now()
    state = register.state
    if state is None or state.seqno != attempt.expected:
        await register.refresh()
        return
    occupy = Occupy(getattr(attempt.command, "writer", ""))
    job = Intent(register, occupy, Slot())
    outcome = occupy(state, Context(now=now))
    await _attempt([_prepared(job, state, outcome, now)])
