"""The types of the updates that a user may pass: rows of the types of the schema, or Arrow data.

So a type checker refuses rows of another schema. The writer checks rows and Arrow data when it reads them.

A call copies a list of rows, or another collection, when the call begins (`own_copy`). It copies Arrow data,
and the items of an iterator, chunk by chunk (`convert.py`). So the updates share no memory with the caller's.
"""

from collections.abc import (
    AsyncIterable,
    Iterable,
    Mapping,
    MappingView,
    MutableSequence,
    Sequence,
    Set,
    Sized,
)
from typing import Any, Protocol, TypeAlias, TypeVar

from aiopersist.base.frontier import Time

K = TypeVar("K")
V = TypeVar("V")


class ArrowStream(Protocol):
    """Tables, readers, frames of polars and pandas."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class ArrowArray(Protocol):
    """Record batches."""

    def __arrow_c_array__(self, requested_schema: object | None = None) -> object: ...


Arrow: TypeAlias = ArrowStream | ArrowArray
Chunks: TypeAlias = Iterable[Arrow] | AsyncIterable[Arrow]
Update: TypeAlias = tuple[K, V, Time, int]
Row: TypeAlias = tuple[K, V] | tuple[K, V, int]

GivenUpdates: TypeAlias = Arrow | Chunks | Iterable[Update[K, V]] | AsyncIterable[Update[K, V]]
"""`(key, val, time, diff)`: a collection, or an iterator."""

GivenRows: TypeAlias = Arrow | Chunks | Iterable[Row[K, V]] | AsyncIterable[Row[K, V]]
"""`(key, val)` or `(key, val, diff)`: the library chooses the time."""


GivenEntries: TypeAlias = (
    Mapping[K, V] | Iterable[tuple[K, V]] | Iterable[Mapping[K, V]] | Arrow | Iterable[Arrow]
)
"""Entries of a table: a mapping, `(key, val)` pairs, Arrow data, or an iterator of these."""


def is_repeatable(updates: Any) -> bool:
    """Whether the updates can be read twice. An iterator with a length (a progress bar) cannot."""
    is_arrow = hasattr(updates, "__arrow_c_stream__") or hasattr(updates, "__arrow_c_array__")
    return isinstance(updates, Sequence | Set | Mapping | MappingView) or (
        is_arrow and isinstance(updates, Sized)
    )


def own_copy(updates: Any) -> Any:
    """The updates of a call. A list, a set, a dict or a view of one is copied, since its owner may change it
    while the call awaits. The copy takes some milliseconds for a million rows."""
    if isinstance(updates, dict):
        return dict(updates)
    can_change = isinstance(updates, MutableSequence | Set | MappingView)
    return list(updates) if can_change and not isinstance(updates, bytearray) else updates
