"""A reader's choice of rows (`where`) and of columns, and the data that it can skip unread.

Columns have dotted names (`val.amount`). If no other column has the name of a field (`amount`), the name of
the field is enough. A condition is a `pyarrow.compute` expression over key and value, so it may be applied
before diffs are summed.

Pruning gives Arrow the bounds of each part as a guarantee, and asks whether the condition can still hold. A
condition that Arrow does not understand prunes nothing. A column with NaN gives no guarantee, since every
comparison with NaN is false. If the condition itself names NaN, which Arrow treats as a number, no float
column gives a guarantee.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from math import isnan
from typing import Any

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.data.arrays import empty_table
from aiopersist.data.jsonable import scalar_from_json
from aiopersist.data.lazy import ds, fs, pa, pc
from aiopersist.data.part.stats import leaf_paths, leaf_types
from aiopersist.data.types.annotations import of_arrow
from aiopersist.data.types.codec import Codec, Field
from aiopersist.data.types.nested import Structs
from aiopersist.data.types.schema import Schema

# Functions of an expression that never make NaN from other values, and what Arrow writes for a field. All
# others may.
_WITHOUT_NAN = {"and", "or", "invert", "is_in", "is_null", "is_valid", "true_unless_null"}
_WITHOUT_NAN |= {"Nested", "Name", "FieldPath"}


def check_where(where: Any, schema: Schema[Any, Any, Any]) -> None:
    """`InvalidUsage` of kind `INVALID_COLUMN` unless `where` is a condition on key and value. The check
    applies it to a row of nulls: an empty table accepts a naive time beside one in a zone."""
    if not isinstance(where, pc.Expression):
        raise _invalid(f"where= is a pyarrow.compute expression, not {type(where).__name__}")
    halves = [schema.arrow_schema.field(name).with_nullable(True) for name in ("key", "val")]
    row = pa.table([pa.nulls(1, half.type) for half in halves], pa.schema(halves))
    try:
        _with_flat(row, schema).filter(where)
    except (pa.ArrowException, ValueError) as e:
        raise _invalid(f"where={_written(where)}: {e}") from e


def apply_where(table: pa.Table, where: Any, schema: Schema[Any, Any, Any]) -> pa.Table:
    """The rows for which the condition is true, not null."""
    names = table.column_names
    try:
        return _with_flat(table, schema).filter(where).select(names)
    except pa.ArrowException as e:  # a division by zero, say
        raise _invalid(f"where={_written(where)}: {e}") from e


def resolve_columns(columns: Sequence[str], schema: Schema[Any, Any, Any]) -> dict[str, tuple[str, ...]]:
    """The path of each column in `columns`. `INVALID_COLUMN` for an unknown, ambiguous or repeated one."""
    wrong = isinstance(columns, str) or not all(isinstance(name, str) for name in columns)
    if wrong or len(set(columns)) < len(columns):
        raise _invalid(f"columns={columns!r} is no list of different names")
    paths_by_name = _names(schema)
    resolved = {}
    for name in columns:
        paths = paths_by_name.get(name, set())
        if len(paths) > 1:
            raise _invalid(f"column {name!r} is ambiguous: it names each of {sorted(paths)}")
        if not paths:
            names = ", ".join(["key", "val", *sorted(flat_names(schema))])
            raise _invalid(f"no column {name!r}; there are {names}")
        (resolved[name],) = paths
    return resolved


def _names(schema: Schema[Any, Any, Any]) -> dict[str, set[tuple[str, ...]]]:
    """The paths that each name may mean: dotted names, and names of fields. Names of fields may have dots, so
    a name may mean several paths."""
    paths = {name: {path} for name, path in flat_names(schema).items()}

    def walk(path: tuple[str, ...], t: pa.DataType) -> None:
        paths.setdefault(".".join(path), set()).add(path)
        for field in t if pa.types.is_struct(t) else ():
            walk((*path, field.name), field.type)

    for half in ("key", "val"):
        walk((half,), schema.arrow_schema.field(half).type)
    return paths


def project(table: pa.Table, paths: Mapping[str, tuple[str, ...]]) -> pa.Table:
    """The columns at the paths, under their names, and `diff`; diffs are not summed (see `sum_columns`)."""
    fields, columns = [], []
    for name, path in paths.items():
        column, nullable = _at(table, path)
        columns.append(column)
        fields.append(pa.field(name, column.type, nullable))
    schema = pa.schema([*fields, table.schema.field("diff")])
    return pa.table([*columns, table.column("diff")], schema)


def decode_projected(
    table: pa.Table, paths: Mapping[str, tuple[str, ...]], schema: Schema[Any, Any, Any]
) -> list[tuple[Any, ...]]:
    """The rows of a projection as values of the schema's types, and `diff`."""
    columns = [_field(path, schema).decode(table.column(name)) for name, path in paths.items()]
    return list(zip(*columns, table.column("diff").to_pylist(), strict=True))


def _field(path: tuple[str, ...], schema: Schema[Any, Any, Any]) -> Field:
    field = schema.key if path[0] == "key" else schema.val
    for name in path[1:]:
        inner = _inner(field.codec, name)
        field = inner._replace(nullable=inner.nullable or field.nullable)
    return field


