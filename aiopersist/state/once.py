"""The ids of `once=` that a shard remembers, each with the time of its commit.

An id is a hash of 16 bytes, in one of 256 buckets by its first byte. A bucket is the concatenation of its
records, oldest first; `bytes.rfind` finds an id at the speed of memory. A commit copies the buckets that it
adds to, some KiB each, and drops forgotten ids from their fronts. So 100,000 ids take 4 MiB, and one more
costs microseconds.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from struct import Struct, error
from typing import Any, NamedTuple, Self, final

import msgspec

from aiopersist.state.record import Record

IDS_MAX = 100_000  # an id is forgotten after so many newer ids
PAGE_RECORDS = 1024  # records in a page of a rollup
_RECORD = Struct(">16sqqd")  # the hash, its number among all ids ever, the time and the moment of the commit


def hash_of(once: str) -> str:
    """The hash of an id: 128 bits of SHA-256, in hex."""
    return hashlib.sha256(once.encode()).hexdigest()[:32]


class _OnceRecord(NamedTuple):
    id: bytes
    number: int
    time: int
    at: float


@final
class OnceIds:
    """A frozen map of hashes to times."""

    __slots__ = ("_buckets", "ever")

    def __init__(self, buckets: Mapping[int, bytes] | None = None, ever: int = 0) -> None:
        self._buckets = dict(buckets or {})
        self.ever = ever
        """The number of all ids ever."""

    def time_of(self, id: str, oldest: float) -> int | None:
        """The time of the commit that recorded `id`, at the moment `oldest` or later; `None`: unknown."""
        record = self._find(bytes.fromhex(id))
        if record is None or record.at < oldest or record.number <= self.ever - IDS_MAX:
            return None
        return record.time

    def changed(self, times: Mapping[str, int], at: float, oldest: float) -> Self:
        """The map with these ids, recorded at the moment `at`. Ids from before `oldest` may be dropped."""
        buckets, ever = dict(self._buckets), self.ever + len(times)
        for number, (hashed_in_hex, time) in enumerate(times.items(), self.ever + 1):
            hashed = bytes.fromhex(hashed_in_hex)
            kept = _without_old(buckets.get(hashed[0], b""), ever - IDS_MAX, oldest)
            buckets[hashed[0]] = kept + _RECORD.pack(hashed, number, time, at)
        return type(self)(buckets, ever)

    def pages(self) -> Iterator[bytes]:
        """All records, in pages for `with_page`."""
        data = b"".join(self._buckets.values())
        size = PAGE_RECORDS * _RECORD.size
        return (data[start : start + size] for start in range(0, len(data), size))

    def with_page(self, page: bytes) -> Self:
        """The map with the records of `page` after its own."""
        buckets, size, begin = dict(self._buckets), _RECORD.size, 0
        for end in range(size, len(page) + size, size):
            if page[end : end + 1] != page[begin : begin + 1]:  # records of one bucket are neighbours
                buckets[page[begin]] = buckets.get(page[begin], b"") + page[begin:end]
                begin = end
        return type(self)(buckets, self.ever)

    def _find(self, hashed: bytes) -> _OnceRecord | None:
        """The newest record of that hash."""
        bucket = self._buckets.get(hashed[0], b"")
        start = bucket.rfind(hashed)
        while start % _RECORD.size and start > 0:  # by chance, a match within other records
            start = bucket.rfind(hashed, 0, start + len(hashed) - 1)
        if start < 0 or start % _RECORD.size:
            return None
        return _OnceRecord(*_RECORD.unpack_from(bucket, start))

    def __len__(self) -> int:
        """The number of records, including some forgotten ids."""
        return sum(map(len, self._buckets.values())) // _RECORD.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnceIds) and self.ever == other.ever and self._buckets == other._buckets

    __hash__ = None  # type: ignore[assignment]  # as of other maps

    def __repr__(self) -> str:
        return f"<{len(self)} ids of once=>"

    def to_plain(self) -> dict[str, Any]:
        """The number of all ids ever, and the records as base64. See `record.py`."""
        return {"ever": self.ever, "pages": packed(self)}

    @classmethod
    def from_plain(cls, plain: Any) -> "OnceIds":
        """See `record.py`."""
        try:
            return unpacked(OnceIds(ever=int(plain["ever"])), plain["pages"])
        except (TypeError, LookupError) as wrong:
            raise ValueError(f"no ids: {wrong!r}") from wrong


NO_IDS = OnceIds()


class OnceChanges(Record, frozen=True, kw_only=True):
    """New ids of `once=`."""

    times: dict[str, int]
    """The times of the commits, by hash."""
    oldest: float
    """Ids from before this moment may be forgotten."""


class Once(msgspec.Struct, frozen=True):
    """The ids of `once=` that an append records."""

    hashes: tuple[str, ...] = ()
    keep_s: float = inf
    """Seconds for which ids are remembered."""

    def done_at(self, ids: OnceIds, now: float) -> int | None:
        """The time of the commit that recorded one of them before, if there is one."""
        oldest = now - self.keep_s
        return next((t for h in self.hashes if (t := ids.time_of(h, oldest)) is not None), None)

    def changes(self, now: float, time: int) -> OnceChanges:
        """The changes that record them in a commit at `time`."""
        return OnceChanges(times=dict.fromkeys(self.hashes, time), oldest=max(now - self.keep_s, 0.0))


UNMARKED = Once()  # an append without `once=`


def packed(ids: OnceIds) -> list[str]:
    """The pages as text."""
    return [base64.b64encode(page).decode() for page in ids.pages()]


def unpacked(ids: OnceIds, pages: Iterable[str]) -> OnceIds:
    """`ids` with the pages of that text; `ValueError` for other text."""
    for text in pages:
        try:
            page = base64.b64decode(text, validate=True)
            list(_RECORD.iter_unpack(page))
        except (binascii.Error, error) as wrong:
            raise ValueError(f"no page of ids: {wrong}") from wrong
        ids = ids.with_page(page)
    return ids


def _without_old(bucket: bytes, number: int, oldest: float) -> bytes:
    """`bucket` without the records at its front up to `number`, or from before `oldest`."""
    start = 0
    while start < len(bucket):
        record = _OnceRecord(*_RECORD.unpack_from(bucket, start))
        if record.number > number and record.at >= oldest:
            break
        start += _RECORD.size
    return bucket[start:] if start else bucket
