"""Reads a page of rows: the contents at a time, or the changes between two times.

Rows come in key order. A page begins at a place: a key, and the number of rows from that key on that were
shown before, since a key may have many values. The statistics of parts show their keys: parts beyond the last
needed key are not fetched, nor row groups before the place. So if the keys of parts do not overlap, a page
costs its own size. If they do, as in a shard that was never compacted, each of these parts is read.

A page takes at most `settings.read_memory_bytes` of memory, even if it skips many rows.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.frontier import Antichain, Time
from aiopersist.client.client import Client
from aiopersist.data.arrays import compared
from aiopersist.data.jsonable import column_texts, from_json, scalar_from_text
from aiopersist.data.lazy import import_all, pa, pc, warm_up
from aiopersist.data.part.keys import at_or_beyond, has_conditions, is_key
from aiopersist.data.part.where_text import parse_where
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.merge import rows_of_last_key
from aiopersist.parts.fetch import Named
from aiopersist.read.cursor import text_of, values_of
from aiopersist.read.snapshot import Snapshot, some_batches
from aiopersist.state.record import HollowPart
from aiopersist.web.rows import (
    Cell,
    Column,
    KeyBounds,
    cells,
    columns_of,
    last_needed,
    parse_key,
    with_prefix,
)

PAGE_ROWS = 50
PAGE_BYTES = 8 * 1024 * 1024  # of values in a page; with larger values, it has fewer rows
KEY_CHARS_MAX = 2048  # of a key in an address
WIDER = 16  # factor of the next estimate, if this one gave too few rows


class RowPlace(NamedTuple):
    """Where a page begins."""

    key: str | None = None
    """As JSON; `None`: at the first row."""
    past: int = 0
    """The number of rows from the key on that lie before the place."""
    rows: int = 0
    """The number of all rows before the place."""

    @property
    def text(self) -> str:
        """The text for an address."""
        return "" if self == RowPlace() else text_of([self.key, self.past, self.rows])

    @classmethod
    def of(cls, text: str) -> RowPlace:
        """From an address; `InvalidUsage` for a wrong text."""
        if not text:
            return cls()
        try:
            return cls._of(values_of(text))
        except (ValueError, TypeError) as error:
            raise InvalidUsage(UsageKind.INVALID_CURSOR, f"after={shown(text, 40)} is no place") from error

    @classmethod
    def _of(cls, values: Any) -> RowPlace:
        key, past, rows = values
        if not isinstance(key, str | None) or not all(type(n) is int and n >= 0 for n in (past, rows)):
            raise ValueError("types")
        return cls(key, past, rows)


EARLIER_CHARS_MAX = 3000  # servers accept addresses of a few thousand characters


class EarlierPages(NamedTuple):
    """The places of the pages before a page, in order."""

    places: tuple[RowPlace, ...] = ()

    def with_page(self, place: RowPlace) -> EarlierPages:
        """These pages and one more. If they are too long for an address, the first ones are left out."""
        longer = EarlierPages((*self.places, place))
        while len(longer.text) > EARLIER_CHARS_MAX:
            longer = EarlierPages(longer.places[1 + len(longer.places) // 8 :])
        return longer

    @property
    def text(self) -> str:
        """The text for an address."""
        return text_of([[*place] for place in self.places]) if self.places else ""

    @classmethod
    def of(cls, text: str) -> EarlierPages:
        """From an address; `InvalidUsage` for a wrong text."""
        try:
            return cls(tuple(map(RowPlace._of, values_of(text)))) if text else cls()
        except (ValueError, TypeError) as error:
            raise InvalidUsage(
                UsageKind.INVALID_CURSOR, f"before={shown(text, 40)} is no list of places"
            ) from error


class Question(NamedTuple):
    """The rows to read."""

    as_of: Time
    since: Time | None = None
    """Read the changes after this time; `None`: read the contents."""
    place: RowPlace = RowPlace()
    how: str = ""
    """How keys are compared with `key`: `from`, `is` or `prefix`; empty for all keys."""
    key: str = ""
    where: str = ""
    """A condition on the rows, as text; empty for none."""
    stream: str = ""
    """A stream of an `Indexed`; empty for a shard."""
    tag: str = ""
    """Read what this tag keeps, which is at `as_of`; empty: read the shard."""


class RowsPage(NamedTuple):
    """A page of rows."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    diffs: tuple[int, ...]
    following: RowPlace | None
    """Where the next page begins; `None` after the last row."""


