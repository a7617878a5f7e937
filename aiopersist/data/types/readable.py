"""Arrow's points in time and durations reach further than Python's. A table refuses such values, since its
feeds give values of Python."""

from __future__ import annotations

from typing import Any

from aiopersist.data.arrays import integer_of
from aiopersist.data.lazy import pa, pc
from aiopersist.data.refusal import Refusal
from aiopersist.data.types.codec import Field, Plain
from aiopersist.data.types.nested import Lists, Structs
from aiopersist.data.valid import list_of, raise_first


def check_readable(column: pa.ChunkedArray, field: Field) -> None:
    """`Refusal` of a row with a value that Python cannot represent."""
    start = 0
    for chunk in column.chunks:
        try:
            _check(chunk, field)
        except Refusal as e:
            raise Refusal(start + e.row, e.reason) from e
        start += len(chunk)


def _check(array: pa.Array, field: Field) -> None:
    codec = field.codec
    if isinstance(codec, Lists):
        try:
            _check(array.flatten(), codec.element)
        except Refusal as e:
            raise Refusal(list_of(array, e.row), f"in a list: {e.reason}") from e
    elif isinstance(codec, Structs):
        _check_fields(array, codec)
    elif isinstance(codec, Plain) and pa.types.is_temporal(codec.arrow_type):
        _check_moments(array)


def _check_fields(array: pa.Array, codec: Structs) -> None:
    refusals = []
    for (name, field), child in zip(codec.fields.items(), array.flatten(), strict=True):
        try:
            _check(child, field)
        except Refusal as e:
            refusals.append(Refusal(e.row, f"field {name!r}: {e.reason}"))
    raise_first(refusals)


def _check_moments(array: pa.Array) -> None:
    """Checks only the least and the greatest: Python has all values between two that it has."""
    numbers: Any = array.cast(integer_of(array.type))
    for end in pc.min_max(numbers).values():
        try:
            end.cast(array.type).as_py()
        except (OverflowError, ValueError) as e:
            row = pc.index(numbers, end).as_py()
            raise Refusal(row, f"{array.type} {end} is none that Python can represent: {e}") from e
