"""Times of whole columns: which rows a frontier holds, and advancing them.

A column of times is taken apart into its components: one for ints, n for product times of length n.
All else is arithmetic on components, so ints are product times of length one.
"""

from __future__ import annotations

from functools import reduce

from aiopersist.data.lazy import pa, pc, pl
from aiopersist.errors import InvalidUsage, UsageKind
from aiopersist.frontier import Antichain, Time

GREATEST_ROWS = 8192  # product times are reduced when so many have come


def components(times: pa.ChunkedArray | pa.Array) -> list[pa.ChunkedArray | pa.Array]:
    """The components of a column of times: itself for ints."""
    if not pa.types.is_fixed_size_list(times.type):
        return [times]
    return [pc.list_element(times, i) for i in range(times.type.list_size)]


def from_components(parts: list[pa.ChunkedArray | pa.Array], time_type: pa.DataType) -> pa.ChunkedArray:
    """The column of times again."""
    if not pa.types.is_fixed_size_list(time_type):
        return parts[0] if isinstance(parts[0], pa.ChunkedArray) else pa.chunked_array([parts[0]])
    rows = len(parts[0])
    flat = pl.DataFrame([pl.Series(str(i), pl.from_arrow(part)) for i, part in enumerate(parts)])
    # A row-major walk over the components is the child array of the lists.
    values = flat.select(pl.concat_arr(pl.all()).explode()).to_series().to_arrow() if rows else []
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values, pa.int64()), type=time_type)
    return pa.chunked_array([lists], time_type)


def beyond(times: pa.ChunkedArray, frontier: Antichain) -> pa.ChunkedArray:
    """Per row whether `frontier.less_equal(time)`."""
    return _beyond(components(times), frontier)


def _beyond(parts: list[pa.ChunkedArray | pa.Array], frontier: Antichain) -> pa.ChunkedArray:
    if not frontier.elements:
        return pc.is_null(parts[0])  # no time is beyond the empty frontier, and none is null
    either = [
        reduce(pc.and_, [pc.greater_equal(p, f) for p, f in zip(parts, element, strict=True)])
        for element in map(_tuple, _shaped(frontier, len(parts)))
    ]
    return reduce(pc.or_, either)


def not_after(times: pa.ChunkedArray, as_of: Time) -> pa.ChunkedArray:
    """Per row whether `time <= as_of`."""
    parts = components(times)
    (element,) = _shaped(Antichain(as_of), len(parts))
    return reduce(pc.and_, [pc.less_equal(p, f) for p, f in zip(parts, _tuple(element), strict=True)])


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
    each of them where it is given."""
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
    """The table with every time advanced to `frontier`, which is not empty. Order and equal rows are
    left as they come."""
    if not frontier.elements:
        raise InvalidUsage(UsageKind.INVALID_TIME, "cannot advance to the empty frontier {}")
    index = table.schema.get_field_index("time")
    times = table.column(index)
    parts = components(times)
    joined = [
        [pc.max_element_wise(p, f) for p, f in zip(parts, _tuple(element), strict=True)]
        for element in _shaped(frontier, len(parts))
    ]
    met = [reduce(pc.min_element_wise, same_component) for same_component in zip(*joined, strict=True)]
    return table.set_column(index, table.schema.field(index), from_components(met, times.type))


class Greatest:
    """The greatest of all times seen, enough of them to hold any frontier against all: a frontier that
    has not passed a time has not passed a greater one either. So of times that share all components
    but the last only the one with the greatest last is kept: of ints a single one."""

    def __init__(self) -> None:
        self._int: int | None = None
        self._seen: list[pa.Table] = []
        self._rows = 0
        self._rows_max = GREATEST_ROWS

    def add(self, table: pa.Table) -> None:
        """All times of `table`."""
        if not table.num_rows:
            return
        parts = components(table.column("time"))
        if len(parts) == 1:
            self.add_int(pc.max(parts[0]).as_py())
            return
        self._seen.append(pa.table(parts, [str(i) for i in range(len(parts))]))
        self._rows += table.num_rows
        if self._rows >= self._rows_max:
            self._reduce()

    def add_int(self, time: int) -> None:
        if self._int is None or time > self._int:
            self._int = time

    def beyond(self, frontier: Antichain) -> Time | None:
        """One of the times at or beyond `frontier`; `None` if there is none."""
        if self._int is not None:
            return self._int if frontier.less_equal(self._int) else None
        if not self._seen:
            return None
        self._reduce()
        (seen,) = self._seen
        row = _first(_beyond(seen.columns, frontier), True)
        return None if row is None else tuple(column[row].as_py() for column in seen.columns)

    def _reduce(self) -> None:
        table = pa.concat_tables(self._seen)
        *same, last = table.column_names
        found = table.group_by(same).aggregate([(last, "max")])
        self._seen = [found.rename_columns([*same, last]).select(table.column_names)]
        self._rows, self._rows_max = 0, max(GREATEST_ROWS, found.num_rows)


def _tuple(time: Time) -> tuple[int, ...]:
    return time if isinstance(time, tuple) else (time,)


def _shaped(frontier: Antichain, length: int) -> tuple[Time, ...]:
    """The elements of the frontier, which must be of the shape of the column's times."""
    for element in frontier.elements:
        if isinstance(element, tuple) is not (length > 1) or len(_tuple(element)) != length:
            wanted = "ints" if length == 1 else f"product times of length {length}"
            raise InvalidUsage(UsageKind.INVALID_TIME, f"{frontier} where times are {wanted}", time=element)
    return frontier.elements


def _first(mask: pa.ChunkedArray, wanted: bool) -> int | None:
    row: int = pc.index(mask, pa.scalar(wanted)).as_py()
    return None if row < 0 else row