class RawRows(NamedTuple):
    """The rows from a place on, and their schema."""

    table: pa.Table
    schema: Schema[Any, Any, Any]


def warm_up_reading() -> None:
    """Import modules that the first page needs. It takes a second or two: run it on a thread."""
    warm_up()
    import_all(("polars", "pyarrow.compute", "pyarrow.dataset", "pyarrow.parquet"))


async def read_shard(client: Client, shard: str, question: Question) -> RawRows:
    """The rows of a page, and one more if there is one. `InvalidUsage` for a wrong key."""
    async with client.reader(shard) as reader:
        tag = question.tag or None
        opening = reader.snapshot(None if tag else question.as_of, wait=False, tag=tag)
        async with opening as snapshot:
            return RawRows(await _read_rows(snapshot, question), snapshot._fetch.schema)


def page_of(raw: RawRows, question: Question) -> RowsPage:
    """The page of rows read from its place on; `raw` has at least one row more if there is one."""
    table, schema = raw
    rows = min(table.num_rows, PAGE_ROWS)
    while rows > 1 and table.slice(0, rows).nbytes > PAGE_BYTES:
        rows //= 2
    page, columns = table.slice(0, rows), columns_of(schema)
    following = None if rows == table.num_rows else _place_after(page, question.place, schema)
    diffs = tuple(page.column("diff").to_pylist())
    return RowsPage(columns, tuple(cells(page, columns)), diffs, following)


def _place_after(page: pa.Table, before: RowPlace, schema: Schema[Any, Any, Any]) -> RowPlace:
    """The place after these rows. If the key is too long or has no order, the place `before` with a count."""
    count = page.num_rows
    if has_conditions(schema.key.codec.arrow_type):
        (key,) = column_texts(page.column("key").slice(count - 1))
        if key != before.key and len(key) <= KEY_CHARS_MAX:
            return RowPlace(key, rows_of_last_key(page), before.rows + count)
    return RowPlace(before.key, before.past + count, before.rows + count)


def _key_at(place: RowPlace, t: Any) -> Any:
    assert place.key is not None
    try:
        return scalar_from_text(place.key, t)
    except ValueError as error:
        text = f"after=...: the place is at {shown(place.key, 40)}, which is no key of type {t}"
        raise InvalidUsage(UsageKind.INVALID_CURSOR, text) from error


# --- reading -----------------------------------------------------------------------------------------------


async def _read_rows(snapshot: Snapshot[Any, Any], question: Question) -> pa.Table:
    schema = snapshot._fetch.schema
    start, condition = conditions_of(question, schema)
    missing = PAGE_ROWS + 1
    past, tables = question.place.past, [schema.contents_schema.empty_table()]
    changed = filter(_MayHaveRows(schema, None, None, question.since), snapshot._parts)
    bounds = [_bounds_of(part, schema) for _, part in changed]
    least, estimate, rest = _first_value(start, schema), 2 * missing + past, None
    while True:
        last = last_needed(bounds, least, estimate)
        where = _all_of(condition, rest, _up_to(last, schema))
        may_match = _MayHaveRows(schema, least, last, question.since)
        async with aclosing(some_batches(snapshot, where, question.since, may_match)) as batches:
            async for batch in batches:
                skipped = min(past, batch.num_rows)
                past -= skipped
                tables.append(pa.Table.from_batches([batch.slice(skipped, missing)]))
                missing -= tables[-1].num_rows
                if not missing:
                    break
        if not missing or last is None:
            return pa.concat_tables(tables)
        least, rest, estimate = last, _first_field(schema) > last, estimate * WIDER


