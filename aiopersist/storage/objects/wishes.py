"""Wishes as objects: they lie where the floors do, which each commit lists anyway.

The name of a wish says whose it is, for how long its client has waited, and for how long it lasts from when
it is heard: no clock of a bucket is as fine as that. So a handle obeys each name once. A client deletes its
earlier wish when it leaves another one, and a truncation deletes all.
"""

from collections.abc import Iterable, Sequence

from aiopersist.base.runtime import Runtime
from aiopersist.storage.objects.names import WISHES, folder_of
from aiopersist.storage.wishes import HeardWishes, Wish

HEARD_MAX = 1000  # names


class WishObjects(HeardWishes):
    """The wishes of one handle, and those of others that it has heard."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._heard_names: dict[str, None] = {}
        self._own_names: dict[tuple[str, str], str] = {}

    def name(self, key: str, who: str, for_s: float, waited_s: float) -> str:
        """The name of a new wish, which is kept until it is taken."""
        token, waited, lasts = self._runtime.token(), int(1000 * waited_s), int(1000 * for_s)
        name = f"{folder_of(key)}{WISHES}{who}.{token}.{waited}-{lasts}"
        self._own_names[key, who] = name
        return name

    def take(self, keys: Iterable[str], who: str) -> list[str]:
        """The names of what this client has left."""
        return [name for key in keys if (name := self._own_names.pop((key, who), None)) is not None]

    def listed(self, key: str, names: Sequence[str]) -> None:
        """A list shows these wishes for `key`."""
        fresh = [name for name in names if name not in self._heard_names]
        if not fresh:
            return
        self._heard_names.update(dict.fromkeys(fresh))
        while len(self._heard_names) > HEARD_MAX:
            del self._heard_names[next(iter(self._heard_names))]
        self.hear([key], [_wish(key, name) for name in fresh])


def _wish(key: str, name: str) -> Wish:
    """What a name says. An earlier version of the library has left names that say only how long it lasts."""
    owner, _, lasts = name.rpartition("/")[2].removeprefix("~").rpartition("-")
    who, _, rest = owner.partition(".")
    return Wish(key, who, _seconds(lasts), _seconds(rest.rpartition(".")[2]))


def _seconds(text: str) -> float:
    """The milliseconds as seconds; 0 for another text."""
    return int(text) / 1000 if text.isascii() and text.isdigit() and len(text) < 8 else 0.0
