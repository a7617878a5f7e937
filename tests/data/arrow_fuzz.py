"""Arrow arrays of every type that can be stored, and of every type that is cast to such a type, made of
random buffers: some are sound, some are not, since Arrow itself does not check."""

import struct
from itertools import pairwise
from random import Random
from typing import Any

import pyarrow as pa

LEAVES: list[pa.DataType] = [
    pa.bool_(),
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float32(), pa.float64()),
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(3), pa.binary(300)),
    *(pa.date32(), pa.time32("s"), pa.time32("ms"), pa.time64("us")),
    *(pa.duration("s"), pa.duration("ms"), pa.duration("us")),
    *(pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.timestamp("us"), pa.timestamp("us", "Europe/Paris")),
    *(pa.decimal128(38, 9), pa.decimal128(5, 0), pa.decimal128(5, 5)),
    pa.null(),
]

OTHERS: dict[str, list[pa.DataType]] = {
    "string": [pa.large_string(), pa.string_view()],
    "large_string": [pa.string(), pa.string_view()],
    "binary": [pa.large_binary(), pa.binary_view(), pa.binary(5)],
    "large_binary": [pa.binary(), pa.binary_view()],
    "date32[day]": [pa.date64()],
    "time32[ms]": [pa.time32("s")],
    "time64[us]": [pa.time32("ms"), pa.time64("ns")],
    "duration[us]": [pa.duration("s"), pa.duration("ns")],
    "timestamp[us]": [pa.timestamp("s"), pa.timestamp("ns")],
    "timestamp[ms, tz=UTC]": [pa.timestamp("us", "Asia/Tokyo"), pa.timestamp("s", "UTC")],
    "decimal128(38, 9)": [pa.decimal256(50, 9), pa.decimal128(20, 2)],
    "int64": [pa.int8(), pa.uint64()],
    "double": [pa.float32(), pa.float16(), pa.int32()],
}

TEXTS = [b"", b"a", b"ab", "é".encode(), "😀".encode(), b"z" * 300, b"\x00"]
NO_TEXTS = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"z" * 300 + b"\x80"]


