"""A table in memory with a primary key and a uniqueness rule, whose changes are then appended: pure, no I/O.

users = TableTransaction(await USERS.peek_one(stash), lambda a, b: a.email == b.email)
users.insert(7, User(...))
for key, val, diff in users.pending():
    c.append_to_batch(batch, key, val, diff)
"""

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from aiopersist.data.annotations import field_of
from aiopersist.data.lazy import pa
from aiopersist.data.order import row_keys
from aiopersist.data.types import Refusal
from aiopersist.stash.errors import StashError

K = TypeVar("K")
V = TypeVar("V")

_NATURAL = (str, bytes, int, bool)  # Python orders them as collections do


class TableTransaction(Generic[K, V]):
    """A table that begins with `initial`. `uniqueness_violation(a, b)` says, symmetrically, whether the vals
    of two different keys may not be there together. Reads see the transaction's own writes.

    What is refused is a `StashError` and changes nothing. `None` is no val: it says "absent". Vals are not
    copied: make new ones instead of changing those that are there."""

    def __init__(self, initial: dict[K, V], uniqueness_violation: Callable[[V, V], bool]) -> None:
        for key, val in initial.items():
            _check_val(key, val)
        self._initial = dict(initial)
        self._table = dict(initial)
        self._violates = uniqueness_violation
        self._ended = False

    def __repr__(self) -> str:
        return f"<TableTransaction of {len(self._table)} entries{', ended' if self._ended else ''}>"

    def get(self, key: K) -> V | None:
        """The val of a key, or `None`."""
        return self._now().get(key)

    def items(self) -> dict[K, V]:
        """A copy of the table as it is now."""
        return dict(self._now())

    def for_values(self, f: Callable[[K, V], Any]) -> None:
        """Call `f(key, val)` for each entry."""
        for key, val in list(self._now().items()):
            f(key, val)

    def insert(self, key: K, val: V) -> None:
        """Add an entry; refused if the key is there, or the val violates the rule."""
        _check_val(key, val)
        if key in self._now():
            raise StashError(f"key {key!r} is there already")
        self._replace({key: val})

    def set(self, key: K, val: V | None) -> V | None:
        """Give a key a val, or with `None` delete it. The val it had, or `None`."""
        previous = self._now().get(key)
        if val is None:
            self._table.pop(key, None)
        else:
            self._replace({key: val})
        return previous

    def update(self, f: Callable[[K, V], V | None]) -> int:
        """Give each entry for which `f` gives a val that val; how many there were. The rule is checked on the
        result, so vals may swap."""
        given = {key: f(key, val) for key, val in list(self._now().items())}
        changes = {key: val for key, val in given.items() if val is not None}
        self._replace(changes)
        return len(changes)

    def delete(self, f: Callable[[K, V], bool]) -> list[tuple[K, V]]:
        """Delete the entries for which `f` holds, and return them in key order."""
        gone = {key: val for key, val in list(self._now().items()) if f(key, val)}
        for key in gone:
            del self._table[key]
        return [(key, gone[key]) for key in in_order(gone)]

    def pending(self) -> list[tuple[K, V, int]]:
        """End the transaction: the fewest changes `(key, val, diff)` from what it began with to what is
        there, in key order, a retraction before an insertion."""
        now = self._now()
        keys = in_order({**self._initial, **now})
        self._ended = True
        changes = []
        for key in keys:
            old, new = self._initial.get(key), now.get(key)
            if _same(old, new):
                continue
            changes += [(key, val, diff) for val, diff in ((old, -1), (new, 1)) if val is not None]
        return changes

    def _now(self) -> dict[K, V]:
        if self._ended:
            raise StashError("the transaction has ended: `pending` was called")
        return self._table

    def _replace(self, changes: dict[K, V]) -> None:
        """Put the changes in, unless that violates the rule."""
        result = {**self._table, **changes}
        seen: set[K] = set()
        for key, val in changes.items():
            seen.add(key)
            for other, its in result.items():
                if other not in seen and self._violates(val, its):
                    raise StashError(
                        f"key {key!r}: val {val!r} violates uniqueness: key {other!r} has {its!r}"
                    )
        self._table = result


def in_order(keys: Iterable[K]) -> list[K]:
    """The keys in the order of a collection of them; those that no collection could hold in Python's."""
    given = list(keys)
    kinds = set(map(type, given))
    if len(kinds) == 1 and kinds <= set(_NATURAL):
        return sorted(given)  # type: ignore[type-var]  # these have an order
    try:
        ranks = _ranks(given, kinds)
    except (TypeError, Refusal):
        return _sorted(given)
    return [given[position] for position in sorted(range(len(given)), key=ranks.__getitem__)]


def _sorted(keys: list[K]) -> list[K]:
    try:
        return sorted(keys)  # type: ignore[type-var]  # if these have an order
    except TypeError as error:
        raise StashError(f"the keys have no order: {error}") from error


def _ranks(keys: list[Any], kinds: set[type]) -> list[Any]:
    """Per key what compares as a collection orders it. `TypeError` or `Refusal` for keys of no one codec."""
    some = kinds - {type(None)}
    if len(some) > 1:
        raise TypeError(f"keys of several types: {some}")
    field = field_of(some.pop() if some else None, frozen=False)._replace(nullable=True)
    column = pa.table([field.encode(keys)], pa.schema([field.arrow("key")]))
    return row_keys(column, ["key"])


def _same(old: object, new: object) -> bool:
    """As a collection sees it: NaN is itself, a bool is no int."""
    if isinstance(old, bool) is not isinstance(new, bool):
        return False
    return old is new or bool(old == new) or bool(old != old and new != new)


def _check_val(key: object, val: object) -> None:
    if val is None:
        raise StashError(f"key {key!r}: None is no val, it stands for an absent one")
