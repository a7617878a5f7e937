"""How the values of one Python type become one Arrow column, and back.

A `Codec` turns a list of values into an array. The Arrow type alone decides a plain codec; those in
`objects.py` add a step before and after. A `Field` adds nullability, as Arrow fields do: a codec of this
package takes `None` among its values, and its field decides whether `None` may be there. A user's codec
never gets `None`.

Values are checked in bulk, at the speed of C: the set of their types is compared with the accepted types.
Only if that fails, the faulty row is searched for. A `Refusal` (row and reason) travels up to the caller that
knows the number of the input row.
"""

from __future__ import annotations

import datetime as dt
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from aiopersist.base.errors import Unsupported
from aiopersist.data.arrays import bool_scalar, made_by_buffers, plain_array
from aiopersist.data.floats import canonical, exact_float, narrowed
from aiopersist.data.lazy import pa, pc
from aiopersist.data.refusal import Refusal, short, unexpected
from aiopersist.data.valid import check_array, null_where_none_may_be

NONE = type(None)
PLAIN_ROWS = 512  # of more values `pa.array` makes a column sooner
PLAIN_BYTES = 1024 * 1024  # of their text: far below the 2 GiB of an array
DEPTH_MAX = 32  # of types within each other: Parquet's readers take 100 levels, of which a list is two


class Codec(ABC):
    """How values of one type are stored. An own codec is a subclass with the class attributes `name` (its
    identity, kept in the shard) and `arrow_type`, given as an instance. It must be thread-safe."""

    name: str
    arrow_type: pa.DataType

    @abstractmethod
    def encode(self, values: Sequence[Any]) -> pa.Array:
        """The values, at least one, as an array of `arrow_type` with one element each. The library copies the
        array before the next call on its thread. Raise any exception to refuse a value."""

    @abstractmethod
    def decode(self, array: pa.Array) -> list[Any]:
        """The values in order, one for each element; there is at least one element."""


class BuiltIn(Codec):
    """A codec of this package: takes `None` among its values, and gets the set of their types."""

    @abstractmethod
    def build(self, values: Sequence[Any], types: set[type]) -> pa.Array:
        """As `encode`; `types` are the types of the values. Raises `Refusal`."""

    def encode(self, values: Sequence[Any]) -> pa.Array:
        return self.build(values, set(map(type, values)))

    def check_stored(self, array: pa.Array) -> None:
        """`Refusal` of the first element of `arrow_type` that `decode` cannot take: Arrow data from outside
        may have values that the Python type lacks."""


