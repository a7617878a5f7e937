"""From the columns of a DataFrame to the updates of a shard, and to the schema of a new shard.

A column belongs to the field of key or value with the same name in a DataFrame of the shard
(`columns.sources`), ignoring case. Columns are checked before anything runs: unknown columns, missing columns
that are not optional, types with another meaning. Values are checked as they come: forbidden nulls, numbers
that do not fit.

The rows of a deletion are only keys. As updates they need values, which nobody reads: all get the same one
(`neutral`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aiopersist.base.errors import InvalidUpdate, InvalidUsage, UsageKind
from aiopersist.data.lazy import pa
from aiopersist.data.part.flat import ColumnSource, invalid, sources
from aiopersist.data.refusal import Refusal
from aiopersist.data.types.cast import cast_column
from aiopersist.data.types.codec import Field
from aiopersist.data.types.readable import check_readable
from aiopersist.data.types.schema import Schema
from aiopersist.data.valid import check_column
from aiopersist.spark.maps import as_lists, stored_type

FIXED = (
    "the type of a column, and whether it may be null, is fixed when its shard is created (schema= sets it); "
    "later only optional columns can be added (compare_and_evolve_schema)"
)


class Special(NamedTuple):
    """The columns of times and of diffs."""

    time: str | None = None
    diff: str | None = None


NONE = Special()
BOTH = ("key", "val")


class Layout:
    """Turns batches of a DataFrame into updates. Picklable."""

    def __init__(
        self,
        frame: pa.Schema,
        schema: Schema[Any, Any, Any],
        special: Special = NONE,
        at: int = 0,
        *,
        halves: Sequence[str] = BOTH,
    ) -> None:
        """`frame`: the columns of the DataFrame, for the `halves`. Without a column of times all updates are
        at `at`. `INVALID_COLUMN` names a column that does not fit."""
        if schema.time_length is not None:
            text = "Spark writes shards of int times, and this shard has product times"
            raise InvalidUsage(UsageKind.INVALID_TIME, text)
        self.readable = False
        """Whether Python must be able to represent all values, as in a table."""
        self._schema = schema
        self._at = at
        names = _by_lower(frame)
        self._time = _special(special.time, names, frame)
        self._diff = _special(special.diff, names, frame)
        self._halves = tuple(halves)
        self._sources = {name: each for name, each in sources(schema).items() if each.half in halves}
        self._columns = {name: names.get(name.lower()) for name in self._sources}
        self._check_names(frame)
        for name, source in self._sources.items():
            column = self._columns[name]
            if column is None and not source.stored.nullable:
                raise invalid(f"column {name!r} is missing and cannot be null: {FIXED}", name)
            if column is not None:
                _check_type(name, frame.field(column).type, source)

    def _check_names(self, frame: pa.Schema) -> None:
        expected = {*filter(None, self._columns.values()), self._time, self._diff}
        for field in frame:
            if field.name not in expected:
                shown = ", ".join(self._sources)
                text = f"the shard has no column {field.name!r}; it has {shown}: {FIXED}"
                if self._halves != BOTH:
                    text = f"column {field.name!r}: a deletion takes only the columns of the key: {shown}"
                raise invalid(text, field.name)

    def updates(self, batch: pa.RecordBatch) -> pa.Table:
        """The updates of a batch. `InvalidUpdate` names row and column of a value that cannot be stored."""
        rows = batch.num_rows
        halves = [self._half(half, batch) for half in ("key", "val")]
        if self.readable:
            for field, half, name in zip((self._schema.key, self._schema.val), halves, BOTH, strict=True):
                _check_readable(name, half, field)
        if self._time is None:
            times = pa.repeat(pa.scalar(self._at, pa.int64()), rows)
        else:
            times = _cast(self._time, batch.column(self._time), self._schema.arrow_schema.field("time"))
        diffs = (
            pa.repeat(pa.scalar(1, pa.int64()), rows)
            if self._diff is None
            else _cast(self._diff, batch.column(self._diff), self._schema.arrow_schema.field("diff"))
        )
        return pa.table([*halves, times, diffs], ["key", "val", "time", "diff"])

    def _half(self, half: str, batch: pa.RecordBatch) -> Any:
        field = self._schema.arrow_schema.field(half)
        if half not in self._halves:
            return neutral(field, batch.num_rows)
        of_half = [(name, source) for name, source in self._sources.items() if source.half == half]
        if not of_half:
            return pa.nulls(batch.num_rows, field.type)
        columns = [self._column(name, source, batch) for name, source in of_half]
        if of_half[0][1].field is None:
            return columns[0]
        return pa.StructArray.from_arrays(columns, fields=list(field.type))

    def _column(self, name: str, source: ColumnSource, batch: pa.RecordBatch) -> Any:
        column = self._columns[name]
        if column is None:
            return pa.nulls(batch.num_rows, source.stored.type)
        return _cast(column, batch.column(column), source.stored)


def neutral(field: pa.Field, rows: int) -> pa.Array:
    """A column with one value in all rows: null if allowed, otherwise zero bits or empty."""
    t, nulls = field.type, pa.nulls(rows, field.type)
    if field.nullable or pa.types.is_null(t):
        return nulls
    if pa.types.is_struct(t):
        return pa.StructArray.from_arrays([neutral(f, rows) for f in t], fields=list(t))
    if pa.types.is_fixed_size_list(t):
        return pa.FixedSizeListArray.from_arrays(neutral(t.value_field, rows * t.list_size), type=t)
    children = [nulls.values] if pa.types.is_nested(t) else None
    own = nulls.buffers()[1 : 2 if children else None]  # nulls have these bits
    return pa.Array.from_buffers(t, rows, [None, *own], children=children)


def _cast(name: str, column: Any, target: pa.Field) -> Any:
    """The column as stored. Values are checked: text that Spark casts from bytes may be no UTF-8."""
    try:
        check_column(column)
    except Refusal as e:
        raise _refused(name, e) from e
    if pa.types.is_decimal(column.type) and pa.types.is_integer(target.type):
        try:
            column = column.cast(target.type)
        except pa.ArrowInvalid as e:
            raise InvalidUpdate(f"column {name!r}: {e}") from e
    try:
        cast = cast_column(as_lists(column), target)
    except Refusal as e:
        raise _refused(name, Refusal(e.row, f"{e.reason}: {FIXED}")) from e
    return cast.combine_chunks() if cast.num_chunks != 1 else cast.chunk(0)


def _check_readable(name: str, half: Any, field: Field) -> None:
    try:
        check_readable(pa.chunked_array([half]), field)
    except Refusal as e:
        raise _refused(name, e) from e


def _refused(name: str, refusal: Refusal) -> InvalidUpdate:
    return InvalidUpdate(f"column {name!r}: {refusal.reason}", row=refusal.row if refusal.row >= 0 else None)


def _by_lower(frame: pa.Schema) -> dict[str, str]:
    names: dict[str, str] = {}
    for name in frame.names:
        if names.setdefault(name.lower(), name) != name or frame.names.count(name) > 1:
            raise invalid(f"two columns have the name {name!r}", name)
    return names


def _special(name: str | None, names: Mapping[str, str], frame: pa.Schema) -> str | None:
    """The column of times or of diffs."""
    if name is None:
        return None
    column = names.get(name.lower())
    if column is None:
        raise invalid(f"no column {name!r}; the columns are {', '.join(frame.names)}", name)
    if not pa.types.is_integer(frame.field(column).type):
        raise invalid(f"column {name!r} is {frame.field(column).type}, not an integer", name)
    return column


def _check_type(name: str, type_: pa.DataType, source: ColumnSource) -> None:
    """Refuse a type whose values mean something else in the shard."""
    t = stored_type(type_, name, {})
    if pa.types.is_decimal(t) and pa.types.is_uint64(source.stored.type):
        return
    try:
        cast_column(pa.array([], t), source.stored)
    except (Refusal, pa.ArrowException) as e:
        text = f"column {name!r} is {type_}, the shard has {source.stored.type}: {e}: {FIXED}"
        raise invalid(text, name) from e


def schema_of(frame: pa.Schema, keys: Sequence[str], special: Special = NONE) -> Schema[Any, Any, int]:
    """The schema of a new shard for a DataFrame. The key is a struct of the columns `keys`, never null; the
    value is a struct of the others. A single column named `key` or `val` is the key or the value itself.
    `INVALID_COLUMN` for columns that cannot be stored."""
    names = _by_lower(frame)
    special = Special(*(_special(name, names, frame) for name in special))
    rest = [name for name in frame.names if name not in special]
    key_names = []
    for name in keys:
        column = names.get(name.lower())
        if column is None or column not in rest or column in key_names:
            text = f"keys: {name!r} is no column or is named twice; the columns are {', '.join(rest)}"
            raise invalid(text, name)
        key_names.append(column)
    maps: dict[str, str] = {}
    key = _half_of([frame.field(n).with_nullable(False) for n in key_names], "key", maps)
    val = _half_of([frame.field(n) for n in rest if n not in key_names], "val", maps)
    try:
        without_maps: Schema[Any, Any, int] = Schema(key=key, val=val)
    except TypeError as e:
        raise invalid(f"the columns cannot be stored: {e}", "") from e
    return Schema.from_record({**without_maps.to_record(), "codecs": maps})


def _half_of(fields: list[pa.Field], half: str, maps: dict[str, str]) -> Any:
    if not fields:
        return None
    # A single struct stays a field: as the whole half, its fields would be the columns.
    is_whole = len(fields) == 1 and fields[0].name == half and not pa.types.is_struct(fields[0].type)
    shown = [(half if is_whole else f"{half}.{f.name}", f) for f in fields]
    stored = [f.remove_metadata().with_type(_storable(stored_type(f.type, path, maps))) for path, f in shown]
    return stored[0] if is_whole else pa.field(half, pa.struct(stored), nullable=False)


def _storable(t: pa.DataType) -> pa.DataType:
    """The type to store: instants in UTC, text and bytes not in the large types."""
    is_ = pa.types
    if is_.is_struct(t):
        return pa.struct([f.with_type(_storable(f.type)) for f in t])
    if is_.is_list(t):
        return pa.list_(t.value_field.with_type(_storable(t.value_type)))
    if is_.is_timestamp(t):
        return pa.timestamp("us", None if t.tz is None else "UTC")
    if is_.is_large_string(t):
        return pa.string()
    return pa.binary() if is_.is_large_binary(t) else t
