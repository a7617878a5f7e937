"""Maps of many ids. A changed map shares the unchanged ids with the old one, so a commit does not copy them.

Ids lie in buckets by their hash: few ids in one bucket, many in `_WIDE`. A change copies the list of buckets,
and the buckets that it changes. So to change one of a million ids costs as much as to change one of a
thousand. Values are frozen, and so is the map.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, final

import msgspec

V = TypeVar("V")

_WIDE = 1024  # buckets: among a million ids, a change copies the list of them, and a bucket of a thousand
PAGE_IDS = 1024  # ids in the only bucket, before there are `_WIDE`


@final
class Ids(Mapping[str, V], Generic[V]):
    """A frozen map. In JSON it is an object."""

    __slots__ = ("_buckets", "_len")

    def __init__(self, ids: Mapping[str, V] | None = None) -> None:
        buckets: list[dict[str, V]] = [dict(ids or {})]
        self._len = len(buckets[0])
        self._buckets = _widened(buckets) if self._len > PAGE_IDS else buckets

    @classmethod
    def of(cls, ids: Mapping[str, V]) -> "Ids[V]":
        """`ids` itself if it is an `Ids`, else a copy."""
        return ids if isinstance(ids, Ids) else cls(ids)

    def changed(self, added: Mapping[str, V], dropped: Iterable[str] = ()) -> "Ids[V]":
        """The map with the `added` ids and without the `dropped` ones, which may be absent."""
        buckets, mine = list(self._buckets), dict[int, dict[str, V]]()
        length = self._len

        def bucket_of(key: str) -> dict[str, V]:
            at = hash(key) % len(buckets)
            if at not in mine:
                buckets[at] = mine[at] = dict(buckets[at])
            return mine[at]

        for key, value in added.items():
            bucket = bucket_of(key)
            length += key not in bucket
            bucket[key] = value
        for key in dropped:
            bucket = bucket_of(key)
            length -= key in bucket
            bucket.pop(key, None)
        return _of_buckets(_widened(buckets) if len(buckets) == 1 and length > PAGE_IDS else buckets, length)

    def pages(self) -> Iterator[dict[str, V]]:
        """All ids, in pieces that take about a millisecond each."""
        return filter(None, self._buckets)

    def __getitem__(self, key: str) -> V:
        return self._buckets[hash(key) % len(self._buckets)][key]

    def __iter__(self) -> Iterator[str]:
        return (key for bucket in self._buckets for key in bucket)

    def __len__(self) -> int:
        return self._len

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ids) or self._len != other._len:
            return False
        if len(self._buckets) == len(other._buckets):  # shared buckets are equal
            return self._buckets == other._buckets
        return dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]  # as of other maps

    def __repr__(self) -> str:
        return f"<{self._len} ids>"

    def to_plain(self) -> dict[str, V]:
        """See `record.py`."""
        return dict(self)

    @classmethod
    def from_plain(cls, plain: Any, kind: Any) -> "Ids[Any]":
        """See `record.py`."""
        ids: dict[str, Any] = msgspec.convert(plain, dict[str, kind])
        return Ids(ids)


def _of_buckets(buckets: list[dict[str, V]], length: int) -> Ids[V]:
    ids = Ids.__new__(Ids)
    ids._buckets, ids._len = buckets, length
    return ids


def _widened(buckets: list[dict[str, V]]) -> list[dict[str, V]]:
    wide: list[dict[str, V]] = [{} for _ in range(_WIDE)]
    for bucket in buckets:
        for key, value in bucket.items():
            wide[hash(key) % _WIDE][key] = value
    return wide
