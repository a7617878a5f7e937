"""Statistics of parts: the least and greatest value of each leaf column and the number of nulls, by the
dotted name of the leaf (`key`, `val.amount`, `time`, `time.0`, `diff`).

Every value that is not null lies within the bounds, in the order of `updates/order.py`. So NaN is the
greatest value. A long text is cut to a lower bound, or cut and rounded up to an upper bound; if it cannot
be rounded up, there is no upper bound (`None`). Lists have only a count.

Points in time are integers throughout: Arrow's cover more years than Python's. If names of fields have
dots, two leaves may share a dotted name: then neither has statistics.

The stored form is JSON. A budget limits its size: whole columns are dropped, larger ones first. Keys, and
then times and diffs, are dropped last, since readers prune by them most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from json import dumps
from typing import Any, NamedTuple, TypeVar

from aiopersist.base.errors import Corruption
from aiopersist.base.settings import UntrimmableColumns
from aiopersist.data.arrays import compared, empty_table, one
from aiopersist.data.jsonable import from_json, to_json
from aiopersist.data.lazy import pa, pc
from aiopersist.data.types.codec import Field
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.order import row_key
from aiopersist.data.updates.times import components

T = TypeVar("T")

BOUND_BYTES = 256  # texts and bytes in bounds are cut to this length
KEY_ELEMENTS = 32  # lists in `key_lower` are cut to this length: a prefix sorts first

Record = dict[str, Any]
"""The stored form: `{name: {"min": ..., "max": ..., "nulls": n}}`."""


class ColumnStats(NamedTuple):
    """Bounds of one column. `min` and `max` are `None` where there is no bound, or no value."""

    min: Any
    max: Any
    null_count: int


def collect(table: pa.Table | pa.RecordBatch) -> Record:
    """Exact statistics of all columns, with bounds cut."""
    return {name: _of_leaf(leaf) for name, (_, leaf) in _named_leaves(table).items()}


def of_part(
    table: pa.Table | pa.RecordBatch, budget_bytes: int, untrimmable: UntrimmableColumns
) -> Record | None:
    """The statistics of a small part; `None` if they cannot be computed: such a part is never pruned."""
    return if_computable(lambda: trim(collect(table), budget_bytes, untrimmable))


def if_computable(work: Callable[[], T]) -> T | None:
    """The result of `work`, which computes statistics; `None` if it fails. Then the part is written without
    them, since statistics only save work."""
    try:
        return work()
    except (pa.ArrowException, ValueError, TypeError, ArithmeticError):
        return None


def merge(records: Iterable[Record], schema: Schema[Any, Any, Any]) -> Record:
    """The statistics of a part from those of its row groups. A bound that one row group lacks is left out."""
    records = list(records)
    types = leaf_types(schema)
    names = [name for name in records[0] if name in types] if records else []
    merged = {}
    for name in names:
        with _readable(name):
            merged[name] = _merged([r[name] for r in records], types[name])
    return merged


def trim(record: Record, budget_bytes: int, untrimmable: UntrimmableColumns) -> Record:
    """The columns that must stay, and the others that fit in the budget, as JSON."""
    sizes = {name: len(dumps({name: entry}, separators=(",", ":"))) for name, entry in record.items()}
    kept = {name for name in record if untrimmable.should_retain(name)}
    room = budget_bytes - sum(sizes[name] for name in kept)
    for name in sorted(record.keys() - kept, key=lambda n: (_rank(n), sizes[n], n)):
        if sizes[name] > room:
            continue
        kept.add(name)
        room -= sizes[name]
    return {name: entry for name, entry in record.items() if name in kept}


def decode_stats(record: Mapping[str, Any], schema: Schema[Any, Any, Any]) -> dict[str, ColumnStats]:
    """The stored form as values of the schema's types, where a bound is such a value. A bound that Python
    cannot represent is `None`. `Corruption` for anything but a record of statistics."""
    fields, types = _leaf_fields(schema), leaf_types(schema)
    stats = {}
    for name, entry in record.items():
        if name in types:  # a reader's older schema may lack it
            with _readable(name):
                low, high = (_value(entry[end], types[name], fields.get(name)) for end in ("min", "max"))
                stats[name] = ColumnStats(low, high, entry["nulls"])
    return stats


def key_lower(table: pa.Table | pa.RecordBatch) -> Any:
    """A lower bound of the keys of a sorted table with rows, as JSON: the first key, cut if it is long."""
    return to_json(one(_cut_key(table.column("key")[0]), table.schema.field("key").type)[0])


def decode_key_lower(stored: Any, schema: Schema[Any, Any, Any]) -> Any:
    """The bound as a key; `None` if Python cannot represent it. `Corruption` for other JSON."""
    with _readable("key"):
        return _value(stored, schema.arrow_schema.field("key").type, schema.key)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:  # also Arrow's
        raise Corruption(f"the statistics of column {name!r} cannot be read: {error!r}") from error


def leaf_types(schema: Schema[Any, Any, Any]) -> dict[str, pa.DataType]:
    """The Arrow type of every leaf column, by dotted name."""
    leaves = _named_leaves(empty_table(schema.arrow_schema))
    return {name: _bound_type(leaf.type) for name, (_, leaf) in leaves.items()}


def leaf_paths(schema: Schema[Any, Any, Any]) -> dict[str, tuple[str, ...]]:
    """The path of every leaf column, by dotted name."""
    return {name: path for name, (path, _) in _named_leaves(empty_table(schema.arrow_schema)).items()}


def _named_leaves(table: pa.Table | pa.RecordBatch) -> dict[str, tuple[tuple[str, ...], Any]]:
    """The leaf columns with their paths, by dotted name, without leaves that share a name."""
    named: dict[str, list[tuple[tuple[str, ...], Any]]] = {}
    for column in ("key", "val", "time", "diff"):
        for path, leaf in _leaves((column,), table.column(column)):
            named.setdefault(".".join(path), []).append((path, leaf))
    return {name: leaves[0] for name, leaves in named.items() if len(leaves) == 1}


def _bound_type(t: pa.DataType) -> pa.DataType:
    """The type of bounds of values of type `t`: bytes that are cut have no fixed size."""
    is_wide = pa.types.is_fixed_size_binary(t) and t.byte_width > BOUND_BYTES
    return pa.binary() if is_wide else t


def _leaves(path: tuple[str, ...], column: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if pa.types.is_struct(column.type):
        for i, field in enumerate(column.type):
            yield from _leaves((*path, field.name), pc.struct_field(column, [i]))
    elif pa.types.is_fixed_size_list(column.type):
        for i, part in enumerate(components(column)):
            yield (*path, str(i)), part
    else:
        yield path, column


def _of_leaf(leaf: Any) -> dict[str, Any]:
    entry = {"min": None, "max": None, "nulls": leaf.null_count}
    if pa.types.is_nested(leaf.type) or pa.types.is_null(leaf.type) or leaf.null_count == len(leaf):
        return entry
    kept = compared(leaf.type)
    bounds = pc.min_max(leaf if kept == leaf.type else leaf.cast(kept))
    low, high = bounds["min"], bounds["max"]
    if pa.types.is_floating(leaf.type):
        nans, nan = pc.is_nan(leaf), pa.scalar(float("nan"), leaf.type)
        low = nan if pc.all(nans).as_py() else low
        high = nan if pc.any(nans).as_py() else high
    return {**entry, "min": to_json(_cut(low)), "max": to_json(_rounded_up(high))}


def _cut(scalar: Any) -> Any:
    """A lower bound of at most `BOUND_BYTES`."""
    value = scalar.as_py() if _is_long(scalar) else None
    return scalar if value is None else one(_prefix(value), _bound_type(scalar.type))[0]


def _rounded_up(scalar: Any) -> Any:
    """An upper bound of at most `BOUND_BYTES`; null if there is no such bound."""
    if not _is_long(scalar):
        return scalar
    prefix = _prefix(scalar.as_py())
    above = text_above(prefix) if isinstance(prefix, str) else _bytes_above(prefix)
    return one(above, _bound_type(scalar.type))[0]


def _is_long(scalar: Any) -> bool:
    is_, t = pa.types, scalar.type
    varies = is_.is_string(t) or is_.is_binary(t) or is_.is_large_string(t) or is_.is_large_binary(t)
    return bool((varies or is_.is_fixed_size_binary(t)) and scalar.as_buffer().size > BOUND_BYTES)


def _prefix(value: Any) -> Any:
    if isinstance(value, bytes):
        return value[:BOUND_BYTES]
    return value.encode()[:BOUND_BYTES].decode(errors="ignore")  # a character cut in half is left out


def _bytes_above(prefix: bytes) -> bytes | None:
    """The least bytes above all bytes that begin with the prefix."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None


