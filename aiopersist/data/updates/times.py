"""Times of whole columns: their comparison with a frontier, and advancing them.

A column of times is taken apart into its components: one for ints, n for product times of length n. All
operations work on components, so ints are product times of length one.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.base.frontier import TIME_MAX, Antichain, Time
from aiopersist.data.arrays import int64_scalar
from aiopersist.data.lazy import np, pa, pc
from aiopersist.data.updates.assemble import column_of, numbers, whole

GREATEST_ROWS = 8192  # so many product times are reduced to the maximal ones
PRUNINGS = 256  # bounds the work if no time is greater than another
FEW_ROWS = 64  # fewer times are not worth the kernels


def components(times: pa.ChunkedArray | pa.Array) -> list[pa.ChunkedArray | pa.Array]:
    """The components of a column of times: itself for ints."""
    if not pa.types.is_fixed_size_list(times.type):
        return [times]
    return [pc.list_element(times, i) for i in range(times.type.list_size)]


def from_components(parts: list[pa.ChunkedArray | pa.Array], time_type: pa.DataType) -> pa.ChunkedArray:
    """The column of times of these components."""
    if not pa.types.is_fixed_size_list(time_type):
        return parts[0] if isinstance(parts[0], pa.ChunkedArray) else pa.chunked_array([parts[0]])
    # A row-major walk over the components is the child array of the lists.
    values = column_of(_matrix(parts).ravel())
    lists = pa.FixedSizeListArray.from_arrays(values, type=time_type)
    return pa.chunked_array([lists], time_type)


def _matrix(parts: list[pa.ChunkedArray | pa.Array]) -> Any:
    """The components as a numpy array, a row for each time."""
    return np.column_stack([numbers(whole(part)) for part in parts])


def _each(kernel: Any, parts: list[Any], element: Time) -> list[Any]:
    """The kernel applied to every component and the same component of the element."""
    return [kernel(part, int64_scalar(at)) for part, at in zip(parts, _tuple(element), strict=True)]


def beyond(times: pa.ChunkedArray, frontier: Antichain) -> pa.ChunkedArray:
    """For each row, whether `frontier.less_equal(time)`."""
    return _beyond(components(times), frontier)


def _beyond(parts: list[pa.ChunkedArray | pa.Array], frontier: Antichain) -> pa.ChunkedArray:
    if not frontier.elements:
        return pc.is_null(parts[0])  # no time is beyond the empty frontier, and none is null
    either = [
        reduce(pc.and_, _each(pc.greater_equal, parts, element)) for element in _shaped(frontier, len(parts))
    ]
    return reduce(pc.or_, either)


def rows_after(table: pa.Table, frontier: Antichain) -> int | None:
    """How many rows have times after the only element of `frontier`; `None` for product times."""
    (*_, element) = frontier.elements
    if isinstance(element, tuple):
        return None
    after: int = pc.sum(pc.greater(table.column("time"), int64_scalar(element)), min_count=0).as_py()
    return after


def not_after(times: pa.ChunkedArray, as_of: Time) -> pa.ChunkedArray:
    """For each row, whether `time <= as_of`."""
    parts = components(times)
    (element,) = _shaped(Antichain(as_of), len(parts))
    return reduce(
        pc.and_, [pc.less_equal(p, int64_scalar(f)) for p, f in zip(parts, _tuple(element), strict=True)]
    )


def first_row_not_beyond(table: pa.Table, lower: Antichain) -> int | None:
    """The first row whose time is not at or beyond `lower`."""
    return _first(beyond(table.column("time"), lower), False)


def filter_times(
    table: pa.Table,
    *,
    lower: Antichain | None = None,
    upper: Antichain | None = None,
    as_of: Time | None = None,
    not_as_of: Time | None = None,
) -> pa.Table:
    """The rows with times at or beyond `lower`, not at or beyond `upper`, `<= as_of`, not `<= not_as_of`;
    `None`: no bound."""
    times = table.column("time")
    masks = []
    if lower is not None:
        masks.append(beyond(times, lower))
    if upper is not None:
        masks.append(pc.invert(beyond(times, upper)))
    if as_of is not None:
        masks.append(not_after(times, as_of))
    if not_as_of is not None:
        masks.append(pc.invert(not_after(times, not_as_of)))
    if not masks:
        return table
    mask = reduce(pc.and_, masks)
    return table if pc.all(mask, min_count=0).as_py() else table.filter(mask)


def advance(table: pa.Table, frontier: Antichain) -> pa.Table:
    """The table with all times advanced to `frontier`, which must not be empty; not sorted, not summed."""
    if not frontier.elements:
        raise InvalidUsage(UsageKind.INVALID_TIME, "cannot advance to the empty frontier {}")
    index = table.schema.get_field_index("time")
    times = table.column(index)
    parts = components(times)
    joined = [_each(pc.max_element_wise, parts, element) for element in _shaped(frontier, len(parts))]
    met = [reduce(pc.min_element_wise, same_component) for same_component in zip(*joined, strict=True)]
    return table.set_column(index, table.schema.field(index), from_components(met, times.type))


class Seen:
    """Int times in the order they came: the least, the greatest, and each time that is less than all times
    before it. The first time below any bound is one of these."""

    def __init__(self) -> None:
        self.least = TIME_MAX
        self.greatest = 0
        self._lows: list[pa.Array] = []

    def add(self, table: pa.Table) -> None:
        """Add all times of `table`."""
        if not table.num_rows:
            return
        lows = pc.unique(pc.cumulative_min(table.column("time").combine_chunks()))
        self._add(lows, lows[-1].as_py(), pc.max(table.column("time")).as_py())

    def merge(self, other: Seen) -> None:
        """Add the times of `other` after these times."""
        for lows in other._lows:
            self._add(lows, other.least, other.greatest)

    def _add(self, lows: pa.Array, least: int, greatest: int) -> None:
        self._lows.append(lows)
        self.least, self.greatest = min(self.least, least), max(self.greatest, greatest)

    def first_below(self, bound: int) -> int | None:
        """The first time that is less than `bound`."""
        if bound <= self.least:
            return None
        matches = (lows.filter(pc.less(lows, int64_scalar(bound))) for lows in self._lows)
        return next(int(below[0].as_py()) for below in matches if len(below))


class Greatest:
    """The maximal times of all times. They tell whether any time is at or beyond a frontier: if one is, all
    greater times are. Ints have one maximal time; n product times in random order have about log n."""

    def __init__(self) -> None:
        self._int: int | None = None
        self._seen: list[Any] = []
        self._rows = 0
        self._rows_max = GREATEST_ROWS

    def add(self, table: pa.Table) -> None:
        """Add all times of `table`."""
        if not table.num_rows:
            return
        parts = components(table.column("time"))
        if len(parts) == 1:
            self.add_int(pc.max(parts[0]).as_py())
            return
        times = _matrix(parts)
        self._see(times if table.num_rows < FEW_ROWS else _maximal(times))

    def add_int(self, time: int) -> None:
        if self._int is None or time > self._int:
            self._int = time

    def merge(self, other: Greatest) -> None:
        """Add the times of `other`."""
        if other._int is not None:
            self.add_int(other._int)
        for times in other._seen:
            self._see(times)

    def beyond(self, frontier: Antichain) -> Time | None:
        """A time at or beyond `frontier`; `None` if there is none."""
        if self._int is not None:
            return self._int if frontier.less_equal(self._int) else None
        for times in self._seen:
            row = _first(_beyond([column_of(component) for component in times.T], frontier), True)
            if row is not None:
                return tuple(times[row].tolist())
        return None

    def _see(self, times: Any) -> None:
        self._seen.append(times)
        self._rows += len(times)
        if self._rows >= self._rows_max or len(self._seen) >= FEW_ROWS:
            self._seen = [_maximal(np.concatenate(self._seen))]
            self._rows = len(self._seen[0])
            self._rows_max = max(GREATEST_ROWS, 2 * self._rows)


def _maximal(times: Any) -> Any:
    """The rows for which no other row is greater, each once. Pairs are sorted downwards: maximal are those
    whose second component is greater than all before. Longer times: a row with the greatest sum is maximal,
    the rows below it are dropped, and so on, at most `PRUNINGS` times, so a few other rows may stay."""
    if times.shape[1] == 2:
        pairs = times[np.lexsort(times.T[::-1])[::-1]]
        greatest = np.maximum.accumulate(pairs[:, 1])
        return pairs[np.concatenate([[True], greatest[1:] > greatest[:-1]])]
    rest: Any = np.unique(times, axis=0)
    kept = list[Any]()
    while len(rest) and len(kept) < PRUNINGS:
        kept.append(rest[rest.sum(axis=1, dtype=np.float64).argmax()])
        rest = rest[(rest > kept[-1]).any(axis=1)]
    return np.concatenate([np.array(kept, np.int64), rest])


def _tuple(time: Time) -> tuple[int, ...]:
    return time if isinstance(time, tuple) else (time,)


def _shaped(frontier: Antichain, length: int) -> tuple[Time, ...]:
    """The elements of the frontier; `InvalidUsage` unless they have the shape of the column's times."""
    for element in frontier.elements:
        if isinstance(element, tuple) is not (length > 1) or len(_tuple(element)) != length:
            expected = "ints" if length == 1 else f"product times of length {length}"
            raise InvalidUsage(UsageKind.INVALID_TIME, f"{frontier} where times are {expected}", time=element)
    return frontier.elements


def _first(mask: pa.ChunkedArray, value: bool) -> int | None:
    row: int = pc.index(mask, pa.scalar(value)).as_py()
    return None if row < 0 else row
