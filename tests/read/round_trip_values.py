"""Values of every type that can be stored, in the form that Arrow stores them: points in time are integers,
structs and lists are tuples, every NaN is the same text. What is made of them here (Arrow data in many
layouts, Python's values, their order, what an evolved schema makes of them) shares nothing with the library.
"""

import math
import struct
from collections.abc import Sequence
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tests.support.schemas import INT_MAX

NAN = "NaN"

ZONE = "Europe/Paris"
LEAVES: list[pa.DataType] = [
    *(pa.bool_(), pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.float32(), pa.float64()),
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(3), pa.binary(300)),
    *(pa.date32(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.duration("s"), pa.duration("us")),
    *(pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.timestamp("us"), pa.timestamp("us", ZONE)),
    *(pa.decimal128(38, 9), pa.decimal128(5, 0), pa.decimal128(5, 5), pa.null()),
]
NAMES = ["a", "b", "a.b", "key", "val", "time", "diff", "element", "é", "", "q\"'", "a b", "0"]
TEXTS = ["", "a", "ab", "é", "\ud7ff", "\uffff", "😀", "z" * 300, "z" * 300 + "a", "\U0010ffff" * 80, "\x00"]
BYTES = [b"", b"\x00", b"\xff", b"\xff" * 300, b"a", b"\x80", b"b" * 300, b"b" * 299 + b"c"]