def text_above(prefix: str) -> str | None:
    """As `_bytes_above`, of UTF-8: the last character that has a successor becomes that successor."""
    for end in range(len(prefix), 0, -1):
        code = ord(prefix[end - 1]) + 1
        code = 0xE000 if code == 0xD800 else code  # surrogates are no characters
        if code <= 0x10FFFF:
            return prefix[: end - 1] + chr(code)
    return None


def _cut_key(scalar: Any) -> Any:
    """A Python value at or below the scalar, with long values and lists cut."""
    if not scalar.is_valid:
        return None
    if pa.types.is_struct(scalar.type):
        return {name: _cut_key(child) for name, child in scalar.items()}
    if pa.types.is_list(scalar.type):
        return [_cut_key(element) for element in scalar.values[:KEY_ELEMENTS]]
    if pa.types.is_temporal(scalar.type):  # Python cannot represent every point in time
        return scalar
    return scalar.as_py() if pa.types.is_fixed_size_binary(scalar.type) else _cut(scalar).as_py()


def _merged(entries: list[dict[str, Any]], t: pa.DataType) -> dict[str, Any]:
    ends: dict[str, Any] = {"min": None, "max": None}
    for end, choose in (("min", min), ("max", max)):
        # a row group of nulls has neither bound and removes none; one with a single bound removes the other
        bounded = [e for e in entries if e["min"] is not None or e["max"] is not None]
        values = [e[end] for e in bounded]
        if values and None not in values:
            ends[end] = choose(values, key=lambda v: _order(v, t)) if len(values) > 1 else values[0]
    return {**ends, "nulls": sum(e["nulls"] for e in entries)}


