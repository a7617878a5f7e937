"""The order of rows by *codes*: 64-bit numbers that have the order of the values.

A leaf column has one code per row, or several, the most significant first. A number has one code: itself, or
the bits of a float. A text has one code for each eight bytes after the prefix that all texts share, padded
with zeros, and then its length. Nulls are less than all else.

Rows are ordered by the first code; only neighbours that are equal are compared by the next code. So most
tables need one sort of integers, four times as fast as a sort of the values, and the values behind the keys
are seldom read. Sorted runs that follow each other are detected and merged, which takes a tenth of a sort.

The idea is that of normalized keys; see Graefe, "Implementing Sorting in Database Systems" (2006).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from aiopersist.data.arrays import integer_of
from aiopersist.data.lazy import avoids_polars, np, pa, pc, pl
from aiopersist.data.updates.assemble import column_of, numbers
from aiopersist.data.updates.order import row_keys

Array = Any
Codes = Any  # a numpy array of integers or bools
Code = Callable[[Any], Codes]
"""Gives the codes of rows: of an array of row numbers, or of all rows for `None`."""

TEXT_CODES = 6  # of a text; texts that are still equal are ranked by all their bytes
SAMPLE = 1024
SIGN = 1 << 63


def ordered(leaves: Iterable[Array], rows: int) -> tuple[Any, Any]:
    """The order of the rows of these leaves, as row numbers; and for each row but the last whether the next
    one in the order is equal."""
    order, same = np.arange(rows), np.ones(rows - 1, bool)
    is_first = True
    for leaf in leaves:
        for code in _codes(leaf):
            if is_first:
                order, same = _first(order, code(None))
                is_first = False
            else:
                same = _refine(order, same, code)
            if not same.any():
                return order, same
    return order, same


def _first(order: Any, codes: Codes) -> tuple[Any, Any]:
    """The order by these codes, and which neighbours are equal. A few sorted runs are merged."""
    descents = np.count_nonzero(codes[1:] < codes[:-1])
    if descents:
        order = np.argsort(codes, kind="stable" if descents * 64 < len(codes) else None)
        codes = codes[order]
    return order, codes[1:] == codes[:-1]


def _refine(order: Any, same: Any, code: Code) -> Any:
    """Order each group of equal neighbours by the next code. Returns which are still equal."""
    tied = np.zeros(len(order), bool)
    tied[1:] = same
    tied[:-1] |= same
    at = np.flatnonzero(tied)
    begins = np.ones(len(at), bool)
    begins[at > 0] = ~same[at[at > 0] - 1]
    groups, rows = np.cumsum(begins), order[at]
    codes = code(rows)
    within = np.lexsort((codes, groups))
    order[at] = rows[within]
    codes = codes[within]
    still = np.zeros(len(same), bool)
    still[at[:-1]] = ~begins[1:] & (codes[1:] == codes[:-1])
    return still


def _codes(leaf: Array) -> Iterator[Code]:
    """The codes of a leaf."""
    t = leaf.type
    valid = None
    if leaf.null_count:
        valid = _bits(leaf.is_valid())
        yield partial(_at, valid)
    if pa.types.is_temporal(t):
        leaf, t = leaf.view(integer_of(t)), integer_of(t)
    if pa.types.is_list(t):
        yield _ranked(leaf)
    elif pa.types.is_decimal(t):
        yield from _decimal_codes(leaf, valid)
    elif pa.types.is_primitive(t) or pa.types.is_boolean(t):
        yield _number_codes(leaf, valid)
    else:
        yield from _text_codes(leaf, valid)


def _bits(column: Array) -> Any:
    """The values of a column of bools without nulls."""
    data = np.frombuffer(column.buffers()[1], np.uint8)
    bits = np.unpackbits(data, count=column.offset + len(column), bitorder="little")
    return bits[column.offset :].view(bool)


def _at(values: Any, rows: Any) -> Any:
    """The values of these rows; all values for `None`."""
    return values if rows is None else values[rows]


def _number_codes(leaf: Array, valid: Any) -> Code:
    if pa.types.is_boolean(leaf.type):
        values = _bits(leaf if valid is None else pc.fill_null(leaf, False))
        return partial(_at, values)
    values = numbers(leaf)

    def code(rows: Any) -> Codes:
        result = _at(values, rows)
        if values.dtype.kind == "f":  # by their bits: stored floats have one zero, and one NaN, the greatest
            bits = result.astype(np.float64).view(np.int64)
            result = bits ^ ((bits >> 63) & np.int64(2**63 - 1))
        return result if valid is None else np.where(_at(valid, rows), result, 0)

    return code


def _decimal_codes(leaf: Array, valid: Any) -> Iterator[Code]:
    words = np.frombuffer(leaf.buffers()[1], np.uint64, 2 * len(leaf), leaf.offset * 16).reshape(-1, 2)

    def code(word: int, flip: int, rows: Any) -> Codes:
        result = _at(words, rows)[:, word] ^ np.uint64(flip)
        return result if valid is None else np.where(_at(valid, rows), result, 0)

    yield lambda rows: code(1, SIGN, rows)
    yield lambda rows: code(0, 0, rows)


def _text_codes(leaf: Array, valid: Any) -> Iterator[Code]:
    text = _Text(leaf, valid)
    begin = position = text.common_prefix()
    while position < text.longest:
        if position == begin + 8 * TEXT_CODES:
            yield _ranked(leaf)
            return
        yield partial(text.words, position)
        position += 8
    yield text.lengths


class _Text:
    """The bytes of a column of text."""

    def __init__(self, leaf: Array, valid: Any) -> None:
        t = leaf.type
        if pa.types.is_fixed_size_binary(t):
            _, data = leaf.buffers()
            at = np.arange(leaf.offset, leaf.offset + len(leaf) + 1) * t.byte_width
        else:
            _, offsets, data = leaf.buffers()
            is_large = pa.types.is_large_string(t) or pa.types.is_large_binary(t)
            dtype = np.dtype(np.int64 if is_large else np.int32)
            at = np.frombuffer(offsets, dtype, len(leaf) + 1, leaf.offset * dtype.itemsize).astype(np.int64)
        self.start = at[:-1]
        self.length = np.diff(at) if valid is None else np.where(valid, np.diff(at), 0)
        self.longest, self.shortest = int(self.length.max()), int(self.length.min())
        self._greatest = int(self.start.max())
        size = 0 if data is None else data.size
        if size < 8:
            data, size = b"".join([b"" if data is None else data.to_pybytes(), bytes(8)]), size + 8
        self._last = size - 8
        self._words = np.ndarray((size - 7,), "<u8", data, strides=(1,))
        """For each byte, the eight bytes from there on."""

    def words(self, position: int, rows: Any) -> Codes:
        """Eight bytes of each text from the position on; zeros after its end."""
        at = _at(self.start, rows) + position
        if self._greatest + position > self._last:  # fewer than eight bytes are left at the end
            beyond = np.maximum(at - self._last, 0)
            words = self._words[np.minimum(at, self._last)].byteswap()
            words <<= np.minimum(beyond * 8, 63).view("u8")
            words[beyond >= 8] = 0
        else:
            words = self._words[at].byteswap()
        if self.shortest < position + 8:
            left = _at(self.length, rows) - position
            gone = np.clip(64 - left * 8, 0, 63).view("u8")
            words = np.where(left > 0, words >> gone << gone, 0)
        return words

    def lengths(self, rows: Any) -> Codes:
        return _at(self.length, rows)

    def common_prefix(self) -> int:
        """The length of the common prefix; at most that of a sample."""
        step, shared = len(self.start) // SAMPLE, self.shortest
        if step > 1:
            shared = self._shared(np.arange(0, len(self.start), step), shared)
        return self._shared(None, shared)

    def _shared(self, rows: Any, most: int) -> int:
        """How many of the first `most` bytes these rows have in common."""
        set_bits: Any = np.bitwise_or.reduce  # its overloads take no array, in some versions
        for position in range(0, most, 8):
            words = self.words(position, rows)
            differ = int(set_bits(words ^ words[0]))
            if differ:
                return min(position + (64 - differ.bit_length()) // 8, most)
        return most


def _ranked(leaf: Array) -> Code:
    """Codes by a sort of the values: for lists, and for long texts with long common prefixes."""

    def code(rows: Any) -> Codes:
        column = leaf if rows is None else leaf.take(column_of(rows))
        if not pa.types.is_list(column.type):
            rank = pc.rank(column, sort_keys="ascending", tiebreaker="dense")
            return numbers(rank)
        if avoids_polars():
            keys = row_keys(pa.table({"v": column}), ["v"])
            ranks = {key: number for number, key in enumerate(sorted(set(keys)))}
            return np.array([ranks[key] for key in keys], np.int64)
        frame = pl.DataFrame({"v": pl.from_arrow(column)}).with_row_index("row").sort("v", nulls_last=False)
        order = frame["row"].to_numpy()
        differs = frame["v"].ne_missing(frame["v"].shift(1)).to_numpy()
        rank = np.empty(len(order), np.int64)
        rank[order] = np.cumsum(differs)
        return rank

    return code
