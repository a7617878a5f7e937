"""How the columns of files become keys and values, and how these become columns. Pure.

- A key that is a struct has a column for each field; any other key is the column `key`.
- A value that is a struct has a column for each field; any other value is the column `val`.
- `diff` has a column where a shard, and no table, is written.

Where that would be ambiguous the struct stays whole, in a column `key` or `val`: a key of one field alone, a
value of one field `val`, or if two columns would have the same name. So what is written as columns can be
read back from them: one column that is named as the key is the key as it is, several are its fields; a single
other column `val` is the value as it is, all others are its fields."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Which columns keys and values have."""

    key: tuple[str, ...]
    val: tuple[str, ...]
    is_key_whole: bool
    is_val_whole: bool

    @classmethod
    def of_columns(cls, columns: Sequence[str], key: Sequence[str]) -> ColumnLayout:
        """That of files with these columns, `diff` aside."""
        val = tuple(name for name in columns if name not in key)
        return cls(tuple(key), val, len(key) == 1, val == ("val",))

    @classmethod
    def of_schema(cls, schema: Schema[Any, Any, Any], others: Sequence[str] = ()) -> ColumnLayout:
        """That of the contents of a shard, beside the columns `others`."""
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
        """The columns `key` and `val` of a table of columns."""
        return pa.table(
            [_whole(table, self.key, self.is_key_whole), _whole(table, self.val, self.is_val_whole)],
            ["key", "val"],
        )

    def parted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns of a batch of `key` and `val`; what else it has comes last."""
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
    """The fields of the columns of a file whose key has these columns. `names`, as far as they are known,
    tell whether a value that is a struct is there as one."""
    keys, val = schema.arrow_schema.field("key"), schema.arrow_schema.field("val")
    if len(key) == 1:
        found = {key[0]: keys}
    else:
        inner = {field.name: field for field in keys.type} if pa.types.is_struct(keys.type) else {}
        found = {name: inner[name] for name in key if name in inner}
    vals = _fields(val)
    if not vals or vals == ("val",) or ("val" in names and "val" not in vals):
        return found | {"val": val}
    return {field.name: field for field in val.type} | found


def in_micros(field: pa.Field) -> pa.Field:
    """The field, with microseconds for nanoseconds: Arrow reads texts with fractions of seconds, and pandas
    writes all instants, in a unit that cannot be stored."""
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