@dataclass(frozen=True)
class _MayHaveRows:
    """Selects parts that may have rows of a page."""

    schema: Schema[Any, Any, Any]
    least: Any
    """The least and the greatest first field of keys; `None`: no bound."""
    greatest: Any
    since: Time | None

    def __call__(self, batch_and_part: Named) -> bool:
        batch, part = batch_and_part
        if isinstance(self.since, int) and batch.upper <= Antichain(self.since + 1):
            return False
        bounds = _bounds_of(part, self.schema)
        if self.least is not None and bounds.high is not None and bounds.high < self.least:
            return False
        return self.greatest is None or bounds.low is None or bounds.low <= self.greatest or bounds.nulls > 0


def conditions_of(question: Question, schema: Schema[Any, Any, Any]) -> tuple[Any, Any]:
    """The first key of the rows, if any, and their condition; `InvalidUsage` if one is wrong."""
    where = parse_where(question.where, schema) if question.where else None
    try:
        return _parsed(question, where, schema)
    except ValueError as error:
        text = f"key={shown(question.key)}: {error}"
        raise InvalidUsage(UsageKind.INVALID_COLUMN, text) from error


def _parsed(question: Question, where: Any, schema: Schema[Any, Any, Any]) -> tuple[Any, Any]:
    t = schema.key.codec.arrow_type
    start, conditions = None, [where]
    if question.how and not has_conditions(t):
        raise ValueError(f"keys of type {t} cannot be compared")
    if question.how == "prefix":
        start, condition = with_prefix(question.key, t)
        conditions.append(condition)
    elif question.how:
        start = parse_key(question.key, t)
        conditions.append(is_key(start) if question.how == "is" else at_or_beyond(start))
    if question.place.key is not None:
        start = _key_at(question.place, t)
    if start is not None and question.how != "is":
        conditions.append(at_or_beyond(start))
    return start, _all_of(*conditions)


def _all_of(*conditions: Any) -> Any:
    present = [condition for condition in conditions if condition is not None]
    return reduce(and_, present) if present else None


# --- bounds of keys ----------------------------------------------------------------------------------------


def _first_field_type(schema: Schema[Any, Any, Any]) -> tuple[tuple[str, ...], Any]:
    """The path and the type of the first field of keys."""
    path: tuple[str, ...] = ("key",)
    t = schema.key.codec.arrow_type
    while pa.types.is_struct(t) and t.num_fields:
        path, t = (*path, t.field(0).name), t.field(0).type
    return path, t


def _first_field(schema: Schema[Any, Any, Any]) -> Any:
    return pc.field(*_first_field_type(schema)[0])


def _is_bounded(t: Any) -> bool:
    """Whether Python orders values of the type as Arrow does."""
    is_ = pa.types
    return bool(is_.is_integer(t) or is_.is_string(t) or is_.is_binary(t))


def _up_to(last: Any, schema: Schema[Any, Any, Any]) -> Any:
    """The condition that the first field is at most `last`; nulls come first."""
    return None if last is None else (_first_field(schema) <= last) | ~_first_field(schema).is_valid()


def _first_value(start: Any, schema: Schema[Any, Any, Any]) -> Any:
    if start is None or not _is_bounded(_first_field_type(schema)[1]):
        return None
    for name in _first_field_type(schema)[0][1:]:
        start = start[name] if start.is_valid else start
    return start.as_py() if start.is_valid and not pa.types.is_struct(start.type) else None


def _bounds_of(part: HollowPart, schema: Schema[Any, Any, Any]) -> KeyBounds:
    """The bounds of a part, if it has any."""
    path, t = _first_field_type(schema)
    entry = (part.stats or {}).get(".".join(path))
    if entry is None or not _is_bounded(t):
        return KeyBounds(None, None, part.rows)
    low, high = (None if entry[end] is None else from_json(entry[end], compared(t)) for end in ("min", "max"))
    return KeyBounds(low, high, part.rows, entry["nulls"])
