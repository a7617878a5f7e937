"""The steps of an append, of one handle or of several at one moment.

1. *Prepare*, before the handle's turn: check the rows and upload whole parts, or claim the staged batches.
2. *Stage*, in the turn, after an earlier append of the handle is settled. Frontiers and transaction numbers
   never go back, so a repeat or a mismatch returns early, before the last upload. Then make the command.
3. *Commit* (`commit_staged`). Remove an obstacle, and try the same append again. If the lease of the writer
   ran out, copy its uploaded parts to another writer (`parts/copies.py`). If the state has no room for more
   inline parts, flush them.
4. *Tidy up* by the outcome: delete the parts of a refused append, which no state names. If the caller did not
   get the outcome, the session keeps the append for `settle`.
"""

import asyncio
from collections.abc import Awaitable, Sequence

from aiopersist.base.errors import AlreadyAppended, Indeterminate, LeaseExpired, UpperMismatch
from aiopersist.measure.tracing import Tracing
from aiopersist.shard import fairness
from aiopersist.shard.attempt import Attempt
from aiopersist.shard.commit import commit_all
from aiopersist.shard.registration import LOST_MAX
from aiopersist.state.consuming import is_consumed
from aiopersist.state.writing import Appended, NoRoom, PartsExpired
from aiopersist.write.pending import OfHandle, PendingAppend, wait_briefly


def append_all(
    appends: Sequence[PendingAppend], joined: Sequence[Attempt] = (), *, own_task: bool = True
) -> Awaitable[None]:
    """Make all appends at one moment, or none. Each is of another shard. The `joined` attempts, of further
    shards, share the commit; the caller settles these. `own_task`: as in `commit_all`."""
    stack = (appends[0].session.shard if appends else joined[0].register).stack
    if stack.tracing.on:
        return _append_within_span(stack.tracing, appends, joined, own_task)
    return _append_until_done(appends, joined, own_task)


async def _append_within_span(
    tracing: Tracing, appends: Sequence[PendingAppend], joined: Sequence[Attempt], own_task: bool
) -> None:
    traces = [trace for append in appends for trace in append.traces]
    with tracing.span("append", ", ".join(append.session.shard.known_as for append in appends), *traces):
        await _append_until_done(appends, joined, own_task)


async def _append_until_done(
    appends: Sequence[PendingAppend], joined: Sequence[Attempt], own_task: bool
) -> None:
    """Append; begin again if the parts of a writer were lost after its lease."""
    lost = 0
    while True:
        try:
            try:
                for append in appends:
                    if append.batch is None:
                        await append.prepare()
                return await _append_in_turns(appends, joined, own_task)
            finally:
                if deletions := [task for append in appends for task in append.release()]:
                    await wait_briefly(deletions)
        except (asyncio.CancelledError, Indeterminate):  # also a cancellation during the release
            for append in appends:
                append.session.unsettled, append.updates = append, None
            raise
        except UpperMismatch as error:
            (shard,) = {a.session.shard for a in appends if a.session.shard.id == error.shard_id}
            fairness.refused(shard.register, error.expected)
            raise
        except PartsExpired:  # the sweep deleted the parts before `repair` could copy them
            lost += 1
            if lost == LOST_MAX or not all(append.can_begin_again for append in appends):
                raise
            for append in appends:
                append.begin_again()


async def _append_in_turns(
    appends: Sequence[PendingAppend], joined: Sequence[Attempt], own_task: bool
) -> None:
    """Stage and commit, in the turns of all handles."""
    sessions, begun = [append.session for append in appends], list[OfHandle]()
    if len(sessions) > 1:
        sessions.sort(key=lambda session: session.shard.id)  # the same for all: no deadlock
    try:
        for session in sessions:
            await session.begin_turn()
            begun.append(session)
        staged = [append for append in appends if await append.stage()]
        if staged or joined:
            await commit_staged(staged, joined, own_task=own_task)
    finally:
        for session in begun:
            session.end_turn()


async def commit_staged(
    appends: Sequence[PendingAppend], joined: Sequence[Attempt] = (), *, own_task: bool = True
) -> list[Appended]:
    """Commit all appends and the `joined` attempts at one moment, or none. Each append then has its outcome,
    or is pending. `own_task`: as in `commit_all`."""
    while True:
        attempts = [append.attempt() for append in appends]
        try:
            results = await commit_all([*attempts, *joined], own_task=own_task)
        except BaseException as error:
            for append in appends:
                append.unanswered()
            if isinstance(error, AlreadyAppended):
                _mark_consumed(appends)
            if not isinstance(error, PartsExpired | LeaseExpired | NoRoom):
                raise
            (at_fault,) = (a for a in appends if a.session.shard.id == error.shard_id)
            await at_fault.repair(error)
            continue
        results = results[: len(attempts)]
        for append, done in zip(appends, results, strict=True):
            append.answered(done)
        return results


def _mark_consumed(appends: Sequence[PendingAppend]) -> None:
    """Mark the batches that another process appended or deleted."""
    for append in appends:
        state = append.session.shard.state
        for batch in append.batches:
            if is_consumed(state, batch.registration.writer, batch.id):
                batch.consumed_elsewhere()
