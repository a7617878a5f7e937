"""The only loop that makes commands durable, for one shard, or for several at one moment.

1. Run each command on the newest known state. It returns its changes, or a refusal.
2. Encode the diffs, decode them again, and make the next states from the decoded diffs, as all other
   processes do. So every version that is sent can be read, and all processes have the same state.
3. Write the diffs by compare-and-set, all of them or none. This module is the only caller of
   `Consensus.compare_and_set` for shards.
4. On a mismatch, and before a refusal is raised, read the newer versions and begin again.

After the compare-and-set has won, later errors do not count as its failure: `Register.committed` notifies the
listeners and keeps the errors that they raise.

**Outcomes.** An attempt writes version `e + 1`, with a commit id of its own. The statement runs in a task of
the client: a cancelled caller stops waiting, and the statement continues. If the answer is lost, the attempt
is *settled* before its slot does anything else:
- Version `e + 1` exists: its commit id says whether it is ours.
- Version `e + 1` does not exist: the statement may still be on its way. So the same bytes are sent again, to
  the same version, until the version exists. After a cancellation no caller wants the attempt; then a
  heartbeat (`Occupy`) takes the version, which also decides the attempt.
- It was truncated: the state may have a proof of the command (`happened`).

**Several shards.** Their statement requires that every head is the expected one, so any one of the versions
decides for all: if one is ours, all are; if one is of another client, none is ours and none ever will be. So
each handle can settle its own shard, and all reach the same answer."""

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from functools import partial
from typing import Any

from aiopersist.base.ending import spawn_with_result
from aiopersist.base.errors import Corruption, Indeterminate, InvalidUsage, StorageUnavailable, Unsupported
from aiopersist.shard import fairness
from aiopersist.shard.attempt import Attempt, Slot, Unknowable
from aiopersist.shard.register import Register
from aiopersist.shard.stack import ON_THE_LOOP_BYTES
from aiopersist.state.command import Command
from aiopersist.state.diff import decode_commit, read_back
from aiopersist.storage.consensus import Entry

ANSWER_S = 1.0  # settling waits so long for the answer of the statement; then it looks at the store


async def commit(register: Register, command: Command, slot: Slot | None = None) -> Any:
    """Apply `command` and return its result, or raise its refusal. `Indeterminate` if the store fails for
    longer than it is retried, or if the version and every proof of it are gone. Then, and after a
    cancellation, the attempt stays in `slot` until `settle`; a caller without a slot never settles."""
    return (await commit_all([Attempt(register, command, slot or Slot())]))[0]


async def commit_all(attempts: Sequence[Attempt], *, own_task: bool = True) -> list[Any]:
    """`commit` for different shards of one client: all commands become versions at one moment, or none does.
    The results are in the order of `attempts`; a refusal names its shard. `own_task`: statements run in tasks
    of their own, since the caller may be cancelled. Tasks of the client do not need that."""
    registers = [attempt.register for attempt in attempts]
    if len(registers) > 1:
        registers.sort(key=lambda register: register.shard)  # the same order for all callers: no deadlock
    metrics, fresh = registers[0].stack.metrics, False
    began = metrics.now()
    while True:
        if await fairness.yield_to_others(registers):
            await _refresh(registers)
            fresh = True
        turns: list[Register] = []
        try:
            for register in registers:
                if await register.take_turn():
                    turns.append(register)  # noqa: PERF401  # a cancelled wait releases those taken
            writing = await _planned(attempts, registers, final=fresh)
            if writing is not None and (not writing or await _write(writing, own_task=own_task)):
                if writing:
                    metrics.committed(began, len(writing))
                return [attempt.result for attempt in attempts]
        finally:
            for register in turns:
                register.release_turn()
        await _refresh(registers if writing is None else await _behind(registers, writing))
        fresh = True


async def _refresh(registers: Sequence[Register]) -> None:
    """Read their heads, by one request if the store can do that."""
    if len(registers) == 1:
        await registers[0].refresh()
    elif errors := await registers[0].stack.follower.look(registers) if registers else {}:
        raise next(iter(errors.values()))


async def _behind(registers: Sequence[Register], lost: Sequence[Attempt]) -> Sequence[Register]:
    """The registers to refresh after a lost race. The others take their heads from the store's answer: if it
    has heads, it has all that moved."""
    registers[0].stack.metrics.lost_race()
    races = {attempt.register: attempt.expected for attempt in lost}
    heads = {register: register.stack.consensus.newer(register.key) for register in races}
    moved = {register: head for register, head in heads.items() if head is not None}
    if await fairness.lost({register: races[register] for register in moved or races}):
        return registers
    if not any([await register.lost(head) for register, head in moved.items()]):
        return registers
    return [register for register in registers if register not in races]


async def _planned(
    attempts: Sequence[Attempt], registers: Sequence[Register], *, final: bool
) -> list[Attempt] | None:
    """Run the commands on the newest states. Returns the attempts that need a version, which is ready to be
    sent; `None` if one is refused. With `final` the refusal is raised."""
    stack = registers[0].stack
    is_wall = True in [register.is_wall for register in registers]
    now = await (stack.clock if is_wall else stack.consensus).now()
    if refused := [attempt for attempt in attempts if attempt.plan(now)]:
        if final:
            stack.metrics.refused()
            raise refused[0].refusal()
        return None
    writing = [attempt for attempt in attempts if attempt.diff is not None]
    for attempt in writing:
        await _read(attempt)
    return writing


async def _read(attempt: Attempt) -> None:
    """`Corruption`, before the version is sent, if it does not read back as it was made."""
    data, diff = attempt.data, attempt.diff
    assert diff is not None
    if len(data) <= ON_THE_LOOP_BYTES:
        attempt.take(read_back(data, diff))
    else:
        attempt.take(await attempt.register.stack.compute(read_back, data, diff))