def _order(value: Any, t: pa.DataType) -> Any:
    kept = compared(t)
    table = pa.table([one(from_json(value, kept), kept)], ["key"])
    return row_key(table, 0, ("key",))


def _rank(name: str) -> int:
    """The order in which columns are kept: times and diffs first, then keys, since readers prune by them."""
    return {"time": 0, "diff": 0, "key": 1}.get(name.partition(".")[0], 2)


def _leaf_fields(schema: Schema[Any, Any, Any]) -> dict[str, Field]:
    """The codecs of the leaves of key and value, by dotted name."""
    leaf_fields: dict[str, Field] = {}

    def walk(path: str, field: Field) -> None:
        parts: Mapping[str, Field] = getattr(field.codec, "fields", {})
        if not parts:
            leaf_fields[path] = field
        for name, part in parts.items():
            walk(f"{path}.{name}", part)

    walk("key", schema.key)
    walk("val", schema.val)
    return leaf_fields


def _value(stored: Any, t: pa.DataType, field: Field | None) -> Any:
    """The stored value, decoded by the codec of its field; as a value of its Arrow type if the codec fails
    (a cut name is no member); `None` if Python cannot represent it."""
    try:
        value = from_json(stored, t)
    except (ValueError, OverflowError):
        return None
    if field is None or value is None:
        return value
    try:
        return field.decode(pa.array([value], t))[0]
    except Exception:  # an own codec may raise anything
        return value
