"""A table in memory with a primary key and a uniqueness rule; its changes are then appended. Pure, no I/O.

users = TableTransaction(await USERS.peek_one(stash), lambda a, b: a.email == b.email)
users.insert(7, User(...))
for key, value, diff in users.pending():
    c.append_to_batch(batch, key, value, diff)
"""

import datetime as dt
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from aiopersist.base.user_functions import call_plain
from aiopersist.data.lazy import pa
from aiopersist.data.refusal import Refusal
from aiopersist.data.types.annotations import field_of
from aiopersist.data.updates.order import row_keys
from aiopersist.stash.errors import StashError

K = TypeVar("K")
V = TypeVar("V")


class _Nan(float):
    """NaN that equals itself also where a class compares its fields one by one, as dataclasses do."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = float.__hash__


_NAN = _Nan("nan")
_NATURAL = (str, bytes, int, bool)  # Python orders them as collections do


class TableTransaction(Generic[K, V]):
    """A table that begins with `initial`. `uniqueness_violation(a, b)`, which is symmetric, is true if two
    keys must not have these values at once. Reads see the transaction's own writes.

    A refused call raises `StashError` and changes nothing. `None` is not a val: it says "absent". Vals are
    not copied: replace them, do not change them in place."""

    def __init__(
        self, initial: dict[K, V], uniqueness_violation: Callable[[V, V], bool] | None = None
    ) -> None:
        for key, val in initial.items():
            _check_val(key, val)
        # The caller's entries, by keys that are equal exactly if a collection takes them for equal.
        self._initial: dict[Any, tuple[K, V]] = {comparable(key): (key, val) for key, val in initial.items()}
        self._table = dict(self._initial)
        self._violates = uniqueness_violation
        self._ended = False

    def __repr__(self) -> str:
        return f"<TableTransaction of {len(self._table)} entries{', ended' if self._ended else ''}>"

    def get(self, key: K) -> V | None:
        """The value of a key, or `None`."""
        item = self._now().get(comparable(key))
        return None if item is None else item[1]

    def items(self) -> dict[K, V]:
        """A copy of the table as it is now."""
        return dict(self._now().values())

    def for_values(self, f: Callable[[K, V], Any]) -> None:
        """Call `f(key, val)` for each entry."""
        for key, val in list(self._now().values()):
            call_plain(f, key, val)

    def insert(self, key: K, val: V) -> None:
        """Add an entry; `StashError` if the key is there, or the value violates the rule."""
        _check_val(key, val)
        if comparable(key) in self._now():
            raise StashError(f"key {key!r} is there already: use set or update")
        self._replace({comparable(key): (key, val)})

    def set(self, key: K, val: V | None) -> V | None:
        """Give a key a value, or delete it with `None`. Returns the value it had, or `None`."""
        previous = self.get(key)
        if val is None:
            self._table.pop(comparable(key), None)
        else:
            self._replace({comparable(key): (key, val)})
        return previous

    def update(self, f: Callable[[K, V], V | None]) -> int:
        """Give each entry the value that `f` returns; `None` keeps its value. Returns how many got one. The
        rule is checked on the result, so values may swap."""
        results = [(at, key, call_plain(f, key, val)) for at, (key, val) in list(self._now().items())]
        changes = {at: (key, val) for at, key, val in results if val is not None}
        self._replace(changes)
        return len(changes)

    def delete(self, f: Callable[[K, V], bool]) -> list[tuple[K, V]]:
        """Delete the entries for which `f` is true, and return them in key order."""
        deleted = {at: item for at, item in list(self._now().items()) if call_plain(f, *item)}
        for at in deleted:
            del self._table[at]
        return [deleted[at] for at in in_order(deleted)]

    def pending(self) -> list[tuple[K, V, int]]:
        """End the transaction. Returns the fewest changes `(key, val, diff)` from its first contents to its
        last, in key order, a retraction before an insertion."""
        now, before = self._now(), self._initial
        ordered = in_order(at for at in {**before, **now} if not _same(before.get(at), now.get(at)))
        self._ended = True
        both = [((before.get(at), -1), (now.get(at), 1)) for at in ordered]
        return [(*item, diff) for pair in both for item, diff in pair if item is not None]

    def _end(self) -> list[tuple[K, V]]:
        """End the transaction. Returns its last entries."""
        items = list(self._now().values())
        self._ended = True
        return items

    def _now(self) -> dict[Any, tuple[K, V]]:
        if self._ended:
            raise StashError("the transaction has ended, as pending was called: make a new one")
        return self._table

    def _replace(self, changes: dict[Any, tuple[K, V]]) -> None:
        """Make the changes, unless they violate the rule."""
        if self._violates is not None:
            self._check({**self._table, **changes}, changes, self._violates)
        self._table.update(changes)

    def _check(
        self,
        result: dict[Any, tuple[K, V]],
        changes: dict[Any, tuple[K, V]],
        violates: Callable[[V, V], bool],
    ) -> None:
        checked: set[Any] = set()
        for at, (key, val) in changes.items():
            checked.add(at)
            for other, (its_key, its) in result.items():
                if other not in checked and call_plain(violates, val, its):
                    raise StashError(f"key {key!r}: val {val!r} violates uniqueness: {its_key!r} has {its!r}")


def in_order(keys: Iterable[K]) -> list[K]:
    """The keys in the order of a collection; in Python's order, if no collection could hold them."""
    items = list(keys)
    kinds = {float if kind is _Nan else kind for kind in set(map(type, items))}
    if len(kinds) == 1 and kinds <= set(_NATURAL):
        return sorted(items)  # type: ignore[type-var]  # these have an order
    try:
        ranks = _ranks(items, kinds)
    except (TypeError, Refusal):
        return _sorted(items)
    return [items[position] for position in sorted(range(len(items)), key=ranks.__getitem__)]


