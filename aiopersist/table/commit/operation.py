"""Operations on tables: their reads and writes, by key. Pure.

An operation runs against `Cells`, which record its reads. It runs again only if these have changed.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from msgspec import Struct

from aiopersist.base.errors import KeyExists
from aiopersist.base.user_functions import call_plain
from aiopersist.table.schema import TableSchema


class Overlay(Struct, eq=False):
    """The values of one table within a group: those of the view, and on top the writes of operations."""

    before: Callable[[str], str | None]
    """The value in the view of a key that operations have named."""
    written: dict[str, str | None] = {}

    def val_of(self, key: str) -> str | None:
        return self.written[key] if key in self.written else self.before(key)


class Cells:
    """The values of one table as one operation sees them."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay
        self.read: dict[str, str | None] = {}
        """The values that the operation has read, by key."""
        self.written: dict[str, str | None] = {}
        """The values that it has written, by key; `None`: deleted."""
        self._size: int | None = None

    def get(self, key: str) -> str | None:
        """The value of a key, as text."""
        if key in self.written:
            return self.written[key]
        self.read[key] = val = self._overlay.val_of(key)
        return val

    @property
    def size(self) -> int:
        """The number of characters of all these."""
        if self._size is None:
            vals = chain(self.written.values(), self.read.values())
            self._size = sum(map(len, self.written)) + sum(map(len, filter(None, vals)))
        return self._size

    @property
    def before(self) -> Iterable[str]:
        """The keys that operations before this one have written in the group."""
        return self._overlay.written


class Conflicted(Exception):  # never leaves the package
    """The reads of a transaction have changed; `keys` has the names of tables and the changed keys."""

    def __init__(self, keys: Sequence[tuple[str, Any]]) -> None:
        super().__init__("the reads of the transaction have changed")
        self.keys = keys


Action: TypeAlias = Callable[..., Any]
"""The function of an operation on the cells of its tables. It may run several times, without other
effects."""


class Put(Struct, frozen=True):
    """Give keys values, or no value."""

    entries: Mapping[str, str | None]

    @property
    def keys(self) -> Collection[str]:
        """The keys that it may read or write."""
        return self.entries.keys()

    def __call__(self, cells: Cells) -> None:
        cells.written.update(self.entries)


class Remove(Struct, frozen=True):
    """Delete keys that have these values; `None`: any value. The result is the number of deleted keys."""

    entries: Mapping[str, str | None]

    @property
    def keys(self) -> Collection[str]:
        return self.entries.keys()

    def __call__(self, cells: Cells) -> int:
        current = {key: cells.get(key) for key in self.entries}
        keys = [key for key, val in current.items() if val is not None and self.entries[key] in (None, val)]
        cells.written.update(dict.fromkeys(keys))
        return len(keys)


class Insert(Struct, frozen=True):
    """Give a key a value, unless it has one."""

    schema: TableSchema[Any, Any]
    key: str
    val: str

    @property
    def keys(self) -> Collection[str]:
        return (self.key,)

    def __call__(self, cells: Cells) -> None:
        if cells.get(self.key) is not None:
            raise KeyExists(self.schema.keys([self.key])[0], table=self.schema.name)
        cells.written[self.key] = self.val


class Revise(Struct, frozen=True):
    """Replace the value of a key by the result of a user's function."""

    schema: TableSchema[Any, Any]
    key: str
    change: Callable[[Any], Any]
    size_max: int

    @property
    def keys(self) -> Collection[str]:
        return (self.key,)

    def __call__(self, cells: Cells) -> Any:
        text = cells.get(self.key)
        old = None if text is None else self.schema.val(text)
        new = call_plain(self.change, old)
        if new is None:
            cells.written[self.key] = None
            return None
        cells.written[self.key] = changed = self.schema.val_text(new)
        self.schema.check_size(self.key, changed, self.size_max)
        return self.schema.val(changed)


class RunOutcome(Struct, eq=False):
    """The outcome of one run of an action."""

    cells: list[Cells]
    """One for each table."""
    result: Any = None
    error: BaseException | None = None

    def is_valid_for(self, overlays: Sequence[Overlay]) -> bool:
        """Whether the reads are the same on these values, and so the outcome."""
        return all(
            overlay.val_of(key) == val
            for cells, overlay in zip(self.cells, overlays, strict=True)
            for key, val in cells.read.items()
        )


def run(action: Action, overlays: Sequence[Overlay]) -> RunOutcome:
    """Run it. If it raises, it writes nothing."""
    cells = list(map(Cells, overlays))
    try:
        return RunOutcome(cells, action(*cells))
    except BaseException as error:  # of one user's function: the other operations go on
        for table_cells in cells:
            table_cells.written.clear()
        return RunOutcome(cells, error=_as_in_a_coroutine(error))


def _as_in_a_coroutine(error: BaseException) -> BaseException:
    """The error, as a coroutine raises it: a future takes no `StopIteration`."""
    if not isinstance(error, StopIteration):
        return error
    raised = RuntimeError("the function raised StopIteration")
    raised.__cause__ = error
    return raised