class Fuzz:
    """`wild`: how often a value is any bytes."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.wild = self.rng.choice([0, 0, 0.01, 0.2])

    def stored_type(self, depth: int = 2) -> pa.DataType:
        """A type that a schema may have."""
        if not depth or self.rng.random() < 0.6:
            return self.rng.choice(LEAVES)
        if self.rng.random() < 0.4:
            return pa.list_(self.field("element", depth - 1))
        names = self.rng.sample(["a", "b", "a.b", "key", "é", "a.b.c"], self.rng.choice([1, 2, 3]))
        return pa.struct([self.field(name, depth - 1) for name in names])

    def field(self, name: str, depth: int = 2) -> pa.Field:
        t = self.stored_type(depth)
        return pa.field(name, t, self.maybe() or pa.types.is_null(t))

    def maybe(self) -> bool:
        return self.rng.random() < 0.7

    def array(self, t: pa.DataType, n: int, *, nulls: bool) -> pa.Array:
        """Random values for a column of type `t`, perhaps as a slice, perhaps of another type."""
        if self.rng.random() < 0.3:
            before, after = self.rng.randrange(10), self.rng.randrange(3)
            return self._array(t, before + n + after, nulls).slice(before, n)
        return self._array(t, n, nulls)

    def _array(self, t: pa.DataType, n: int, nulls: bool) -> pa.Array:
        is_ = pa.types
        if self.rng.random() < 0.1 and not is_.is_nested(t) and not is_.is_null(t):
            return self._indirect(t, n)
        if is_.is_struct(t):
            children = [self.array(f.type, n, nulls=f.nullable) for f in t]
            kind = pa.struct([f.with_type(c.type) for f, c in zip(t, children, strict=True)])
            return pa.Array.from_buffers(kind, n, [self._validity(n, nulls)], children=children)
        if is_.is_list(t):
            return self._list(t, n, nulls)
        given = t if self.rng.random() < 0.6 else self.rng.choice(OTHERS.get(str(t), [t]))
        return self._leaf(given, n, nulls)

    def _indirect(self, t: pa.DataType, n: int) -> pa.Array:
        entries = self._leaf(t, 5, nulls=False)
        if self.rng.random() < 0.5:
            at = [-1 if self._is_wild() else self.rng.randrange(5) for _ in range(n)]
            return pa.DictionaryArray.from_arrays(pa.array(at, pa.int8()), entries, safe=False)
        ends = pa.array([n // 5 + 1, n // 4 + 2, n // 3 + 3, n // 2 + 4, n + 5], pa.int32())
        return pa.Array.from_buffers(
            pa.run_end_encoded(ends.type, entries.type), n, [None], 0, 0, [ends, entries]
        )

    def _list(self, t: pa.DataType, n: int, nulls: bool) -> pa.Array:
        f = t.value_field
        if self.rng.random() < 0.1:
            elements = self.array(f.type, 2 * n, nulls=f.nullable)
            kind = pa.list_(f.with_type(elements.type), 2)
            return pa.Array.from_buffers(kind, n, [self._validity(n, nulls)], children=[elements])
        offsets = self._offsets([self.rng.randrange(4) for _ in range(n)])
        elements = self.array(f.type, max(offsets), nulls=f.nullable)
        f = f.with_type(elements.type)
        validity = self._validity(n, nulls)
        if self.rng.random() < 0.1:
            sizes = [b - a for a, b in pairwise(offsets)]
            places = [_pack("i", offsets[:-1]), _pack("i", sizes)]
            return pa.Array.from_buffers(pa.list_view(f), n, [validity, *places], children=[elements])
        kind, code = (pa.large_list(f), "q") if self.rng.random() < 0.2 else (pa.list_(f), "i")
        return pa.Array.from_buffers(kind, n, [validity, _pack(code, offsets)], children=[elements])

    def _leaf(self, t: pa.DataType, n: int, nulls: bool) -> pa.Array:
        is_ = pa.types
        if is_.is_null(t):
            return pa.nulls(n)
        validity = self._validity(n, nulls)
        if is_.is_string_view(t) or is_.is_binary_view(t):
            texts = is_.is_string_view(t)
            return pa.Array.from_buffers(t, n, [validity, *self._views(n, texts)])
        texts = is_.is_string(t) or is_.is_large_string(t)
        if texts or is_.is_binary(t) or is_.is_large_binary(t):
            values = [self._text(texts) for _ in range(n)]
            offsets = self._offsets(list(map(len, values)))
            code = "q" if is_.is_large_string(t) or is_.is_large_binary(t) else "i"
            return pa.Array.from_buffers(
                t, n, [validity, _pack(code, offsets), pa.py_buffer(b"".join(values))]
            )
        if is_.is_boolean(t):
            return pa.Array.from_buffers(t, n, [validity, pa.py_buffer(self.rng.randbytes(n // 8 + 1))])
        data = b"".join(self._value(t) for _ in range(n))
        return pa.Array.from_buffers(t, n, [validity, pa.py_buffer(data)])

    def _value(self, t: pa.DataType) -> bytes:
        is_, rng, width = pa.types, self.rng, t.bit_width // 8
        if is_.is_fixed_size_binary(t) or is_.is_floating(t):
            return rng.choice([bytes(width), b"\xff" * width, rng.randbytes(width)])
        if is_.is_decimal(t):
            high = 10**t.precision - 1
            value = rng.choice([0, 1, -1, high, -high, rng.randint(-high, high)])
            value = rng.choice([high + 1, -high - 1]) if self._is_wild() else value
            return value.to_bytes(width, "little", signed=True)
        if is_.is_time(t):
            day = 86400 * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[t.unit]
            value = rng.choice([-1, day]) if self._is_wild() else rng.choice([0, 1, day - 1])
            return value.to_bytes(width, "little", signed=True)
        if is_.is_date64(t):
            return (86400000 * rng.randrange(-(10**9), 10**9) + self._is_wild()).to_bytes(
                8, "little", signed=True
            )
        least = 0 if is_.is_unsigned_integer(t) else -(1 << (8 * width - 1))
        far = rng.choice(
            [least, least + (1 << (8 * width)) - 1, rng.randrange(least, least + (1 << (8 * width)))]
        )
        value = rng.choice([0, 1, max(-1, least), far])
        return value.to_bytes(width, "little", signed=least < 0)

    def _text(self, texts: bool) -> bytes:
        return self.rng.choice(NO_TEXTS if self._is_wild() or (not texts and self.maybe()) else TEXTS)

    def _views(self, n: int, texts: bool) -> list[pa.Buffer]:
        views, data = b"", b""
        for _ in range(n):
            value = self._text(texts)
            if len(value) <= 12:
                views += struct.pack("<i12s", len(value), value)
            else:
                views += struct.pack("<i4sii", len(value), value[:4], 0, len(data) + 7 * self._is_wild())
                data += value
        return [pa.py_buffer(views), pa.py_buffer(data)]

    def _offsets(self, lengths: list[int]) -> list[int]:
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        if lengths and self._is_wild():
            offsets[self.rng.randrange(len(offsets) - 1)] = self.rng.randrange(offsets[-1] + 1)
        return offsets

    def _validity(self, n: int, nulls: bool) -> pa.Buffer | None:
        if not nulls and not self._is_wild():
            return None
        return self.rng.choice([None, pa.py_buffer(self.rng.randbytes(n // 8 + 1))])

    def _is_wild(self) -> bool:
        return self.rng.random() < self.wild


def _pack(code: str, values: list[int]) -> pa.Buffer:
    return pa.py_buffer(struct.pack(f"<{len(values)}{code}", *values))


def plain(table: pa.Table) -> list[tuple[Any, ...]]:
    """The rows as values that compare: times as the integers that Arrow keeps, every NaN the same."""
    columns = [[_plain(column.type, scalar) for scalar in column] for column in table.columns]
    return list(zip(*columns, strict=True))


def _plain(t: pa.DataType, scalar: Any) -> Any:
    is_ = pa.types
    if not scalar.is_valid:
        return None
    if is_.is_struct(t):
        return tuple(_plain(f.type, scalar[i]) for i, f in enumerate(t))
    if is_.is_list(t):
        return [_plain(t.value_type, element) for element in scalar.values]
    if is_.is_temporal(t):
        return scalar.value
    value = scalar.as_py()
    return "NaN" if value != value else value
