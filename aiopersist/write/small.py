"""The short way of a small append.

The general way (`append.py`) has a step for everything that may come in between: uploads, leases that run
out, a state without room, repeats, several shards. Most appends of a busy writer meet nothing of that, and
the steps take longer than the work. Here a few plain rows become an inline part, and one attempt is made to
commit it.

Whatever else there is to do (`False`), nothing was written, and the general way begins from the start. It has
all refusals, so the short way has none.
"""

import asyncio
from typing import Any

from aiopersist.data.updates.tiny import Tiny, tiny
from aiopersist.errors import Indeterminate
from aiopersist.frontier import Antichain
from aiopersist.parts.flush import must_flush
from aiopersist.parts.put import inline_part_of
from aiopersist.parts.upload import fits_inline
from aiopersist.shard.commit import commit_small
from aiopersist.state.small_append import SmallAppend
from aiopersist.write.outcome import PendingAppend, UnsettledCall
from aiopersist.write.session import Session


def short_rows(session: Session, updates: Any, lower: Antichain, upper: Antichain) -> Tiny | None:
    """The updates, if they surely become one inline part within these bounds: a few plain rows, taken and
    converted as the call begins."""
    rows, stack = tiny(updates, session.schema), session.shard.stack
    if (
        rows is None
        or not rows.rows
        or not lower.less_equal(rows.least_time)
        or upper.less_equal(rows.greatest_time)
        or rows.goodbytes > min(stack.settings.update_size_max, stack.settings.blob_target_size - 1)
        or not fits_inline(rows.goodbytes, stack.settings)
        or stack.tracing.on
    ):
        return None
    return rows


async def append_small(session: Session, rows: Tiny, lower: Antichain, upper: Antichain) -> bool:
    """Append the rows, which are `short_rows` of these bounds, if one attempt at a commit does it; see the
    header. Errors and cancellations are those of `append_all`, and so is what `settle` finds after them."""
    stack, pending = session.shard.stack, PendingAppend()
    part = inline_part_of(rows.message(), rows.rows, session.context.schema_id)
    try:
        async with session.turn():
            if must_flush(session.shard):
                return False
            room, writer = stack.settings.inline_writes_total_max_bytes, session.registration.writer
            append = SmallAppend(writer, stack.runtime.token(), part, lower, upper, room)
            try:
                done = await commit_small(session.shard.register, append, session.slot)
            except BaseException:
                if session.slot.busy:
                    pending.outcome, session.pending = None, pending
                raise
    except (asyncio.CancelledError, Indeterminate):
        session.unsettled = UnsettledCall({}, append=pending)
        raise
    if done:
        stack.metrics.appended(part.rows)
    return done
