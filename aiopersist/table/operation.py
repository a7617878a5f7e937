"""Operations on one table: what each reads and writes, by key. Pure.

An operation runs against `Cells`, which remember what it read. If that is still so when it would run again,
it need not.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiopersist.errors import KeyExists
from aiopersist.plain import call_plain
from aiopersist.table.kind import Kind


@dataclass(slots=True)
class Overlay:
    """The vals of one table within a group: those of the view, and on top what operations wrote."""

    before: Callable[[str], str | None]
    """The val of a key in the view, of those that operations have named."""
    written: dict[str, str | None] = field(default_factory=dict)

    def val_of(self, key: str) -> str | None:
        return self.written[key] if key in self.written else self.before(key)

    def changes(self) -> dict[str, str | None]:
        """The net changes: a key that has its val again is not among them."""
        return {key: val for key, val in self.written.items() if self.before(key) != val}


class Cells:
    """The vals of one table as one operation sees them."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay
        self.read: dict[str, str | None] = {}
        """What the operation has read, by key."""
        self.written: dict[str, str | None] = {}
        """What it has written, by key; `None`: deleted."""

    def get(self, key: str) -> str | None:
        """The val of a key, as text."""
        if key in self.written:
            return self.written[key]
        self.read[key] = val = self._overlay.val_of(key)
        return val

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


@dataclass(frozen=True, slots=True)
class Put:
    """Give keys vals, or no val."""

    entries: Mapping[str, str | None]

    @property
    def keys(self) -> Collection[str]:
        """All that it may read or write."""
        return self.entries.keys()

    def __call__(self, cells: Cells) -> None:
        cells.written.update(self.entries)


@dataclass(frozen=True, slots=True)
class Insert:
    """Give a key a val, unless it has one."""

    kind: Kind[Any, Any]
    key: str
    val: str

    @property
    def keys(self) -> Collection[str]:
        return (self.key,)

    def __call__(self, cells: Cells) -> None:
        if cells.get(self.key) is not None:
            raise KeyExists(self.kind.keys([self.key])[0], table=self.kind.name)
        cells.written[self.key] = self.val


@dataclass(frozen=True, slots=True)
class Revise:
    """Replace the val of a key by what a user's function makes of it."""

    kind: Kind[Any, Any]
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


@dataclass(slots=True)
class RunOutcome:
    """What one run of an action gave."""

    cells: list[Cells]
    """Of each of its tables."""
    result: Any = None
    error: BaseException | None = None

    def is_still_so(self, overlays: Sequence[Overlay]) -> bool:
        """Whether the action would do the same on these vals."""
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