async def _write(attempts: Sequence[Attempt], *, own_task: bool = True) -> bool:
    """Write all these versions; returns whether they are ours. `StorageUnavailable` if they were surely not
    written. After any other error, or a cancellation, it is unknown, and the attempts stay in their slots."""
    stack, ours = attempts[0].register.stack, False
    began = stack.runtime.monotonic()
    for attempt in attempts:
        attempt.slot.pending = attempt
        stack.follower.expect(attempt.register, attempt.seqno)
    try:
        try:
            ours = await _statement(attempts, own_task=own_task)
        except (StorageUnavailable, Unsupported):  # determinate: none is written
            _clear(attempts)
            raise
        except (Corruption, InvalidUsage):
            raise
        except Exception as error:
            ours = await _sent_until_known(attempts, error, began, own_task=own_task)
    finally:
        if not ours:
            for attempt in attempts:
                stack.follower.unmet(attempt.register)
    _clear(attempts)
    if ours:
        for attempt in attempts:
            assert attempt.after is not None
            attempt.register.committed(attempt.before, attempt.after, attempt.slot)
    return ours


def _clear(attempts: Sequence[Attempt]) -> None:
    for attempt in attempts:
        attempt.slot.pending = None


def _statement(attempts: Sequence[Attempt], *, own_task: bool) -> Awaitable[bool]:
    """Send the statement that writes these versions; returns its answer. `own_task`: the statement has a task
    of its own, so that a cancellation ends only the wait for its answer."""
    stack, statement = attempts[0].register.stack, partial(_sending, attempts)
    for attempt in attempts:
        attempt.sent += 1
    if not own_task:
        return statement()
    spawn = partial(stack.supervisor.spawn, name="write a version", eager=True)
    task, answer = spawn_with_result(statement, spawn)
    for attempt in attempts:
        attempt.statement = task
    return answer


def _sending(attempts: Sequence[Attempt]) -> Coroutine[Any, Any, bool]:
    consensus = attempts[0].register.stack.consensus
    if len(attempts) == 1:
        (one,) = attempts
        return consensus.compare_and_set(one.register.key, one.expected, one.data)
    return consensus.compare_and_set_many([Entry(a.register.key, a.expected, a.data) for a in attempts])


async def _sent_until_known(
    attempts: Sequence[Attempt], cause: Exception | None, began: float, *, own_task: bool
) -> bool:
    """The answer was lost (`cause`): look, and send the statement again, until it is known whether the
    versions are ours. The answer to a second sending decides only if that won. A refusal or an error tells
    nothing about the first sending."""
    stack = attempts[0].register.stack
    runtime, limit_s, delays = stack.runtime, stack.settings.retry_timeout_s, stack.runtime.delays()
    stall = stack.stall_log(lambda: f"the outcome of a commit to {_labels(attempts)}")
    while True:
        stack.metrics.unanswered()
        if (decided := await _look_at_all(attempts, cause)) is not None:
            return decided
        stall.note(cause or "another sending of it was refused")
        delay = next(delays)
        if limit_s is not None and runtime.monotonic() - began + delay > limit_s:
            text = f"version {attempts[0].seqno} may still be written: it was sent {attempts[0].sent} times"
            raise Indeterminate(text, shard_id=attempts[0].register.shard) from cause
        await runtime.sleep(delay)
        try:
            if await _statement(attempts, own_task=own_task):
                return True
            cause = None
        except Exception as error:
            cause = error


def _labels(attempts: Sequence[Attempt]) -> str:
    return ", ".join(attempt.register.label_of() for attempt in attempts)


async def _look_at_all(attempts: Sequence[Attempt], cause: BaseException | None) -> bool | None:
    """`_look` at one version after the other: the first known outcome is that of all."""
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
    """Whether the attempt happened, by a look at the store; `None` if its version does not exist."""
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
                if state is not None and state.finalized:  # even the tombstone is deleted
                    break
        if versions and versions[0].seqno == attempt.seqno:
            return decode_commit(versions[0].data) == attempt.commit
        state = await register.refresh()
    except (StorageUnavailable, Corruption, InvalidUsage) as error:
        raise Indeterminate(
            f"version {attempt.seqno} may have been written: its answer was lost, then the store: {error}",
            shard_id=register.shard,
        ) from (cause or error)
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
        slot.pending = None  # the outcome is decided, but no process can find it out
        raise
    if attempt.happened:
        await attempt.register.refresh()
    slot.pending = None  # last: after a cancellation before this, the next call settles again
    return attempt


async def _settle(attempt: Attempt) -> bool:
    statement = attempt.statement
    if statement is not None:
        await asyncio.wait([statement], timeout=ANSWER_S)
        if statement.done() and not statement.cancelled():
            error = statement.exception()
            if error is None and (statement.result() or attempt.sent == 1):
                return statement.result()
            if isinstance(error, StorageUnavailable | Unsupported) and attempt.sent == 1:
                return False
    while (decided := await _look(attempt, None)) is None:
        await _occupy(attempt)
    return decided


async def _occupy(attempt: Attempt) -> None:
    """Write version `attempt.seqno` as a heartbeat, unless the version exists."""
    from aiopersist.state.writing import Occupy  # imported late: a process that only reads seldom needs it

    register = attempt.register
    now = await register.stack.consensus.now()
    if register.seqno != attempt.expected:
        await register.refresh()
        return
    occupying = Attempt(register, Occupy(getattr(attempt.command, "writer", "")), Slot())
    occupying.plan(now)
    await _read(occupying)
    await _write([occupying])