class Field(NamedTuple):
    """A codec and whether `None` may stand among its values."""

    codec: Codec
    nullable: bool

    def arrow(self, name: str) -> pa.Field:
        return pa.field(name, self.codec.arrow_type, nullable=self.nullable)

    def encode(self, values: Sequence[Any]) -> pa.Array:
        """The column of the values. Raises `Refusal`."""
        types = set(map(type, values))
        if NONE in types and not self.nullable:
            row = next(i for i, v in enumerate(values) if v is None)
            raise Refusal(row, f"expected {_called(self.codec)}, got None")
        if not isinstance(self.codec, BuiltIn):
            return _encode_own(self.codec, values, has_nulls=NONE in types)
        array = self.codec.build(values, types)
        if array.null_count and array.null_count != sum(v is None for v in values):
            raise self._became_null(values, array)
        return array

    def _became_null(self, values: Sequence[Any], array: pa.Array) -> Refusal:
        """The error of a value that became null in Arrow: a Decimal NaN, a flag without a name."""
        valid = array.is_valid().to_pylist()
        row = next(i for i, v in enumerate(values) if v is not None and not valid[i])
        return Refusal(row, f"{short(values[row])} is no {self.codec.name}")

    def check_stored(self, column: pa.Array | pa.ChunkedArray) -> None:
        """As `BuiltIn.check_stored`. Own codecs are not asked."""
        if not isinstance(self.codec, BuiltIn):
            return
        start = 0
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            try:
                self.codec.check_stored(chunk)
            except Refusal as e:
                raise Refusal(start + e.row, e.reason) from e
            start += len(chunk)

    def decode(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        if isinstance(array, pa.ChunkedArray):
            return [value for chunk in array.chunks for value in self.decode(chunk)]
        if isinstance(self.codec, BuiltIn):
            return self.codec.decode(array)
        if not array.null_count:
            return _decode_own(self.codec, array)
        values = iter(_decode_own(self.codec, array.drop_null()))
        return [next(values) if valid else None for valid in array.is_valid().to_pylist()]


def scatter(array: pa.Array, present: Sequence[bool]) -> pa.Array:
    """The elements of `array` where `present`, nulls elsewhere."""
    positions = iter(range(len(array)))
    return array.take(pa.array([next(positions) if p else None for p in present], pa.int64()))


def first_failure(values: Sequence[Any], attempt: Callable[[Sequence[Any]], object]) -> tuple[int, str]:
    """The first row that makes `attempt` fail, and the reason. `attempt` must fail on all values together."""
    good, bad = 0, len(values)  # a prefix of length `good` passes, one of length `bad` fails
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            attempt(values[good:middle])
            good = middle
        except Exception:
            bad = middle
    try:
        attempt(values[good:bad])
    except Exception as e:
        return good, str(e)
    return good, "refused together with other rows"


def _called(codec: Codec) -> str:
    """The name of the codec's values in Python."""
    return codec.accepted[0].__name__ if isinstance(codec, Plain) else codec.name


class Plain(BuiltIn):
    """A codec that the Arrow type decides. It accepts values of the Python types `accepted`, without loss."""

    def __init__(self, arrow_type: pa.DataType, accepted: tuple[type, ...]) -> None:
        self.name = str(arrow_type)
        self.arrow_type = arrow_type
        self.accepted = accepted
        self.exact = {*accepted, NONE}
        self.floating = pa.types.is_floating(arrow_type)
        self.by_buffers = made_by_buffers(arrow_type) and accepted in ((bytes,), (str,), (int,))

    def build(self, values: Sequence[Any], types: set[type]) -> pa.Array:
        if not types <= self.exact:
            self._check_types(values)
        self._check_values(values)
        convert = self._array if types <= self.exact else self._array_of_any
        try:
            array = convert(values, types)
        except (pa.ArrowException, ArithmeticError, UnicodeError, ValueError, TypeError) as e:
            row, reason = first_failure(values, lambda part: convert(part, types))
            raise Refusal(row, f"{short(values[row])} does not fit {self.name}: {reason}") from e
        return array

    def decode(self, array: pa.Array) -> list[Any]:
        try:
            values: list[Any] = array.to_pylist()
        except (OverflowError, ValueError) as e:  # Arrow's points in time cover more years than Python's
            raise Unsupported(
                f"{self.name} holds values that Python's {self.accepted[0].__name__} cannot ({e}): "
                "read them as Arrow data"
            ) from e
        return values

    def _array_of_any(self, values: Sequence[Any], types: set[type]) -> pa.Array:
        """As `_array`, also for values of subclasses."""
        return self._array([v if type(v) in self.exact else _without_class(v) for v in values], types)

    def _array(self, values: Sequence[Any], types: set[type]) -> pa.Array:
        if self.by_buffers and types == {*self.accepted} and _are_few(values):
            return plain_array(values, self.arrow_type)
        if not self.floating:
            return pa.array(values, self.arrow_type)
        if types - {float, NONE}:
            values = [v if v is None else exact_float(v, self.arrow_type) for v in values]
        return canonical(narrowed(pa.array(values, pa.float64()), self.arrow_type))

    def _check_types(self, values: Sequence[Any]) -> None:
        """Accept subclasses, except those of another meaning: a bool is no int, a datetime is no date."""
        for row, value in enumerate(values):
            wrong = (bool in type(value).__mro__ and bool not in self.accepted) or (
                isinstance(value, dt.datetime) and dt.datetime not in self.accepted
            )
            finer = getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0)  # as pandas has them
            if value is not None and (wrong or finer or not isinstance(value, self.accepted)):
                fine = finer and not wrong and isinstance(value, self.accepted)
                finer_than = f"{short(value)} is finer than {self.name}"
                raise Refusal(row, finer_than if fine else unexpected(value, _called(self)))

    def _check_values(self, values: Sequence[Any]) -> None:
        """Refuse values that Arrow would accept and change."""