def _inner(codec: Codec, name: str) -> Field:
    """A field of a struct, which is a `Structs` or the Arrow type of an own codec."""
    if isinstance(codec, Structs):
        return codec.fields[name]
    child = codec.arrow_type.field(name)
    return of_arrow(child.type, nullable=child.nullable)


def flat_names(schema: Schema[Any, Any, Any]) -> dict[str, tuple[str, ...]]:
    """The fields of key and value that can be named without `key.` or `val.`, with their paths."""
    paths: dict[str, list[tuple[str, ...]]] = {}
    for side in ("key", "val"):
        t = schema.arrow_schema.field(side).type
        for field in t if pa.types.is_struct(t) else ():
            paths.setdefault(field.name, []).append((side, field.name))
    columns = {"key", "val", "time", "diff"}
    return {name: same[0] for name, same in paths.items() if len(same) == 1 and name not in columns}


def prune(
    where: Any, records: Sequence[Mapping[str, Any] | None], schema: Schema[Any, Any, Any]
) -> list[bool]:
    """For each record of statistics, in stored form, whether its data may have matching rows. `None` prunes
    nothing, nor does a column that a record lacks. `schema` is that of the data or an evolved one."""
    types = leaf_types(schema)
    if set(re.findall(r"\bnan\b|(?<=\b)\w+(?=\()", _written(where))) - _WITHOUT_NAN:
        types = {name: t for name, t in types.items() if not pa.types.is_floating(t)}
    leaves = [(name, leaf_paths(schema)[name], types[name]) for name in types]
    flat = {path: name for name, path in flat_names(schema).items()}
    return may_match(where, [_guarantee(record or {}, leaves, flat) for record in records], schema)


def may_match(where: Any, guarantees: Sequence[Any], schema: Schema[Any, Any, Any]) -> list[bool]:
    """For each guarantee, an expression that is true for every row of some data, whether that data may have
    matching rows."""
    layout = ds.ParquetFileFormat()  # never opened: only the expressions matter
    fragments = [
        layout.make_fragment(str(i), fs.LocalFileSystem(), partition_expression=guarantee)
        for i, guarantee in enumerate(guarantees)
    ]
    bindable = _with_flat(empty_table(schema.arrow_schema), schema).schema
    dataset = ds.FileSystemDataset(fragments, bindable, layout)
    try:
        kept = {int(fragment.path) for fragment in dataset.get_fragments(filter=where)}
    except pa.ArrowException:  # Arrow cannot evaluate the condition on bounds
        return [True] * len(guarantees)
    return [i in kept for i in range(len(guarantees))]


def _guarantee(
    record: Mapping[str, Any], leaves: Sequence[tuple[str, tuple[str, ...], Any]], flat: Mapping[Any, str]
) -> Any:
    """An expression that is true for every row of the data with these statistics."""
    facts = []
    for name, path, t in leaves:
        if name not in record or pa.types.is_nested(t) or path[0] == "time":
            continue
        facts += _facts(pc.field(*path), record[name], t)
        if path in flat:
            facts += _facts(pc.field(flat[path]), record[name], t)
    return reduce(lambda a, b: a & b, facts, pc.scalar(True))


def _facts(field: Any, entry: Mapping[str, Any], t: pa.DataType) -> list[Any]:
    low, high = (None if entry[end] is None else scalar_from_json(entry[end], t) for end in ("min", "max"))
    if any(end is not None and pa.types.is_floating(t) and isnan(end.as_py()) for end in (low, high)):
        return []
    bounds = [] if low is None else [field >= low]
    bounds += [] if high is None else [field <= high]
    # One fact per bound: Arrow understands no other form that admits null.
    return [bound | field.is_null() for bound in bounds] if entry["nulls"] else bounds


def _written(where: Any) -> str:
    """The expression as text. Arrow cuts long texts in it, perhaps within a character: then this fails."""
    try:
        return str(where)
    except UnicodeDecodeError:
        return "unknown(...)"


def _with_flat(table: pa.Table, schema: Schema[Any, Any, Any]) -> pa.Table:
    """Key and value, the fields of `flat_names`, then the other columns of the table. In this order a column
    number in a condition means the same column of every table."""
    fields, columns = [], []
    for name, path in {"key": ("key",), "val": ("val",), **flat_names(schema)}.items():
        column, nullable = _at(table, path)
        columns.append(column)
        fields.append(pa.field(name, column.type, nullable))
    for name in table.column_names[2:]:
        columns.append(table.column(name))
        fields.append(table.schema.field(name))
    return pa.table(columns, pa.schema(fields))


def _at(table: pa.Table, path: tuple[str, ...]) -> tuple[Any, bool]:
    """The column at a path, and whether it or a parent may be null."""
    column, field = table.column(path[0]), table.schema.field(path[0])
    nullable = field.nullable
    for name in path[1:]:
        index = field.type.get_field_index(name)
        column, field = pc.struct_field(column, [index]), field.type.field(index)
        nullable = nullable or field.nullable
    return column, nullable


def _invalid(message: str) -> InvalidUsage:
    return InvalidUsage(UsageKind.INVALID_COLUMN, message)
