"""The keys and values of one table, as Python values, as texts, and as columns.

Inside, a key and a value are canonical JSON (`data/jsonable.py`): two texts are equal if and only if the
values are. Python's equality is not that: 1 equals True, and NaN does not equal itself. Values that are
returned are decoded anew, so a caller may change them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aiopersist.base.errors import InvalidUpdate, InvalidUsage, UsageKind, shown
from aiopersist.data.arrays import empty_table, int64_array
from aiopersist.data.jsonable import column_from_texts, column_texts
from aiopersist.data.lazy import pa
from aiopersist.data.refusal import Refusal
from aiopersist.data.texts import reader_of, writer_of
from aiopersist.data.types.encodings import encoded_as, identity
from aiopersist.data.types.exact_keys import are_exact, check_exact
from aiopersist.data.types.nested import Instances, Lists, Structs
from aiopersist.data.types.readable import check_readable
from aiopersist.data.types.schema import Schema, has_lists, plain_types
from aiopersist.data.updates.consolidate import contents
from aiopersist.data.updates.convert import chunks_of, is_arrow, to_table
from aiopersist.data.updates.sizes import check_update_size
from aiopersist.data.updates.tiny import TINY_ROWS, Tiny, tiny

if TYPE_CHECKING:
    from aiopersist.data.types.codec import Field

SURELY_SMALL = 1024 * 1024  # bytes of JSON
FEW_VALUES = 16  # keys or values that are converted faster one by one than as a column

K = TypeVar("K")
V = TypeVar("V")


class TableSchema(Generic[K, V]):
    """See the header."""

    def __init__(self, name: str, key: Any, val: Any) -> None:
        self.name = name
        self._take(Schema(key, val))
        self.identity = identity(self.schema)
        """The identity of its types, whatever the encoding of texts and bytes."""
        for what, field in (("keys", self.schema.key), ("vals", self.schema.val)):
            if field.nullable or pa.types.is_null(field.codec.arrow_type):
                text = f"table {name!r}: its {what} admit None, which stands for absent"
                raise InvalidUsage(UsageKind.INVALID_TYPE, text)
        if not _is_hashable(self.schema.key):
            text = f"table {name!r}: its keys are or hold lists or dicts, which cannot be looked up"
            raise InvalidUsage(UsageKind.INVALID_TYPE, text)

    def encode_as(self, stored: Schema[Any, Any, Any]) -> None:
        """Encode texts and bytes as the table with the schema `stored` does."""
        schema = encoded_as(self.schema, stored)
        if schema is not self.schema:
            self._take(schema)

    def _take(self, schema: Schema[K, V, int]) -> None:
        self.schema = schema
        self._key_text, self._val_text = writer_of(self.schema.key), writer_of(self.schema.val)
        self._has_exact_keys = are_exact(self.schema.key)
        self._val, key = reader_of(self.schema.val), reader_of(self.schema.key)
        self.needs_no_columns = self._val is not None and key is not None
        """Whether most keys and values are converted one by one, without columns."""
        types = plain_types(self.schema)
        self._few = (key, self._val) if key and self._val and types else None
        self.has_lists = has_lists(self.schema.val.codec.arrow_type)
        self.imports_nothing = types is not None and types.encoders is not None
        """Whether columns of its keys and values are made without pandas."""

    # --- in --------------------------------------------------------------------------------------

    def quick_key_text(self, key: Any) -> str | None:
        """The text of one key, unless the key or the values need columns."""
        return self._key_text(key) if self.needs_no_columns else None

    def key_text(self, key: Any) -> str:
        """The text of one key; `InvalidUpdate` for a value that is no key."""
        return self._key_text(key) or self.key_texts([key])[0]

    def key_texts(self, keys: Sequence[Any]) -> list[str]:
        """The texts of the keys, in order."""
        if len(keys) <= FEW_VALUES and all(texts := [*map(self._key_text, keys)]):
            return texts  # type: ignore[return-value]  # none of them is None
        return self._texts("key", self.schema.key, keys)

    def val_text(self, val: Any) -> str:
        """The text of one value; `InvalidUpdate` for a value that is no value."""
        return self._val_text(val) or self._texts("val", self.schema.val, [val])[0]

    def _texts(self, what: str, field: Field, values: Sequence[Any]) -> list[str]:
        try:
            column = field.encode(values)
            if what == "key":
                self._check_exact(values)
            return column_texts(column)
        except Refusal as refusal:
            row = refusal.row if len(values) > 1 else None
            raise InvalidUpdate(f"table {self.name!r}: {what}: {refusal.reason}", row=row) from refusal

    def entries(self, entries: Any, size_max: int) -> dict[str, str]:
        """Values by key, from a mapping, pairs, or Arrow data; the last of several values of a key.
        `InvalidUpdate` for an entry of more than `size_max` bytes."""
        vals: dict[str, str] = {}
        rows = 0
        for chunk in chunks_of(self.pairs(entries)):
            table = self.columns_of(chunk, size_max, rows)
            vals.update(zip(*self.texts(table), strict=True))
            rows += table.num_rows
        return vals

    def pairs(self, entries: Any) -> Any:
        """Entries as `chunks_of` takes them; `InvalidUpdate` if these are no entries."""
        pairs = pairs_of(entries)
        if not is_arrow(pairs) and not isinstance(pairs, Iterable):
            text = f"table {self.name!r}: {shown(entries)} is neither a mapping, nor pairs, nor Arrow data"
            raise InvalidUpdate(text)
        is_flat = is_arrow(pairs) or isinstance(entries, Mapping | str | bytes | bytearray | type)
        return pairs if is_flat else _flattened(pairs)

    def columns_of(self, chunk: Any, size_max: int, row_base: int) -> pa.Table:
        """A chunk of entries as columns `key` and `val`, checked; its first row has the number `row_base`."""
        table = to_table(chunk, self.schema, columns=("key", "val"), row_base=row_base)
        check_update_size(table, size_max, row_base=row_base)
        if is_arrow(chunk):
            self._check_readable(table, row_base)
        else:
            try:
                self._check_exact([row[0] for row in chunk])
            except Refusal as refusal:
                text = f"table {self.name!r}: key: {refusal.reason}"
                raise InvalidUpdate(text, row=row_base + refusal.row) from refusal
        return table

    def _check_exact(self, keys: Sequence[Any]) -> None:
        if not self._has_exact_keys:
            check_exact(self.schema.key, keys)

    def _check_readable(self, table: pa.Table, row_base: int) -> None:
        for name, field in self.columns():
            try:
                check_readable(table.column(name), field)
            except Refusal as refusal:
                text = f"table {self.name!r}: {name}: {refusal.reason}"
                raise InvalidUpdate(text, row=row_base + refusal.row) from refusal

    def texts(self, rows: pa.Table) -> tuple[list[str], list[str]]:
        """The texts of the keys and of the values of a table of columns."""
        return column_texts(rows.column("key")), column_texts(rows.column("val"))

    def changes(self, updates: pa.Table) -> dict[str, str | None]:
        """The new values by key, from updates in any order."""
        net = contents(updates, self.schema)
        keys, vals = self.texts(net)
        diffs = net.column("diff").to_pylist()
        changes: dict[str, str | None] = dict.fromkeys(
            key for key, diff in zip(keys, diffs, strict=True) if diff < 0
        )
        changes.update((key, val) for key, val, diff in zip(keys, vals, diffs, strict=True) if diff > 0)
        return changes

    def entry(self, key: Any, val: Any, size_max: int) -> tuple[str, str]:
        """The texts of one entry, of at most `size_max` bytes; `InvalidUpdate`."""
        entry = self.key_text(key), self.val_text(val)
        self.check_size(*entry, size_max)
        return entry

    def check_size(self, key: str, val: str, size_max: int) -> None:
        """`InvalidUpdate` if the entry is larger than `settings.update_size_max`."""
        if len(key) + len(val) <= min(size_max, SURELY_SMALL) // 4:  # a character has up to four bytes
            return
        check_update_size(self.updates({key: val}, {key: None}, 0), size_max, row_base=0)

    # --- out -------------------------------------------------------------------------------------

    def keys(self, texts: Sequence[str]) -> list[K]:
        """The keys of these texts."""
        return self.schema.key.decode(column_from_texts(texts, self.schema.key.codec.arrow_type))

    def val(self, text: str) -> V:
        """The value of this text, the caller's own."""
        val: V = self.vals([text])[0] if self._val is None else self._val(text)
        return val

    def vals(self, texts: Sequence[str]) -> list[V]:
        """The values of these texts, the caller's own."""
        if self._val is not None and len(texts) <= FEW_VALUES:
            return [*map(self._val, texts)]
        return self.schema.val.decode(column_from_texts(texts, self.schema.val.codec.arrow_type))

    def columns(self) -> tuple[tuple[str, Field], tuple[str, Field]]:
        """The names and fields of the columns of keys and values."""
        return ("key", self.schema.key), ("val", self.schema.val)

    def few_updates(
        self, changes: Mapping[str, str | None], old: Mapping[str, str | None], time: int
    ) -> Tiny | None:
        """`updates` without Arrow; `None` for many keys, or for types that need columns."""
        if self._few is None or not 0 < len(changes) <= TINY_ROWS // 2:
            return None
        key_of, val_of = self._few
        rows = []
        for text, val in changes.items():
            key, old_val = key_of(text), old[text]
            if old_val is not None:
                rows.append((key, val_of(old_val), time, -1))
            if val is not None:
                rows.append((key, val_of(val), time, 1))
        return tiny(rows, self.schema)

    def updates(
        self, changes: Mapping[str, str | None], old: Mapping[str, str | None], time: int
    ) -> pa.Table:
        """The updates that replace the old value of each key by the new one; `None` stands for absent."""
        rows = [(key, val, -1) for key in changes if (val := old[key]) is not None]
        rows += [(key, val, 1) for key, val in changes.items() if val is not None]
        schema = self.schema.arrow_schema
        if not rows:
            return empty_table(schema)
        keys, vals, diffs = zip(*rows, strict=True)
        columns = [
            column_from_texts(keys, schema.field("key").type),
            column_from_texts(vals, schema.field("val").type),
            int64_array([time] * len(keys)),
            int64_array(diffs),
        ]
        return pa.Table.from_arrays(columns, schema=schema)

    def __repr__(self) -> str:
        return f"<TableSchema of table {self.name!r}: {self.schema!r}>"


def _is_hashable(field: Field) -> bool:
    codec = field.codec
    if isinstance(codec, Instances):
        return all(map(_is_hashable, codec.fields.values()))
    return not isinstance(codec, Lists | Structs)


def listed(keys: Iterable[K]) -> list[K]:
    """The keys as a list; `TypeError` for one text, whose characters would pass for keys."""
    if isinstance(keys, str | bytes):
        raise TypeError(f"{shown(keys)} is one key: give a list of keys")
    return list(keys)


def pairs_of(entries: Any) -> Any:
    """The items of a mapping; anything else unchanged."""
    return entries.items() if isinstance(entries, Mapping) else entries


def _flattened(items: Iterable[Any]) -> Iterator[Any]:
    """The items; mappings among them are replaced by their own items."""
    for item in items:
        if type(item) is not tuple and isinstance(item, Mapping):
            yield from item.items()
        else:
            yield item


def has_many(entries: Iterable[Any]) -> bool:
    """Whether its items are mappings or Arrow data: a few of them may be large."""
    first = next(iter(entries), None)
    return isinstance(first, Mapping) or is_arrow(first)