def _are_few(values: Sequence[Any]) -> bool:
    """Whether the values, plain ones of one type, are few and short."""
    if len(values) > PLAIN_ROWS:
        return False
    return isinstance(values[0], int) or sum(map(len, values)) <= PLAIN_BYTES


class Moments(Plain):
    """Points in time, times of day and durations. A value finer than the unit is refused, not rounded."""

    def _array(self, values: Sequence[Any], types: set[type]) -> pa.Array:
        return pa.array(values, _in_microseconds(self.arrow_type)).cast(self.arrow_type)


class Times(Moments):
    """Times of day, without a zone."""

    def _check_values(self, values: Sequence[Any]) -> None:
        for row, value in enumerate(values):
            if value is not None and value.tzinfo is not None:
                raise Refusal(row, f"{short(value)} has a time zone")


class Timestamps(Moments):
    """Points in time: aware where the type has a zone (stored as UTC), naive where it has none."""

    def build(self, values: Sequence[Any], types: set[type]) -> pa.Array:
        array = super().build(values, types)
        if self.arrow_type.tz is not None:
            for moment in pc.min_max(array).values():
                self._check_readable(moment, values, array)
        return array

    def _check_values(self, values: Sequence[Any]) -> None:
        zones = {_zone(row, v): v for row, v in enumerate(values) if v is not None}
        naive = {zone for zone, v in zones.items() if v.utcoffset() is None}
        wrong = naive if self.arrow_type.tz else zones.keys() - naive
        fault = "is naive: it has no time zone" if self.arrow_type.tz else "has a time zone"
        if not wrong:  # Arrow would cut off the fraction of such an offset
            wrong = {zone for zone, v in zones.items() if zone not in naive and v.utcoffset().microseconds}
            fault = "is no whole number of seconds from UTC"
        if wrong:
            row = next(i for i, v in enumerate(values) if v is not None and _zone(i, v) in wrong)
            raise Refusal(row, f"{short(values[row])} {fault}")

    def _check_readable(self, moment: pa.Scalar, values: Sequence[Any], array: pa.Array) -> None:
        """Refuse a time that Python cannot represent in the stored zone: at the ends of its years."""
        try:
            moment.as_py()
        except (OverflowError, ValueError) as e:
            row = pc.index(array, moment).as_py()
            raise Refusal(row, f"{short(values[row])} is no {self.name} that can be read again: {e}") from e


def _zone(row: int, value: dt.datetime) -> int:
    """The same number for values of one zone that need not be checked one by one. Zones of dateutil have no
    hash; zones of an application may answer differently for each value."""
    zone = value.tzinfo
    return id(zone) if zone is None or type(zone) in (dt.timezone, ZoneInfo) else -1 - row


class Units(BuiltIn):
    """The one value `None`."""

    name = "null"

    def __init__(self) -> None:
        self.arrow_type = pa.null()

    def build(self, values: Sequence[Any], types: set[type]) -> pa.Array:
        if not types <= {NONE}:
            row = next(i for i, v in enumerate(values) if v is not None)
            raise Refusal(row, f"{short(values[row])} is not None")
        return pa.nulls(len(values))

    def decode(self, array: pa.Array) -> list[Any]:
        return [None] * len(array)


def plain(arrow_type: pa.DataType) -> BuiltIn:
    """The codec of an Arrow type that is not nested; `TypeError` for a type that cannot be stored."""
    is_ = pa.types
    t = arrow_type
    if is_.is_null(t):
        return Units()
    for accepted, applies in _accepted(t):
        if applies:
            return _class_of(t)(t, accepted)
    raise TypeError(f"cannot store {t}")


def _class_of(t: pa.DataType) -> type[Plain]:
    is_ = pa.types
    if is_.is_timestamp(t):
        return Timestamps
    if is_.is_time(t):
        return Times
    return Moments if is_.is_duration(t) else Plain