class Values:
    """Random types, and values of them. `far`: some points in time are none that Python can say."""

    def __init__(self, rng: Random, *, far: bool) -> None:
        self.rng = rng
        self.far = far

    # --- types -------------------------------------------------------------------------------------

    def type(self, depth: int = 2) -> pa.DataType:
        if not depth or self.rng.random() < 0.55:
            return self.rng.choice(LEAVES)
        if self.rng.random() < 0.4:
            return pa.list_(self.field("element", depth - 1))
        names = self.rng.sample(NAMES, self.rng.choice([1, 2, 2, 3]))
        return pa.struct([self.field(name, depth - 1) for name in names])

    def field(self, name: str, depth: int = 2) -> pa.Field:
        t = self.type(depth)
        return pa.field(name, t, self.rng.random() < 0.6 or pa.types.is_null(t))

    def evolved(self, t: pa.DataType) -> pa.DataType:
        """The type with optional fields added here and there."""
        if pa.types.is_list(t):
            return pa.list_(t.value_field.with_type(self.evolved(t.value_type)))
        if not pa.types.is_struct(t):
            return t
        fields = [f.with_type(self.evolved(f.type)) for f in t]
        for name in set(self.rng.sample(NAMES, 2)) - {f.name for f in t}:
            at = self.rng.randrange(len(fields) + 1)
            fields.insert(at, pa.field(name, self.type(1), nullable=True))
        return pa.struct(fields)

    # --- values ------------------------------------------------------------------------------------

    def value(self, field: pa.Field) -> Any:
        if pa.types.is_null(field.type) or (field.nullable and self.rng.random() < 0.25):
            return None
        return self.present(field.type)

    def present(self, t: pa.DataType) -> Any:
        """A value that is not null."""
        is_, choice = pa.types, self.rng.choice
        if is_.is_struct(t):
            return tuple(self.value(f) for f in t)
        if is_.is_list(t):
            return tuple(self.value(t.value_field) for _ in range(choice([0, 1, 1, 2, 3])))
        if is_.is_boolean(t):
            return choice([False, True])
        if is_.is_floating(t):
            return choice([0.0, -0.0, 1.5, -1.5, NAN, math.inf, -math.inf])
        if is_.is_string(t) or is_.is_large_string(t):
            return choice(TEXTS)
        if is_.is_fixed_size_binary(t):
            n = t.byte_width
            return choice([bytes(n), b"\xff" * n, b"a" * n, b"a" * (n - 1) + b"b"])
        if is_.is_binary(t) or is_.is_large_binary(t):
            return choice(BYTES)
        if is_.is_decimal(t):
            most = 10**t.precision - 1
            return _decimal(choice([0, 1, -1, 2, most, -most]), t.scale)
        if is_.is_temporal(t):
            return choice(self._moments(t))
        low, high = (0, 2**t.bit_width - 1)
        if is_.is_signed_integer(t):
            low, high = -(2 ** (t.bit_width - 1)), 2 ** (t.bit_width - 1) - 1
        return choice([low, high, 0, 1, max(low, -1), 2])

    def _moments(self, t: pa.DataType) -> list[int]:
        if pa.types.is_time(t):
            day = 86400 * {"s": 1, "ms": 10**3, "us": 10**6}[t.unit]
            return [0, 1, day - 1]
        if pa.types.is_date32(t):
            return [0, -1, 1, 20000, *([2**31 - 1, -(2**31)] if self.far else [])]
        near = [0, 1, -1, 1761440400, 1761444000 * 10**3]  # the clocks of a zone go back between
        most = (2**63 - 1) // 1000 if t.unit == "s" else 2**63 - 1
        if pa.types.is_timestamp(t) and t.unit == "s":
            near = near[:-1]
        return near + ([most, -most] if self.far else [])

    # --- Arrow data --------------------------------------------------------------------------------

    def array(self, field: pa.Field, values: Sequence[Any]) -> pa.Array:
        """The values in some layout: a slice, another type of the same meaning, anything below nulls."""
        before, after = self.rng.choice([(0, 0), (0, 0), (0, 3), (5, 0), (9, 2)])
        more = [self.value(field) for _ in range(before + after)]
        array = self._array(field, [*more[:before], *values, *more[before:]])
        return array.slice(before, len(values)) if more else array

    def _array(self, field: pa.Field, values: Sequence[Any]) -> pa.Array:
        is_, t = pa.types, field.type
        if is_.is_null(t):
            return pa.nulls(len(values))
        there = [v is not None for v in values]
        full = [self.present(t) if v is None else v for v in values]
        if is_.is_struct(t):
            columns = [[v[i] for v in full] for i in range(t.num_fields)]
            children = [self.array(f, column) for f, column in zip(t, columns, strict=True)]
            kind = pa.struct([f.with_type(c.type) for f, c in zip(t, children, strict=True)])
            return pa.Array.from_buffers(kind, len(values), [self._valid(there)], children=children)
        if is_.is_list(t):
            return self._list(t, full, there)
        return self._leaf(t, full, there)

    def _list(self, t: pa.DataType, full: Sequence[Any], there: list[bool]) -> pa.Array:
        ends = [0]
        for value in full:
            ends.append(ends[-1] + len(value))
        elements = self.array(t.value_field, [e for value in full for e in value])
        f, valid, n = t.value_field.with_type(elements.type), self._valid(there), len(full)
        way = self.rng.randrange(6)
        if way == 0:
            return pa.Array.from_buffers(
                pa.large_list(f), n, [valid, _packed("q", ends)], children=[elements]
            )
        if way == 1:
            places = [_packed("i", ends[:-1]), _packed("i", list(map(len, full)))]
            return pa.Array.from_buffers(pa.list_view(f), n, [valid, *places], children=[elements])
        lengths = set(map(len, full))
        if way == 2 and len(lengths) == 1:
            return pa.Array.from_buffers(pa.list_(f, lengths.pop()), n, [valid], children=[elements])
        return pa.Array.from_buffers(pa.list_(f), n, [valid, _packed("i", ends)], children=[elements])

    def _leaf(self, t: pa.DataType, full: Sequence[Any], there: list[bool]) -> pa.Array:
        array = stored_array(t, full)
        is_ = pa.types
        other = {pa.string(): pa.string_view(), pa.large_string(): pa.string(), pa.binary(): pa.binary_view()}
        if t in other and self.rng.random() < 0.3:
            array = array.cast(other[t])
        array = pa.Array.from_buffers(array.type, len(array), [self._valid(there), *array.buffers()[1:]])
        way = self.rng.randrange(8)
        if way == 0 and not is_.is_boolean(t) and not is_.is_string_view(array.type):
            return array.dictionary_encode() if array.type != pa.binary_view() else array
        if way == 1 and not is_.is_string_view(array.type) and not is_.is_binary_view(array.type):
            return pc.run_end_encode(array) if len(array) else array
        return array

    def _valid(self, there: list[bool]) -> pa.Buffer | None:
        if all(there) and self.rng.random() < 0.7:
            return None
        bits = bytearray(len(there) // 8 + 1)
        for i, is_there in enumerate(there):
            bits[i // 8] |= is_there << (i % 8)
        return pa.py_buffer(bytes(bits))


def _decimal(value: int, scale: int) -> Decimal:
    """Not by arithmetic, which rounds."""
    return Decimal((int(value < 0), tuple(map(int, str(abs(value)))), -scale))


def _packed(code: str, values: Sequence[int]) -> pa.Buffer:
    return pa.py_buffer(struct.pack(f"<{len(values)}{code}", *values))


def stored_array(t: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """A leaf column of these values, none of them null."""
    if pa.types.is_temporal(t):
        return pa.array(values, pa.int32() if t.bit_width == 32 else pa.int64()).view(t)
    return pa.array([math.nan if v is NAN else v for v in values], t)


def scalar(t: pa.DataType, value: Any) -> pa.Scalar:
    """A value of a leaf, perhaps null."""
    return pa.scalar(None, t) if value is None else stored_array(t, [value])[0]


def python_value(t: pa.DataType, value: Any) -> Any:
    """As Python has it; raises `OverflowError` or `ValueError` where it has not."""
    if value is None:
        return None
    if pa.types.is_struct(t):
        return {f.name: python_value(f.type, v) for f, v in zip(t, value, strict=True)}
    if pa.types.is_list(t):
        return [python_value(t.value_type, v) for v in value]
    if pa.types.is_duration(t) and abs(value) > INT_MAX // 2:
        raise OverflowError("Arrow takes no such duration from Python, though it gives it")
    return scalar(t, value).as_py()


def stored(t: pa.DataType, value: Any) -> Any:
    """As it is to be read again: every NaN is `NAN` already, and -0.0 is none."""
    if value is None:
        return None
    if pa.types.is_struct(t):
        return tuple(stored(f.type, v) for f, v in zip(t, value, strict=True))
    if pa.types.is_list(t):
        return tuple(stored(t.value_type, v) for v in value)
    return value + 0.0 if isinstance(value, float) else value


def seen(element: pa.Scalar) -> Any:
    """The value that was read. A -0.0 is text, which no value is equal to."""
    t = element.type
    if not element.is_valid:
        return None
    if pa.types.is_struct(t):
        return tuple(seen(element[i]) for i in range(t.num_fields))
    if pa.types.is_list(t) or pa.types.is_fixed_size_list(t):
        return tuple(map(seen, element.values))
    if pa.types.is_temporal(t):
        return element.value
    value = element.as_py()
    if isinstance(value, float) and (math.isnan(value) or str(value) == "-0.0"):
        return NAN if math.isnan(value) else "-0.0"
    return value


def order(t: pa.DataType, value: Any) -> Any:
    """What sorts as the value does: nulls first, NaN last, text by its bytes."""
    if value is None:
        return (0,)
    if pa.types.is_struct(t):
        return (1, tuple(order(f.type, v) for f, v in zip(t, value, strict=True)))
    if pa.types.is_list(t):
        return (1, tuple(order(t.value_type, v) for v in value))
    if pa.types.is_floating(t):
        return (1, value is NAN, 0.0 if value is NAN else value)
    return (1, value.encode() if isinstance(value, str) else value)


def adapted(old: pa.DataType, new: pa.DataType, value: Any) -> Any:
    """The value in a later or an earlier type: fields that are new are null, those that are gone left out."""
    if value is None or old == new:
        return value
    if pa.types.is_list(old):
        return tuple(adapted(old.value_type, new.value_type, v) for v in value)
    held = {f.name: (f.type, v) for f, v in zip(old, value, strict=True)}
    return tuple(adapted(held[f.name][0], f.type, held[f.name][1]) if f.name in held else None for f in new)


def leaves(path: tuple[str, ...], t: pa.DataType) -> list[tuple[tuple[str, ...], pa.DataType]]:
    """The fields that are no structs, with their paths."""
    if pa.types.is_struct(t):
        return [found for f in t for found in leaves((*path, f.name), f.type)]
    return [(path, t)]


def at(t: pa.DataType, value: Any, path: Sequence[str]) -> Any:
    """What a value has at a path within it."""
    for name in path:
        i = t.get_field_index(name)
        t, value = t.field(i).type, None if value is None else value[i]
    return value
