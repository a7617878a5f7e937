"""How a read is divided: ranges of rows in sorted order, with about the same number of updates each. The
statistics of parts decide.

The plan works on *blocks*, mostly row groups: the least and the greatest value of each column, and the number
of updates. Blocks of several runs overlap, so the reader of a range reads it from every run and sums it. Cuts
are at lower bounds of blocks, where a reader can skip most of a run.

*Order.* Rows are sorted by key and value, that is by their leaf columns one after the other (`leaves`).
Ranges are over the first leaf. *Skew*: a value that fills many blocks cannot be cut, so the next leaf divides
its rows, and so on. All ranges together follow the sorted order, whatever leaf each of them divides.

*Nulls* come first, in the range without a lower bound. *NaN* comes last, in the range without an upper bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate, pairwise, takewhile
from operator import and_
from typing import Any, NamedTuple

from aiopersist.data.arrays import compared
from aiopersist.data.jsonable import from_json, to_json
from aiopersist.data.lazy import pa, pc
from aiopersist.data.part.stats import BOUND_BYTES, leaf_types
from aiopersist.data.types.schema import Schema


class Bound(NamedTuple):
    """The bounds of one leaf column in a block, and whether it may have nulls."""

    low: Any
    high: Any
    nulls: bool


class Block(NamedTuple):
    """Some updates of a part: the bounds of their leaf columns, in order, up to the first unknown one."""

    bounds: tuple[Bound, ...]
    updates: int


class KeyRange(NamedTuple):
    """The rows whose first leaves are `prefix`, and whose next leaf is in `[lower, upper)`; with `after`, in
    `(lower, upper)`. `None` is no bound."""

    prefix: tuple[Any, ...] = ()
    lower: Any = None
    upper: Any = None
    after: bool = False


class Leaf(NamedTuple):
    """A leaf column of key or value that decides the order of rows."""

    path: tuple[str, ...]
    type: pa.DataType
    nullable: bool

    @property
    def name(self) -> str:
        """The name of the leaf in statistics."""
        return ".".join(self.path)

    @property
    def compared(self) -> pa.DataType:
        """The type in which bounds are compared."""
        return compared(self.type)

    def scalar(self, value: Any) -> pa.Scalar:
        """A bound as a value of the column."""
        return pa.scalar(value, self.compared).cast(self.type)


# --- the plan --------------------------------------------------------------------------------------


def plan_key_ranges(blocks: Iterable[Block], tasks: int) -> list[KeyRange]:
    """About `tasks` ranges, in order and disjoint, which cover all rows. A block without bounds may lie in
    every range, so it does not count."""
    bounded = [block for block in blocks if block.bounds]
    total = sum(block.updates for block in bounded)
    if tasks <= 1 or not total:
        return [KeyRange()]
    return list(_ranges(bounded, (), total / tasks))


def _ranges(blocks: Sequence[Block], prefix: tuple[Any, ...], goal: float) -> Iterator[KeyRange]:
    """The ranges of the rows with this prefix; all `blocks` belong to it."""
    depth = len(prefix)
    hot = _hot(blocks, depth, 2 * goal)
    ends: list[_Edge | None] = [None, *_cuts(blocks, depth, goal, hot), None]
    for begin, end in pairwise(ends):
        if begin is not None and begin.value in hot and not begin.after:
            alone = [b for b in blocks if b.bounds[depth].low == b.bounds[depth].high == begin.value]
            within = [b for b in alone if len(b.bounds) > depth + 1]
            yield from _ranges(within, (*prefix, begin.value), goal)
        else:
            lower, after = begin if begin is not None else (None, False)
            yield KeyRange(prefix, lower, end.value if end is not None else None, after)


class _Edge(NamedTuple):
    """The border between two ranges: at the value, or after it."""

    value: Any
    after: bool


def _hot(blocks: Sequence[Block], depth: int, updates_min: float) -> set[Any]:
    """The values of a leaf that fill blocks of `updates_min` updates, which the next leaf can divide."""
    updates: Counter[Any] = Counter()
    for block in blocks:
        bound = block.bounds[depth]
        if bound.low == bound.high and not bound.nulls and len(block.bounds) > depth + 1:
            updates[bound.low] += block.updates
    return {value for value, n in updates.items() if n >= updates_min}


def _cuts(blocks: Sequence[Block], depth: int, goal: float, hot: set[Any]) -> Iterator[_Edge]:
    """Around each hot value, and at lower bounds of blocks with about `goal` updates between them."""
    bounds = [(block.bounds[depth], block.updates) for block in blocks]
    lows = sorted({bound.low for bound, _ in bounds})
    held = 0.0  # since the last cut
    for low, updates in zip(lows, _following(lows, bounds, hot), strict=True):
        if low in hot:
            yield from (_Edge(low, False), _Edge(low, True))
            held = 0.0
        elif held + updates / 2 >= goal and held > 0:
            yield _Edge(low, False)
            held = 0.0
        held += updates


def _following(lows: Sequence[Any], bounds: Sequence[tuple[Bound, int]], hot: set[Any]) -> list[float]:
    """How many updates lie between each lower bound and the next. The updates of a block are spread evenly
    over the lower bounds that it reaches. A block of a hot value does not count: the next leaf divides it."""
    steps = [0.0] * (len(lows) + 1)
    for bound, updates in bounds:
        if bound.low == bound.high and bound.low in hot:
            continue
        first = bisect_left(lows, bound.low)
        end = max(bisect_left(lows, bound.high), first + 1)
        steps[first] += updates / (end - first)
        steps[end] -= updates / (end - first)
    return list(accumulate(steps[:-1]))


def overlaps(keys: KeyRange, bounds: Sequence[Bound]) -> bool:
    """Whether a block with these bounds may hold rows of the range."""
    for value, bound in zip(keys.prefix, bounds, strict=False):
        if value < bound.low or bound.high < value:
            return False
    if len(bounds) <= len(keys.prefix):
        return True
    low, high, nulls = bounds[len(keys.prefix)]
    if nulls and keys.lower is None:
        return True
    below = keys.upper is not None and not low < keys.upper
    above = keys.lower is not None and (high < keys.lower or (keys.after and high == keys.lower))
    return not below and not above


# --- of a schema -----------------------------------------------------------------------------------


def leaves(schema: Schema[Any, Any, Any]) -> list[Leaf]:
    """The leaf columns that decide the order, up to the first column that cannot divide: a list, a struct
    that may be absent, long values of fixed size, or a column whose dotted name another one shares."""
    candidates: list[Leaf] = []
    for name in ("key", "val"):
        field = schema.arrow_schema.field(name)
        if not _walk((name,), field.type, field.nullable, candidates):
            break
    types = leaf_types(schema)  # without leaves that share a name
    return list(takewhile(lambda leaf: leaf.name in types, candidates))


def _walk(path: tuple[str, ...], t: pa.DataType, nullable: bool, leaves_out: list[Leaf]) -> bool:
    """Add the leaves at `path`. Returns whether the leaves after them can divide, too."""
    is_ = pa.types
    if is_.is_null(t):
        return True
    if is_.is_struct(t):
        return not nullable and all(_walk((*path, f.name), f.type, f.nullable, leaves_out) for f in t)
    if (
        is_.is_nested(t)
        or is_.is_dictionary(t)
        or (is_.is_fixed_size_binary(t) and t.byte_width > BOUND_BYTES)
    ):
        return False
    leaves_out.append(Leaf(path, t, nullable))
    return True


def bounds_of(record: Mapping[str, Any] | None, order: Sequence[Leaf]) -> tuple[Bound, ...]:
    """The bounds of the leaves in stored statistics, up to the first leaf without usable bounds."""
    bounds = []
    for leaf in order:
        entry = (record or {}).get(leaf.name)
        if entry is None:
            break
        try:
            low, high = from_json(entry["min"], leaf.compared), from_json(entry["max"], leaf.compared)
        except (ValueError, TypeError, ArithmeticError):  # another version wrote it
            break
        if low is None or high is None or low != low:
            break
        bounds.append(Bound(low, high, bool(entry["nulls"])))
    return tuple(bounds)


def condition(keys: KeyRange, order: Sequence[Leaf]) -> Any:
    """The expression that is true for exactly the rows of the range; `None` for all rows."""
    facts = [pc.field(*leaf.path) == leaf.scalar(v) for leaf, v in zip(order, keys.prefix, strict=False)]
    if keys.lower is None and keys.upper is None:
        return reduce(and_, facts) if facts else None
    leaf = order[len(keys.prefix)]
    field = pc.field(*leaf.path)
    if keys.upper is not None:
        below = field < leaf.scalar(keys.upper)
        facts.append(below | field.is_null() if leaf.nullable and keys.lower is None else below)
    if keys.lower is not None:
        facts.append(_above(field, keys, leaf))
    return reduce(and_, facts)


def _above(field: Any, keys: KeyRange, leaf: Leaf) -> Any:
    lower = leaf.scalar(keys.lower)
    if pa.types.is_floating(leaf.type):  # negated, so that it is true for NaN
        return ~(field <= lower) if keys.after else ~(field < lower)
    return field > lower if keys.after else field >= lower


def to_stored(keys: KeyRange, order: Sequence[Leaf]) -> dict[str, Any]:
    """The range as JSON."""
    values = [to_json(pa.scalar(v, leaf.compared)) for leaf, v in zip(order, keys.prefix, strict=False)]
    ends = {}
    for name in ("lower", "upper"):
        if (value := getattr(keys, name)) is not None:
            ends[name] = to_json(pa.scalar(value, order[len(keys.prefix)].compared))
    return {"prefix": values, **ends, "after": keys.after}


def from_stored(stored: Mapping[str, Any], order: Sequence[Leaf]) -> KeyRange:
    """The range of this JSON; `ValueError` if it does not fit the schema."""
    prefix = stored["prefix"]
    if len(prefix) > len(order) or (len(prefix) == len(order) and {"lower", "upper"} & stored.keys()):
        raise ValueError("a range over columns that the schema does not have")
    values = tuple(from_json(v, leaf.compared) for leaf, v in zip(order, prefix, strict=False))
    ends = {
        name: from_json(stored[name], order[len(prefix)].compared)
        for name in ("lower", "upper")
        if name in stored
    }
    return KeyRange(values, ends.get("lower"), ends.get("upper"), bool(stored["after"]))