def check_storable(t: pa.DataType, depth: int = DEPTH_MAX) -> None:
    """`TypeError` for a type of Arrow that Parquet or polars lacks: its values could not be stored or
    sorted."""
    if pa.types.is_nested(t):
        if not depth:
            raise TypeError(f"cannot store more than {DEPTH_MAX} lists and structs within each other")
        for number in range(t.num_fields):
            field = t.field(number)
            if "\0" in field.name:  # Arrow gives names to polars, which end there
                raise TypeError(f"cannot store a field with the name {field.name!r}")
            check_storable(field.type, depth - 1)
    if pa.types.is_decimal(t) and not 0 <= t.scale <= t.precision:
        raise TypeError(f"cannot store {t}: its scale is not in [0, {t.precision}]")
    if pa.types.is_fixed_size_binary(t) and not t.byte_width:
        raise TypeError(f"cannot store {t}: it has no bytes")


def _accepted(t: pa.DataType) -> Iterable[tuple[tuple[type, ...], bool]]:
    is_ = pa.types
    yield (bool,), is_.is_boolean(t)
    yield (int,), is_.is_integer(t)
    yield (float, int), is_.is_float32(t) or is_.is_float64(t)
    yield (str,), is_.is_string(t) or is_.is_large_string(t)
    yield (bytes,), is_.is_binary(t) or is_.is_large_binary(t) or is_.is_fixed_size_binary(t)
    yield (dt.datetime,), is_.is_timestamp(t) and t.unit != "ns"
    yield (dt.date,), is_.is_date32(t)
    yield (dt.time,), is_.is_time(t) and t.unit != "ns"  # Python has no nanoseconds
    yield (dt.timedelta,), is_.is_duration(t) and t.unit != "ns"
    yield (Decimal,), is_.is_decimal128(t)


def _without_class(value: Any) -> Any:
    """The value of a subclass as a value of its Python base class. Arrow would read the text of a decimal,
    which a class may round, and the memory of a moment, where pandas keeps another year. `ValueError` or
    `OverflowError` if the base class has no such value."""
    base = value
    if isinstance(value, Decimal):
        base = Decimal(value)
    elif isinstance(value, dt.datetime):
        day = value.year, value.month, value.day
        time = value.hour, value.minute, value.second, value.microsecond
        base = dt.datetime(*day, *time, tzinfo=value.tzinfo, fold=value.fold)
    elif isinstance(value, dt.timedelta):
        base = dt.timedelta(value.days, value.seconds, value.microseconds)
    if base is not value and base != value and value == value:
        raise ValueError("its class has another value")
    return base


def _in_microseconds(t: pa.DataType) -> pa.DataType:
    """The type in the unit of Python's own values."""
    if pa.types.is_timestamp(t):
        return pa.timestamp("us", t.tz)
    return pa.duration("us") if pa.types.is_duration(t) else pa.time64("us")


def _encode_own(codec: Codec, values: Sequence[Any], *, has_nulls: bool) -> pa.Array:
    present = [v for v in values if v is not None] if has_nulls else values
    try:
        array = _checked(codec, present) if present else pa.array([], codec.arrow_type)
    except Exception as e:  # a codec refuses by raising any exception
        at, reason = first_failure(present, lambda part: _checked(codec, part))
        rows = [i for i, v in enumerate(values) if v is not None] if has_nulls else range(len(values))
        raise Refusal(rows[at], f"codec {codec.name}: {reason}") from e
    return scatter(array, [v is not None for v in values]) if has_nulls else array


def _checked(codec: Codec, values: Sequence[Any]) -> pa.Array:
    array = codec.encode(values)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if array.type != codec.arrow_type or len(array) != len(values):
        raise TypeError(f"gave {len(array)} of {array.type} for {len(values)} of {codec.arrow_type}")
    check_array(array)
    if null_where_none_may_be(array, pa.field("", codec.arrow_type, nullable=False)) is not None:
        raise ValueError("gave null where there may be none")
    return canonical(array.filter(pa.repeat(bool_scalar(True), len(array))))  # a copy


def _decode_own(codec: Codec, array: pa.Array) -> list[Any]:
    values = list(codec.decode(array)) if len(array) else []
    if len(values) != len(array):
        raise TypeError(f"codec {codec.name} gave {len(values)} values for {len(array)} elements")
    return values
