"""The keys that a read looks for: which data may have them by its statistics, and which rows have them.

Both checks look at each leaf of the keys by itself. So if keys have several fields, a row may pass that mixes
the fields of several keys. The reader compares whole keys at the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, NamedTuple

from aiopersist.data.arrays import compared
from aiopersist.data.jsonable import from_json
from aiopersist.data.lazy import pa, pc


class WantedKeys:
    """See the header. `keys` is a column of at least one key."""

    def __init__(self, keys: pa.Array) -> None:
        leaves = [(path, values) for path, values in _leaves(keys, ("key",)) if not _is_opaque(values.type)]
        times = Counter(".".join(path) for path, _ in leaves)
        self._leaves = leaves
        self._bounded = [
            _WantedLeaf.of(".".join(path), values) for path, values in leaves if times[".".join(path)] == 1
        ]

    def may_be_in(self, stats: Mapping[str, Any] | None) -> bool:
        """Whether data with these statistics (`data/part/stats.py`) may have any of the keys."""
        return stats is None or all(leaf.may_be_in(stats.get(leaf.name)) for leaf in self._bounded)

    def rows(self, column: pa.ChunkedArray) -> range:
        """The range of rows in a column of keys from the first match to the last."""
        matches = pc.indices_nonzero(self.mask(column))
        return range(matches[0].as_py(), matches[-1].as_py() + 1) if len(matches) else range(0)

    def mask(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Whether each row has one of them."""
        leaves = dict(_leaves(column, ("key",)))
        masks = [pc.is_in(leaves[path], value_set=values) for path, values in self._leaves]
        return reduce(pc.and_, masks) if masks else pc.or_kleene(column.is_valid(), column.is_null())

    def of(self, table: pa.Table) -> pa.Table:
        """The rows of a table that have one of them."""
        return table.filter(self.mask(table.column("key")))


class _WantedLeaf(NamedTuple):
    """The values of one leaf of the keys, as bounds have them."""

    name: str
    type: pa.DataType
    values: list[Any]
    """In order."""
    has_null: bool
    has_nan: bool

    @classmethod
    def of(cls, name: str, column: pa.Array) -> _WantedLeaf:
        t = compared(column.type)
        distinct = set((column if t == column.type else column.cast(t)).to_pylist())
        values = sorted(value for value in distinct if value is not None and value == value)
        return cls(name, t, values, None in distinct, any(value != value for value in distinct))

    def may_be_in(self, entry: Mapping[str, Any] | None) -> bool:
        if entry is None or (self.has_null and entry["nulls"]):
            return True
        try:
            low, high = from_json(entry["min"], self.type), from_json(entry["max"], self.type)
            return self._is_any_within(low, high)
        except (ValueError, TypeError, ArithmeticError):  # another version wrote it
            return True

    def _is_any_within(self, low: Any, high: Any) -> bool:
        """`None` is no bound; NaN is the greatest value."""
        is_open = high is None or high != high
        if is_open and self.has_nan:
            return True
        if low is not None and low != low:
            return False
        at = 0 if low is None else bisect_left(self.values, low)
        return at < len(self.values) and (is_open or bool(self.values[at] <= high))


def _leaves(column: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not pa.types.is_struct(column.type):
        yield path, column
        return
    for number, field in enumerate(column.type):
        yield from _leaves(pc.struct_field(column, [number]), (*path, field.name))


def _is_opaque(t: pa.DataType) -> bool:
    """Whether Arrow has no `is_in` for it."""
    is_ = pa.types
    return bool(is_.is_nested(t) or is_.is_null(t) or is_.is_dictionary(t) or is_.is_float16(t))
