"""Turns columns of files into keys and values, and keys and values into columns. Pure.

- A key that is a struct has a column for each field; any other key is the column `key`.
- A value that is a struct has a column for each field; any other value is the column `val`.
- A shard that is no table also has a column `diff`.

If this would be ambiguous, the struct stays whole in a column `key` or `val`: a key with a single field, a
value with the single field `val`, or two columns with the same name. So written columns can be read back:
one column of the key is the whole key, several are its fields; a single other column `val` is the whole
value, any others are its fields.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """The columns of keys and values."""

    key: tuple[str, ...]
    val: tuple[str, ...]
    is_key_whole: bool
    is_val_whole: bool

    @classmethod
    def of_columns(cls, columns: Sequence[str], key: Sequence[str]) -> ColumnLayout:
        """The layout of files with these columns, without `diff`."""
        val = tuple(name for name in columns if name not in key)
        return cls(tuple(key), val, len(key) == 1, val == ("val",))

    @classmethod
    def of_schema(cls, schema: Schema[Any, Any, Any], others: Sequence[str] = ()) -> ColumnLayout:
        """The layout of the contents of a shard that are written beside the columns `others`."""
        keys, vals = (_fields(schema.arrow_schema.field(half)) for half in ("key", "val"))
        if len(keys) < 2 or {*keys} & {"val", *others}:
            keys = ()
        key = keys or ("key",)
        if vals == ("val",) or {*vals} & {*key, *others}:
            vals = ()
        return cls(key, vals or ("val",), not keys, not vals)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns."""
        return self.key + self.val

    def schema(self, columns: pa.Schema) -> Schema[Any, Any, Any]:
        """The schema of a new shard for files with these columns: keys are never null."""
        key, val = (
            columns.field(names[0])
            if is_whole
            else pa.field("", pa.struct([columns.field(n) for n in names]))
            for names, is_whole in ((self.key, self.is_key_whole), (self.val, self.is_val_whole))
        )
        return Schema(_never_null(key), val.with_nullable(self.is_val_whole and pa.types.is_null(val.type)))

    def joined(self, table: pa.Table) -> pa.Table:
        """The columns `key` and `val`, made of a table of columns."""
        return pa.table(
            [_whole(table, self.key, self.is_key_whole), _whole(table, self.val, self.is_val_whole)],
            ["key", "val"],
        )

    def parted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns of files, made of a batch of `key` and `val`; its other columns come last."""
        arrays: list[Any] = []
        fields: list[Any] = []
        for half, names, is_whole in (
            ("key", self.key, self.is_key_whole),
            ("val", self.val, self.is_val_whole),
        ):
            column, field = batch.column(half), batch.schema.field(half)
            arrays += [column] if is_whole else column.flatten()
            fields += [field] if is_whole else [field.type.field(name) for name in names]
        others = [name for name in batch.schema.names if name not in ("key", "val")]
        arrays += [batch.column(name) for name in others]
        fields += [batch.schema.field(name) for name in others]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def columns_in(
    schema: Schema[Any, Any, Any], key: Sequence[str], names: Collection[str] = ()
) -> dict[str, pa.Field]:
    """The fields of the columns of a file whose key has the columns `key`. `names`: the columns of the file,
    if known; they tell whether a value that is a struct is written whole."""
    keys, val = schema.arrow_schema.field("key"), schema.arrow_schema.field("val")
    if len(key) == 1:
        fields = {key[0]: keys}
    else:
        inner = {field.name: field for field in keys.type} if pa.types.is_struct(keys.type) else {}
        fields = {name: inner[name] for name in key if name in inner}
    vals = _fields(val)
    if not vals or vals == ("val",) or ("val" in names and "val" not in vals):
        return fields | {"val": val}
    return {field.name: field for field in val.type} | fields


def in_micros(field: pa.Field) -> pa.Field:
    """The field, with microseconds for nanoseconds, which cannot be stored. Arrow reads fractions of seconds
    as nanoseconds, and pandas writes all instants in them."""
    of = field.type
    if pa.types.is_timestamp(of) and of.unit == "ns":
        return field.with_type(pa.timestamp("us", of.tz))
    return field


def _fields(half: pa.Field) -> tuple[str, ...]:
    """The names of the fields of a struct that is never null."""
    parts = pa.types.is_struct(half.type) and not half.nullable
    return tuple(field.name for field in half.type) if parts else ()


def _never_null(field: pa.Field) -> pa.Field:
    of = field.type
    if pa.types.is_struct(of):
        field = field.with_type(pa.struct([_never_null(inner) for inner in of]))
    return field.with_nullable(False)


def _whole(table: pa.Table, names: Sequence[str], is_whole: bool) -> Any:
    if is_whole:
        return table.column(names[0])
    columns = [table.column(name).combine_chunks() for name in names]
    fields = [pa.field(name, column.type) for name, column in zip(names, columns, strict=True)]
    if not columns:
        return pa.nulls(table.num_rows)
    return pa.StructArray.from_arrays(columns, fields=fields)
