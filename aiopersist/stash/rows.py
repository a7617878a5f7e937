"""From entries, as users give and get them, to the rows of text that a stash stores, and back.

    entries -> columns of the schema (checked, in bulk) -> texts                   `encode`
    texts -> columns -> times advanced to since, sorted, summed -> entries        `decode`

Keys and values are canonical JSON: equal ones have equal texts, so a database can find and sum them. Some
thousand rows of simple values are checked, written, summed and read without columns, whose kernels take
longer (`_rows_in_python`, `_contents_in_python`).
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import lt
from typing import Any, NamedTuple, TypeVar

import anyio.to_thread

from aiopersist.base.errors import CodecMismatch, Corruption, InvalidUpdate
from aiopersist.base.frontier import TIME_MAX, Antichain
from aiopersist.data.arrays import int64_array, int64_scalar
from aiopersist.data.jsonable import column_from_texts, column_texts
from aiopersist.data.lazy import ipc, pa, pc
from aiopersist.data.refusal import Refusal, short
from aiopersist.data.texts import INT64, texts_of, values_of
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.consolidate import contents, sum_columns
from aiopersist.data.updates.convert import to_table
from aiopersist.stash.errors import StashError
from aiopersist.stash.model import Codecs, StoredRows

T = TypeVar("T")

FEW = 200  # rows that are converted faster than a thread is reached
IN_PYTHON_MAX = 32768  # of more rows Arrow's kernels and polars take less time, and hold no lock


def encode(entries: Iterable[Any], schema: Schema[Any, Any, Any], name: str) -> StoredRows:
    """The entries `((key, val), time, diff)` as rows; `InvalidUpdate` names the entry at fault."""
    try:
        rows = _flat(entries)
        if (converted := _rows_in_python(rows, schema)) is not None:
            return converted
        table = to_table(rows, schema)
    except InvalidUpdate as error:
        reason = str(error).removeprefix(f"row {error.row}: ")
        raise InvalidUpdate(f"collection {name!r}: {reason}", row=error.row) from error
    keys, vals = (column_texts(table.column(column)) for column in ("key", "val"))
    return StoredRows(keys, vals, table.column("time").to_pylist(), table.column("diff").to_pylist())


def encode_key(key: Any, schema: Schema[Any, Any, Any], name: str) -> str:
    """The text of one key; `InvalidUpdate` for a value that is not a key."""
    try:
        return column_texts(schema.key.encode([key]))[0]
    except Refusal as error:
        raise InvalidUpdate(f"collection {name!r}: key: {error.reason}") from error


def decode(rows: StoredRows, schema: Schema[Any, Any, Any], since: int) -> list[Any]:
    """The rows as entries `((key, val), time, diff)`, times advanced to `since`, in the order of (key,
    value, time), summed. `DiffOverflow` for a sum beyond 64 bits."""
    table = _table(rows, schema)
    times = pc.max_element_wise(table.column("time"), int64_scalar(since))
    table = sum_columns(table.set_column(2, table.schema.field("time"), times), schema)
    keys, vals, diffs = _values(table, schema)
    return list(zip(zip(keys, vals, strict=True), table.column("time").to_pylist(), diffs, strict=True))


def decode_at(rows: StoredRows, schema: Schema[Any, Any, Any], time: int) -> list[Any]:
    """The contents at `time`, as `(key, val, diff)` in order."""
    if (sorted_contents := _contents_in_python(_until(rows, time), schema)) is not None:
        return list(zip(sorted_contents.keys, sorted_contents.vals, sorted_contents.diffs, strict=True))
    return list(zip(*_values(contents(_table(_until(rows, time), schema), schema), schema), strict=True))


class Item(NamedTuple):
    """A key and its value, and the text of the value."""

    key: Any
    val: Any
    text: str


def contents_by_key(rows: StoredRows, schema: Schema[Any, Any, Any], time: int, name: str) -> dict[str, Item]:
    """The contents at `time` by the texts of their keys, in order; `StashError` if a key is there twice, or a
    diff is not 1. By texts, since to Python 1 equals True, and NaN does not equal itself."""
    visible = _until(rows, time)
    columns = _contents_in_python(visible, schema) or _contents(visible, schema)
    table: dict[str, Item] = {}
    if set(columns.diffs) <= {1} and len(set(columns.key_texts)) == len(columns.key_texts):
        fields = zip(columns.keys, columns.vals, columns.val_texts, strict=True)
        items: Iterable[Item] = map(tuple.__new__, repeat(Item), fields)  # faster than `Item(...)`
        return dict(zip(columns.key_texts, items, strict=True))
    for key, val, diff, key_text, val_text in zip(*columns, strict=True):
        if diff != 1:
            raise StashError(f"collection {name!r}: key {key!r} has val {val!r} with diff {diff}, not 1")
        if key_text in table:
            raise StashError(f"collection {name!r}: key {key!r} has several vals")
        table[key_text] = Item(key, val, val_text)
    return table


def by_key(table: Mapping[str, Item], name: str) -> dict[Any, Any]:
    """The values by their keys; `StashError` if several keys are equal in Python."""
    vals = {item.key: item.val for item in table.values()}
    if len(vals) < len(table):
        raise StashError(f"collection {name!r}: several of its keys are equal in Python: read it with peek")
    return vals


def check_table(rows: StoredRows, schema: Schema[Any, Any, Any], upper: Antichain, name: str) -> None:
    """`StashError` if a key has several values, or a diff is not 1, at the last time before `upper` or at a
    later time of the rows."""
    last = max((at for at in rows.times if not upper.less_equal(at)), default=-1)
    for time in sorted({last, *(at for at in rows.times if at > last)}):
        try:
            contents_by_key(rows, schema, time, name)
        except StashError as error:
            hint = "do its changes follow from a read before another append? See make_batch, transact"
            raise StashError(f"{error}, after this append, which is refused: {hint}") from None


def codecs(schema: Schema[Any, Any, Any]) -> Codecs:
    """The identities of key and val: readable, and exact (`arrow`, an IPC schema message in base64)."""
    return Codecs(*(_identity(name, schema) for name in ("key", "val")))


def check_codecs(name: str, stored: Codecs, schema: Schema[Any, Any, Any]) -> None:
    """`CodecMismatch` unless the collection is stored with the codecs of `schema`; `Corruption` for
    unreadable ones."""
    asked = codecs(schema)
    if stored == asked:
        return
    try:
        differ = any(map(_differ, stored, asked))
        old, new = (" -> ".join(json.loads(text)["type"] for text in pair) for pair in (stored, asked))
    except (pa.ArrowException, ValueError, LookupError, TypeError, OSError, RecursionError) as error:
        raise Corruption(f"the codecs of collection {name!r} cannot be read: {error}") from error
    if differ:
        raise CodecMismatch(f"{new} (collection {name!r})", old)


async def compute(rows: int, work: Callable[[], T]) -> T:
    """The result of `work` on that many rows; a worker thread computes it, unless they are few."""
    return work() if rows <= FEW else await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


def _flat(entries: Any) -> list[Any]:
    """The entries as rows `(key, val, time, diff)`."""
    if isinstance(entries, str | bytes | dict) or not isinstance(entries, Iterable):
        raise InvalidUpdate(f"{short(entries)} is not an iterable of ((key, val), time, diff)")
    rows = list(entries)
    if _are(rows, 3):
        pairs = [entry[0] for entry in rows]
        if _are(pairs, 2):
            return [(*pair, time, diff) for pair, (_, time, diff) in zip(pairs, rows, strict=True)]
    for row, entry in enumerate(rows):
        if not _are([entry], 3) or not _are([entry[0]], 2):
            raise InvalidUpdate(f"{short(entry)} is not a ((key, val), time, diff)", row=row)
    raise AssertionError("unreachable")


def _are(values: list[Any], length: int) -> bool:
    """Whether all are tuples or lists of that length."""
    kinds = set(map(type, values))
    return all(issubclass(kind, tuple | list) for kind in kinds) and set(map(len, values)) <= {length}


def _table(rows: StoredRows, schema: Schema[Any, Any, Any]) -> pa.Table:
    columns = schema.arrow_schema
    try:
        keys, vals = (
            column_from_texts(texts, columns.field(name).type)
            for name, texts in (("key", rows.keys), ("val", rows.vals))
        )
        numbers = [int64_array(column) for column in (rows.times, rows.diffs)]
        return pa.table([keys, vals, *numbers], columns)
    except (pa.ArrowException, ValueError, TypeError, LookupError, OverflowError) as error:
        raise Corruption(f"a stash holds a text that is not a value of its codec: {error}") from error


class _SortedContents(NamedTuple):
    """Contents as columns, in order."""

    keys: Sequence[Any]
    vals: Sequence[Any]
    diffs: Sequence[int]
    key_texts: Sequence[str]
    val_texts: Sequence[str]


def _contents(rows: StoredRows, schema: Schema[Any, Any, Any]) -> _SortedContents:
    table = contents(_table(rows, schema), schema)
    texts = (column_texts(table.column(column)) for column in ("key", "val"))
    return _SortedContents(*_values(table, schema), *texts)


def _rows_in_python(rows: list[Any], schema: Schema[Any, Any, Any]) -> StoredRows | None:
    """The rows as texts; `None` if there are many, or if one of their values needs a column."""
    if not rows or len(rows) > IN_PYTHON_MAX:
        return None
    keys, vals, times, diffs = zip(*rows, strict=True)
    if set(map(type, times)) | set(map(type, diffs)) != {int}:
        return None
    if min(times) < 0 or max(times) > TIME_MAX or min(diffs) not in INT64 or max(diffs) not in INT64:
        return None
    key_texts = texts_of(schema.key, keys)
    val_texts = None if key_texts is None else texts_of(schema.val, vals)
    return None if key_texts is None or val_texts is None else StoredRows(key_texts, val_texts, times, diffs)


def _contents_in_python(rows: StoredRows, schema: Schema[Any, Any, Any]) -> _SortedContents | None:
    """As `_contents`. `None` for many rows, a key with several values, a sum beyond 64 bits, or values that
    need a column."""
    if not rows or len(rows) > IN_PYTHON_MAX or schema.key.codec.arrow_type not in (pa.string(), pa.int64()):
        return None
    texts: Sequence[tuple[str, str]] = list(zip(rows.keys, rows.vals, strict=True))
    diffs: Sequence[int] = rows.diffs
    if len(set(rows.keys)) < len(rows) or 0 in diffs:
        sums: dict[tuple[str, str], int] = {}
        for pair, diff in zip(texts, diffs, strict=True):
            sums[pair] = sums.get(pair, 0) + diff
        texts, diffs = [pair for pair, total in sums.items() if total], list(filter(None, sums.values()))
        if not texts or min(diffs) not in INT64 or max(diffs) not in INT64:
            return None
    key_texts, val_texts = zip(*texts, strict=True)
    if len(set(key_texts)) < len(key_texts):
        return None
    keys = values_of(schema.key, key_texts)
    vals = None if keys is None else values_of(schema.val, val_texts)
    if keys is None or vals is None:
        return None
    columns: tuple[Sequence[Any], ...] = (keys, vals, diffs, key_texts, val_texts)
    if all(map(lt, keys, keys[1:])):
        return _SortedContents(*columns)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return _SortedContents(*([column[at] for at in order] for column in columns))


def _until(rows: StoredRows, time: int) -> StoredRows:
    return rows if not rows or max(rows.times) <= time else rows.where([at <= time for at in rows.times])


def _values(table: pa.Table, schema: Schema[Any, Any, Any]) -> tuple[list[Any], list[Any], list[int]]:
    keys, vals = schema.key.decode(table.column("key")), schema.val.decode(table.column("val"))
    return keys, vals, table.column("diff").to_pylist()


def _identity(name: str, schema: Schema[Any, Any, Any]) -> str:
    field = schema.arrow_schema.field(name)
    own = {path: codec for path, codec in schema.own.items() if path == name or path.startswith(f"{name}.")}
    arrow = b64encode(pa.schema([field]).serialize().to_pybytes()).decode()
    return json.dumps({"type": schema.to_record()[name], "own": own, "arrow": arrow})


def _differ(stored: str, asked: str) -> bool:
    if stored == asked:
        return False
    old, new = json.loads(stored), json.loads(asked)
    one, other = (ipc.read_schema(pa.py_buffer(b64decode(record["arrow"]))) for record in (old, new))
    return bool(old["own"] != new["own"] or not one.equals(other))
