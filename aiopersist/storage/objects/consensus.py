"""Versions as objects that are created once: a whole location needs a bucket, and no database.

Version `n` of a key is an object of its own name, created on the condition that there is none (S3:
`If-None-Match: *`). Of those that race for a version exactly one creates it. Names descend, so that a list of
one name is the newest version (`names.py`). Truncation deletes versions, and that makes five traps:

1. *A name comes free again.* A writer that slept creates version `e + 1` after it was truncated: nobody will
   ever read it. So a truncation to `f` first creates a *floor*, an object named `f`, and then deletes the
   versions below it; a floor is deleted only once there is a greater one. A version counts if no floor above
   it is there *after* its creation: were the name free again, its floor would have been there before.
   Otherwise the outcome is `Indeterminate`: it may have been truncated since.
2. *An orphan looks like a version.* What such a writer left lies below a floor. So a read takes the versions
   that it listed only if no floor above them is there *after* the list. The head is never an orphan: it is at
   or above every floor.
3. *An orphan takes the place of the version that was listed*, before that is read. So an object counts only
   with the tag that the list shows; each has bytes of its own, since it begins with a token.
4. *A version must not be written over a gap*, where it would be truncated, or come again. So it is created
   only after a version that is known to have been the head: versions up to a known head all were heads once.
   Where that is not known since a few seconds, the head is read first: else a client that has been idle would
   often create an orphan, and not learn whether it counted.
5. *A list is not of one moment.* Versions are passed from the newest on: what is there when it is passed was
   the newest at that moment, or lies below a floor that is listed after. Floors are passed from the least on:
   the greater one was there before a less one is deleted, so one of them is seen.

A repeated request is the sixth trap: a driver, or a proxy, may send a creation twice, and the second one is
refused because of the first. So what is there is compared with the token of the call.

Nothing here is a hint that may be stale. Reads are linearizable as far as the object store is: S3, Azure and
Google Cloud Storage are, and so must be any other that is used.

*Costs.* A commit is two requests, one after the other: the creation and the list of floors. A refused one
reads the version that is there; see also `courtesy.py`. A head is a list, then a get beside a list; without
the get if it is the version that has just won a race against this handle. An object carries some versions
before its own (`tails.py`), so a scan gets one object for several versions. `watch` polls by a list.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from aiopersist.ending import both
from aiopersist.errors import Error, Indeterminate, InvalidLocation, Unsupported
from aiopersist.resource import run_bounded
from aiopersist.runtime import SYSTEM, Runtime
from aiopersist.storage.consensus import HEADS_AT_ONCE, Consensus, Entry, Versioned
from aiopersist.storage.keys import check_consensus_key, check_entries, closed
from aiopersist.storage.objects.bucket import Bucket, Object, Tagged
from aiopersist.storage.objects.courtesy import Wishes
from aiopersist.storage.objects.known import NOTHING, KnownHeads
from aiopersist.storage.objects.names import (
    FLOORS,
    HASHED,
    KEY,
    SEQNO_MAX,
    VERSIONS,
    WISHES,
    floor_name,
    floor_of,
    folder_of,
    greatest_floor,
    is_hashed,
    is_wish,
    key_of,
    quoted_key,
    version_name,
    version_of,
)
from aiopersist.storage.objects.tails import TAIL_MAX, Tails, packed, unpacked
from aiopersist.storage.objects.winners import Winners
from aiopersist.storage.waiters import Waiters

GETS_AT_ONCE = 16
PAGE = 1000  # names in an answer
MORE = 20  # versions that may have come since the newest that is known
POLL_S = 1.0
POLL_MAX_S = 10.0
POLL_GROWTH = 1.5
PROBE = "probe"


class _Newest(NamedTuple):
    """The newest version as a list shows it."""

    seqno: int
    name: str
    tag: str


class ObjectsConsensus(Consensus):
    """See the header. `poll_s`: how often a watch looks at first; it slows down to `POLL_MAX_S` at rest."""

    def __init__(self, bucket: Bucket, *, runtime: Runtime = SYSTEM, poll_s: float = POLL_S) -> None:
        self._bucket = bucket
        self._runtime = runtime
        self._poll_s = poll_s
        self._known = KnownHeads(runtime)
        self._winners = Winners()
        self._tails = Tails()
        self._waiters = Waiters()
        self._wishes = Wishes(runtime)
        self._obeys_conditions = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<ObjectsConsensus {self._bucket!r}>"

    # --- reads -----------------------------------------------------------------------------------

    async def head(self, key: str) -> Versioned | None:
        self._check([key])
        folder = folder_of(key)
        while True:
            newest = await self._newest(folder)
            if newest is None:
                if not await self._floor(folder):
                    self._known.saw(key, NOTHING)
                    return None
                continue  # versions were truncated while the list passed them
            stored, floor = await both(partial(self._read, key, newest), partial(self._floor, folder))
            if stored is not None and stored.tag == newest.tag and floor <= newest.seqno:
                self._known.saw(key, newest.seqno)
                versions = unpacked(newest.name, newest.seqno, stored.data)
                self._tails.add(key, versions)
                return versions[-1]

    async def _read(self, key: str, newest: _Newest) -> Object | None:
        known = self._winners.find(key, newest.name, newest.tag)
        return await self._bucket.get(newest.name) if known is None else known

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        self._check(known)
        read = await run_bounded(HEADS_AT_ONCE, [partial(self._moved, *item) for item in known.items()])
        return {key: head for key, (has_moved, head) in zip(known, read, strict=True) if has_moved}

    async def _moved(self, key: str, seqno: int | None) -> tuple[bool, Versioned | None]:
        """Whether the head is not at `seqno`, and the head if so."""
        if seqno is not None:
            newest = await self._newest(folder_of(key))
            if newest is not None and newest.seqno == seqno:
                return False, None
        head = await self.head(key)
        return (None if head is None else head.seqno) != seqno, head

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        self._check([key])
        folder = folder_of(key)
        while limit > 0:
            versions = await self._versions(key, from_seqno)
            wanted = versions[:limit]
            if not wanted:
                floor = await self._floor(folder)
                if floor <= from_seqno:
                    break
                from_seqno = floor  # they were truncated while the list passed them
                continue
            read, floor = await both(partial(self._contents, wanted), partial(self._floor, folder))
            if floor > version_of(wanted[0].name):  # what lies below it does not count
                from_seqno = floor
                continue
            seqnos = [version_of(found.name) for found in wanted]
            if read.keys() >= {*seqnos}:
                found = [Versioned(seqno, read[seqno]) for seqno in seqnos]
                if len(wanted) == len(versions):
                    self._known.saw(key, seqnos[-1])
                    self._tails.add(key, found[-TAIL_MAX:])
                return found
        return []

    async def _contents(self, wanted: Sequence[Tagged]) -> dict[int, bytes]:
        """The data of these versions, by seqno, as far as the objects are those that were listed: some of
        them, from the newest on, with their tails; then those that no tail has."""
        read: dict[int, bytes] = {}

        async def get(listed: Tagged) -> None:
            stored = await self._bucket.get(listed.name)
            if stored is not None and stored.tag == listed.tag:
                read.update(unpacked(listed.name, version_of(listed.name), stored.data))

        for some in wanted[:: -(TAIL_MAX + 1)], wanted:
            missing = [listed for listed in some if version_of(listed.name) not in read]
            await run_bounded(GETS_AT_ONCE, [partial(get, listed) for listed in missing])
        return read

    async def _newest(self, folder: str) -> _Newest | None:
        found = await self._bucket.find(folder + VERSIONS, limit=1)
        return _Newest(version_of(found[0].name), *found[0]) if found else None

    async def _versions(self, key: str, from_seqno: int) -> list[Tagged]:
        """The versions from a seqno on, in ascending order. The first page is as long as the known head makes
        likely: older names cost time, too."""
        folder, found, after = folder_of(key), list[Tagged](), ""
        last, known = folder + version_name(max(from_seqno, 0)), self._known.seqno(key)
        limit = PAGE if known is None else max(min(known - from_seqno + MORE, PAGE), MORE)
        while True:
            page = await self._bucket.find(folder + VERSIONS, after=after, limit=limit)
            found += [listed for listed in page if listed.name <= last]
            if len(page) < limit or page[-1].name > last:
                return found[::-1]
            after, limit = page[-1].name, PAGE

    async def _floor(self, folder: str) -> int:
        """The greatest floor; 0 if there is none."""
        return greatest_floor(found.name for found in await self._floors(folder))

    async def _floors(self, folder: str) -> list[Tagged]:
        """All floors, and wishes."""
        return await self._bucket.find(folder + FLOORS)

    # --- writes ----------------------------------------------------------------------------------

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        return await self.compare_and_set_many([Entry(key, expected, data)])

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        self._check([entry.key for entry in entries])
        check_entries(entries)
        if not entries:
            return True
        if len(entries) > 1:
            raise Unsupported(
                "an object store commits to one shard at a time: transactions over several tables, "
                "or with once= or acks=, need Postgres or SQLite as consensus store"
            )
        key, expected, data = entries[0]
        seqno = 0 if expected is None else expected + 1
        self._wishes.tries(key)
        has_paused = await self._wishes.pause(key)  # others may have truncated meanwhile what was the head
        if not await self._is_head(key, expected, anew=has_paused):
            await self._wish(key, seqno)
            return False
        if seqno > SEQNO_MAX:
            return False
        won = await self._create(key, seqno, bytes(data))
        self._known.saw(key, seqno)  # it is there, whoever created it
        if won:
            self._waiters.wake([key])
        return won

    async def _is_head(self, key: str, expected: int | None, *, anew: bool = False) -> bool:
        """Whether `expected` was the head a moment ago, and nothing newer is known. `anew`: what is known is
        too old."""
        seqno = NOTHING if expected is None else expected
        known = self._known.seqno(key)
        if known is not None and known > seqno:
            return False
        if not anew and self._known.is_fresh(key, seqno):
            return True
        head = await self.head(key)
        return (None if head is None else head.seqno) == expected

    async def _create(self, key: str, seqno: int, data: bytes) -> bool:
        """Create a version; whether it is ours."""
        folder, token = folder_of(key), self._runtime.token().encode()
        if seqno == 0 and is_hashed(folder):
            await self._bucket.create(folder + KEY, key.encode())
        name, began = folder + version_name(seqno), self._runtime.monotonic()
        body = packed(token, self._tails.before(key, seqno), data)
        created, stored = await self._bucket.create(name, body), None
        took_s = self._runtime.monotonic() - began
        try:
            if not created:  # by another call, or by this one, of which a driver sent a second copy
                stored = await self._bucket.get(name)
                if stored is not None and not stored.data.startswith(token):
                    self._winners.lost(key, name, stored)
                    await self._wish(key, seqno)
                    await self._wishes.rest(key, took_s)
                    return False
            floors, _ = await both(partial(self._floors, folder), partial(self._forget_wishes, key))
            floor = greatest_floor(found.name for found in floors)
        except Error as error:
            raise Indeterminate(f"version {seqno} was created, and may be truncated: {error}") from error
        if floor > seqno:
            raise Indeterminate(f"version {seqno} was created, or was there before: it is truncated")
        if not created and stored is None:  # the store contradicts itself, or a copy is still on its way
            raise Indeterminate(f"version {seqno} was refused since it is there, and it is not")
        self._tails.add(key, [Versioned(seqno, data)])
        self._winners.forget(key)
        self._wishes.hear(key, (found.name for found in floors if is_wish(found.name)), took_s)
        return True

    async def _wish(self, key: str, seqno: int) -> None:
        """Another one has committed: after some such refusals, ask the others to let this handle go first."""
        wish = self._wishes.refused(key, seqno, folder_of(key) + WISHES)
        if wish is not None:
            with suppress(Error):  # it decides nothing
                await self._bucket.create(wish, b"")

    async def _forget_wishes(self, key: str) -> None:
        if mine := self._wishes.won(key):
            with suppress(Error):
                await self._bucket.delete(mine)

    async def truncate(self, key: str, seqno: int) -> int:
        self._check([key])
        folder = folder_of(key)
        newest = await self._newest(folder)
        if newest is None or seqno > newest.seqno:  # perhaps the list passed what was truncated
            head = await self.head(key)
            if head is None or seqno > head.seqno:
                raise ValueError(f"cannot truncate {key!r} at {seqno}: its head is {head and head.seqno}")
        listed = await self._floors(folder)
        before = greatest_floor(found.name for found in listed)
        is_new = seqno > before and await self._bucket.create(folder + floor_name(seqno), b"")
        await self._delete_below(folder, max(seqno, before), listed)
        return seqno - before if is_new else 0

    async def _delete_below(self, folder: str, floor: int, listed: Sequence[Tagged]) -> None:
        """Delete the versions below a floor that is there, also those that an earlier call has left, and of
        what was listed with the floors those that are less, and wishes. `Corruption` for what is neither."""
        versions = await self._bucket.find(folder + VERSIONS, after=folder + version_name(floor))
        void = [
            *(v for v in versions if version_of(v.name) < floor),
            *(f for f in listed if is_wish(f.name) or floor_of(f.name) < floor),
        ]
        if void:
            await self._bucket.delete([found.name for found in void])

    async def list_keys(self, prefix: str) -> list[str]:
        self._check()
        short = quoted_key(prefix)
        keys = [key_of(short + rest) for rest in await self._bucket.folders(short)]
        hashed = [
            partial(self._bucket.get, f"{HASHED}{rest}/{KEY}") for rest in await self._bucket.folders(HASHED)
        ]
        long = [found.data.decode() for found in await run_bounded(GETS_AT_ONCE, hashed) if found]
        return sorted([*keys, *(key for key in long if key.startswith(prefix))])

    # --- hints -----------------------------------------------------------------------------------

    async def watch(self, key: str) -> None:
        self._check([key])
        known = self._known.seqno(key)
        if known is None:  # then the first look may come too late; a hint may come early
            return
        with self._waiters.waiting(key) as woken:
            for delay in delays_of_polls(self._poll_s):
                await asyncio.wait([woken], timeout=delay)
                if woken.done():
                    return
                newest = await self._newest(folder_of(key))
                if (NOTHING if newest is None else newest.seqno) != known:
                    return

    # --- the rest --------------------------------------------------------------------------------

    async def check(self) -> None:
        """`InvalidLocation` for a bucket that ignores conditions: it would lose commits without a word. One
        request, one more for the first client of the location."""
        self._check()
        if self._obeys_conditions:
            return
        if await self._bucket.create(PROBE, b"") and await self._bucket.create(PROBE, b""):
            raise InvalidLocation(
                f"{self._bucket!r} ignores If-None-Match, and replaces objects that must stay: "
                "use a store with conditional writes, or Postgres as consensus store"
            )
        self._obeys_conditions = True

    async def now(self) -> float:
        self._check()
        return await self._bucket.now()

    async def clock(self) -> float:
        self._check()
        return await self._bucket.clock()

    @property
    def clock_error_s(self) -> float:
        return self._bucket.clock_error_s

    async def facts(self) -> dict[str, str]:
        polls = {"hints": f"polled, every {self._poll_s:g} to {POLL_MAX_S:g} s"}
        return {**await self._bucket.facts(), **polls}

    async def aclose(self) -> None:
        self._closed = True
        self._waiters.wake_all()
        await self._bucket.aclose()

    def _check(self, keys: Mapping[str, object] | Sequence[str] = ()) -> None:
        if self._closed:
            raise closed("consensus store")
        for key in keys:
            check_consensus_key(key)


def delays_of_polls(first_s: float) -> Iterator[float]:
    """The pauses of a watch, from `first_s` to `POLL_MAX_S`, without end."""
    while True:
        yield first_s
        first_s = min(first_s * POLL_GROWTH, POLL_MAX_S)
