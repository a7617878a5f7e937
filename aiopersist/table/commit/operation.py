"""Operations on one table: what each reads and writes, by key. Pure.

An operation runs against `Cells`, which remember what it read. If that is still so when it would run again,
it need not.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from msgspec import Struct

from aiopersist.base.errors import KeyExists
from aiopersist.base.user_functions import call_plain
from aiopersist.table.schema import TableSchema


class Overlay(Struct, eq=False):
    """The values of one table within a group: those of the view, and on top what operations wrote."""

    before: Callable[[str], str | None]
    """The value of a key in the view, of those that operations have named."""
    written: dict[str, str | None] = {}

    def val_of(self, key: str) -> str | None:
        return self.written[key] if key in self.written else self.before(key)


class Cells:
    """The values of one table as one operation sees them."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay
        self.read: dict[str, str | None] = {}
        """What the operation has read, by key."""
        self.written: dict[str, str | None] = {}
        """What it has written, by key; `None`: deleted."""
        self._size: int | None = None

    def get(self, key: str) -> str | None:
        """The value of a key, as text."""
        if key in self.written:
            return self.written[key]
        self.read[key] = val = self._overlay.val_of(key)
        return val

    @property
    def size(self) -> int:
        """The characters of all that."""
        if self._size is None:
            vals = chain(self.written.values(), self.read.values())
            self._size = sum(map(len, self.written)) + sum(map(len, filter(None, vals)))
        return self._size

    @property
    def before(self) -> Iterable[str]:
        """The keys that operations before this one have written in the group."""
        return self._overlay.written


class Conflicted(Exception):  # never leaves the package
    """What a transaction read is no longer so; `keys` has what changed, with the names of the tables."""

    def __init__(self, keys: Sequence[tuple[str, Any]]) -> None:
        super().__init__("what the transaction read has changed")
        self.keys = keys


Action: TypeAlias = Callable[..., Any]
"""What an operation does: a function of the cells of its tables. It may run several times, and leaves nothing
behind but what it writes."""


class Put(Struct, frozen=True):
    """Give keys values, or no value."""

    entries: Mapping[str, str | None]

    @property
    def keys(self) -> Collection[str]:
        """All that it may read or write."""
        return self.entries.keys()

    def __call__(self, cells: Cells) -> None:
        cells.written.update(self.entries)


class Remove(Struct, frozen=True):
    """Delete keys that have these values; `None`: that have any. The result is how many there were."""

    entries: Mapping[str, str | None]

    @property
    def keys(self) -> Collection[str]:
        return self.entries.keys()

    def __call__(self, cells: Cells) -> int:
        there = {key: cells.get(key) for key in self.entries}
        gone = [key for key, val in there.items() if val is not None and self.entries[key] in (None, val)]
        cells.written.update(dict.fromkeys(gone))
        return len(gone)


class Insert(Struct, frozen=True):
    """Give a key a value, unless it has one."""

    kind: TableSchema[Any, Any]
    key: str
    val: str

    @property
    def keys(self) -> Collection[str]:
        return (self.key,)

    def __call__(self, cells: Cells) -> None:
        if cells.get(self.key) is not None:
            raise KeyExists(self.kind.keys([self.key])[0], table=self.kind.name)
        cells.written[self.key] = self.val


class Revise(Struct, frozen=True):
    """Replace the value of a key by what a user's function makes of it."""

    kind: TableSchema[Any, Any]
    key: str
    change: Callable[[Any], Any]
    size_max: int

    @property
    def keys(self) -> Collection[str]:
        return (self.key,)

    def __call__(self, cells: Cells) -> Any:
        text = cells.get(self.key)
        old = None if text is None else self.kind.val(text)
        new = call_plain(self.change, old)
        if new is None:
            cells.written[self.key] = None
            return None
        cells.written[self.key] = changed = self.kind.val_text(new)
        self.kind.check_size(self.key, changed, self.size_max)
        return self.kind.val(changed)


class RunOutcome(Struct, eq=False):
    """What one run of an action gave."""

    cells: list[Cells]
    """Of each of its tables."""
    result: Any = None
    error: BaseException | None = None

    def is_still_so(self, overlays: Sequence[Overlay]) -> bool:
        """Whether the action would do the same on these values."""
        return all(
            overlay.val_of(key) == val
            for cells, overlay in zip(self.cells, overlays, strict=True)
            for key, val in cells.read.items()
        )


def run(action: Action, overlays: Sequence[Overlay]) -> RunOutcome:
    """Run it. One that raises writes nothing, whatever it raises: a future takes no `StopIteration`."""
    cells = list(map(Cells, overlays))
    try:
        return RunOutcome(cells, action(*cells))
    except BaseException as error:  # of the function of one user: the others go on
        for some in cells:
            some.written.clear()
        return RunOutcome(cells, error=_as_in_a_coroutine(error))


def _as_in_a_coroutine(error: BaseException) -> BaseException:
    if not isinstance(error, StopIteration):
        return error
    raised = RuntimeError("the function raised StopIteration")
    raised.__cause__ = error
    return raised