def comparable(value: Any) -> Any:
    """The value in a form that is equal in Python exactly if a collection takes it for equal, as far as NaN
    and points in time go, at any depth. In Python NaN does not equal itself; in an hour that clocks repeat,
    two points in time may be equal, or one may differ from itself in another zone."""
    if isinstance(value, float):
        return _NAN if value != value else value
    if isinstance(value, dt.datetime):
        return _in_utc(value)
    if isinstance(value, list | tuple):
        items = list(map(comparable, value))
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, BaseModel):
        changed = _comparable_fields(value.__dict__)
        return value.model_copy(update=changed) if changed else value
    if is_dataclass(value) and type(value).__eq__ is not object.__eq__:  # else a copy is another value
        changed = _comparable_fields({field.name: getattr(value, field.name) for field in fields(value)})
        return _changed(value, changed) if changed else value
    return value


def _in_utc(time: dt.datetime) -> dt.datetime:
    """The same point in time, where its zone is one whose clocks may repeat an hour."""
    if time.utcoffset() is None or isinstance(time.tzinfo, dt.timezone):
        return time
    try:
        return time.astimezone(dt.UTC)
    except OverflowError:  # no year of Python
        return time


def _comparable_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The values that differ in that form."""
    comparables = {name: comparable(value) for name, value in values.items()}
    return {name: value for name, value in comparables.items() if value is not values[name]}


def _changed(instance: Any, changes: dict[str, Any]) -> Any:
    """A copy with these fields; its `__init__` is not called, and it may be frozen."""
    changed = copy(instance)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed


def _sorted(keys: list[K]) -> list[K]:
    try:
        return sorted(keys)  # type: ignore[type-var]  # if these have an order
    except TypeError as error:
        raise StashError(f"the keys have no order: {error}") from error


def _ranks(keys: list[Any], kinds: set[type]) -> list[Any]:
    """A rank per key that compares in a collection's order. `TypeError` or `Refusal` for keys without a
    common codec."""
    classes = kinds - {type(None)}
    if len(classes) > 1:
        raise TypeError(f"keys of several types: {classes}")
    field = field_of(classes.pop() if classes else None, frozen=False)._replace(nullable=True)
    column = pa.table([field.encode(keys)], pa.schema([field.arrow("key")]))
    return row_keys(column, ["key"])


def _same(old: tuple[Any, Any] | None, new: tuple[Any, Any] | None) -> bool:
    """Whether both entries are equal to a collection."""
    return old is new or (old is not None and new is not None and _stored_parts(old) == _stored_parts(new))


def _stored_parts(val: Any) -> Any:
    """The parts of a value that a collection stores, in a form that compares completely: the class of the
    value may compare only some parts. A bool is not an int."""
    if isinstance(val, bool):
        return bool, val
    if isinstance(val, float | dt.datetime):
        return comparable(val)
    if isinstance(val, list | tuple):
        return list(map(_stored_parts, val))
    if isinstance(val, dict):
        return {name: _stored_parts(its) for name, its in val.items()}
    if isinstance(val, BaseModel):
        return _stored_parts(val.__dict__)
    if is_dataclass(val):
        return {field.name: _stored_parts(getattr(val, field.name)) for field in fields(val)}
    return val


def _check_val(key: object, val: object) -> None:
    if val is None:
        raise StashError(f"key {key!r}: None is not a val: it stands for an absent val")
