"""Compares the contents of a shard and of its copy column by column, in bounded memory."""

from contextlib import aclosing
from typing import Any

from aiopersist.base.errors import SinceViolation
from aiopersist.base.frontier import TIME_MAX, Antichain, Time, last_before
from aiopersist.data.lazy import pa
from aiopersist.read.puller import Items
from aiopersist.read.session import ReadSession
from aiopersist.shard.stack import Stack
from aiopersist.state.model import State

ENDS_MAX = 4  # contents change at the ends of batches
SPREAD = 3


def times_between(since: Antichain, upper: Antichain, state: State) -> tuple[Time, ...]:
    """Times at which a shard with these frontiers can be read: the first and the last, `ENDS_MAX` ends of
    batches of `state`, and `SPREAD` other times between them. Only first ones for product times."""
    first = next((time for time in since.elements if not upper.less_equal(time)), None)
    if not isinstance(first, int):
        return tuple(time for time in since.elements if not upper.less_equal(time))[:ENDS_MAX]
    last = last_before(upper) if upper.elements else TIME_MAX
    ends = [end for b in state.batches.values() if first < (end := last_before(b.upper)) < last]
    begin = max(first, min((t for t in ends if t > first), default=first))
    chosen = ends[:: max(-(-len(ends) // ENDS_MAX), 1)]
    spread = [begin + (last - begin) * n // (SPREAD + 1) for n in range(1, SPREAD + 1)]
    return tuple(sorted({first, *chosen, *spread, last}))


async def compare(one: ReadSession[Any, Any], other: ReadSession[Any, Any], as_of: Time) -> bool | None:
    """Whether a shard and its copy have the same contents at `as_of`; `None` if it has no history there."""
    stack = one.shard.stack
    try:
        copied = await other.snapshot(as_of, wait=False)
    except SinceViolation:  # another copier has moved since
        return None
    async with copied, await one.snapshot(as_of, wait=False) as written:
        async with aclosing(written.batches()) as left, aclosing(copied.batches()) as right:
            return await _same(left, right, stack)


async def _same(left: "Items[pa.RecordBatch]", right: "Items[pa.RecordBatch]", stack: Stack) -> bool:
    a, b = await anext(left, None), await anext(right, None)
    while a is not None and b is not None:
        rows = min(a.num_rows, b.num_rows)
        if not await stack.compute(same_columns, a.slice(0, rows), b.slice(0, rows)):
            return False
        a, b = a.slice(rows), b.slice(rows)
        a = a if a.num_rows else await anext(left, None)
        b = b if b.num_rows else await anext(right, None)
    return a is None and b is None


def same_columns(a: "pa.RecordBatch", b: "pa.RecordBatch") -> bool:
    """Whether the rows are equal; NaN equals NaN."""
    return a.schema.equals(b.schema) and all(map(_same_values, a.columns, b.columns))


def _same_values(a: "pa.Array", b: "pa.Array") -> bool:
    if a.equals(b):
        return True
    kind = a.type
    if len(a) != len(b) or not a.is_valid().equals(b.is_valid()):
        return False
    if pa.types.is_floating(kind):
        bits = {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[kind.bit_width]
        return bool(a.view(bits).equals(b.view(bits)))
    if pa.types.is_struct(kind):
        return all(map(_same_values, a.flatten(), b.flatten()))
    if pa.types.is_map(kind):
        pairs = pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))
        return _same_values(a.cast(pairs), b.cast(pairs))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return bool(a.value_lengths().equals(b.value_lengths())) and _same_values(a.flatten(), b.flatten())
    return False
