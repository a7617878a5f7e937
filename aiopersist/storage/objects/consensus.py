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
   that it listed only if no floor above them is there *after* the list passed them: one list of a folder
   passes floors after versions. The head is never an orphan: it is at or above every floor.
3. *An orphan takes the place of the version that was listed*, before that is read. So an object counts only
   with the tag that the list shows; each has bytes of its own, since it begins with a token.
4. *A version must not be written over a gap*, where it would be truncated, or come again. So it is created
   only after a version that is known to have been the head: versions up to a known head all were heads once.
   If the handle last saw it more than a few seconds ago, it reads the head first: else a client that was idle
   would often create an orphan, and not learn whether it counted.
5. *A list is not of one moment.* Versions are passed from the newest on: what is there when it is passed was
   the newest at that moment, or lies below a floor that is listed after. Floors are passed from the least on:
   the greater one was there before a less one is deleted, so one of them is seen.

A repeated request is the sixth trap: a driver, or a proxy, may send a creation twice, and the second one is
refused because of the first. So what is there is compared with the token of the call.

Reads are linearizable as far as the object store is: S3, Azure and Google Cloud Storage are, and any other
store must be.

*Costs.* A commit is two requests, one after the other: the creation and the list of floors. A refused one
reads the version that is there. A head is a list, then a get; beside the get a list of floors if there are
more than a few versions. A handle does not get again an object that it read or created last. An object
carries some versions before its own (`tails.py`), so one object is read for several versions. `watch` polls
by a list.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from aiopersist.base.ending import both
from aiopersist.base.errors import Error, Indeterminate, InvalidLocation, StorageUnavailable, Unsupported
from aiopersist.base.resource import run_bounded
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.storage.consensus import Entry, Versioned
from aiopersist.storage.keys import check_entries
from aiopersist.storage.objects.bucket import Bucket, Object, Tagged
from aiopersist.storage.objects.heads import FRESH_S, NOTHING
from aiopersist.storage.objects.names import (
    KEY,
    PROBE,
    PROBED,
    SEQNO_MAX,
    VERSIONS,
    floor_name,
    floor_of,
    folder_of,
    greatest_floor,
    is_hashed,
    is_wish,
    version_name,
    version_of,
)
from aiopersist.storage.objects.reads import ObjectReads
from aiopersist.storage.objects.tails import packed
from aiopersist.storage.objects.wishes import WishObjects
from aiopersist.storage.waiters import Waiters

POLL_S = 1.0
POLL_MAX_S = 10.0
POLL_GROWTH = 1.5
RACES, RACERS = 2, 4  # of creations, before a bucket is first used


class ObjectsConsensus(ObjectReads):
    """See the header. `poll_s`: how often a watch looks at first; it slows down to `POLL_MAX_S` at rest."""

    def __init__(self, bucket: Bucket, *, runtime: Runtime = SYSTEM, poll_s: float = POLL_S) -> None:
        super().__init__(bucket, runtime)
        self._poll_s = poll_s
        self._waiters = Waiters()
        self._wishes = WishObjects(runtime)
        self._obeys_conditions = False

    def __repr__(self) -> str:
        return f"<ObjectsConsensus {self._bucket!r}>"

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
        if not await self._is_head(key, expected) or seqno > SEQNO_MAX:
            return False
        won = await self._create(key, seqno, bytes(data))
        self._heads.saw(key, seqno)  # it is there, whoever created it
        if won:
            self._waiters.wake([key], {key: seqno})
        return won

    async def _is_head(self, key: str, expected: int | None) -> bool:
        """Whether `expected` was the head a moment ago, and nothing newer is known."""
        seqno = NOTHING if expected is None else expected
        newest = self._heads.seqno(key)
        if newest is not None and newest > seqno:
            return False
        if self._heads.is_fresh(key, seqno):
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
        tag, stored = await self._bucket.create(name, body), None
        took_s = self._runtime.monotonic() - began
        try:
            if tag is None:  # it is another's, or this call's, of which a driver sent a second copy
                stored = await self._bucket.get(name)
                if stored is not None:
                    self._recent.saw(key, name, stored)
                if stored is not None and not stored.data.startswith(token):
                    await self._check_not_truncated(folder, seqno, took_s)
                    return False
            floors = await self._floors(folder)
            floor = greatest_floor(floors)
        except Error as error:
            raise Indeterminate(f"version {seqno} was created, and may be truncated: {error}") from error
        if floor > seqno:
            raise Indeterminate(f"version {seqno} was created, or was there before: it is truncated")
        if tag is None and stored is None:  # the store contradicts itself, or a copy is still on its way
            raise Indeterminate(f"version {seqno} was refused since it is there, and it is not")
        if tag is not None:
            self._recent.saw(key, name, Object(body, tag))
        self._heads.saw(key, seqno, floor)
        self._tails.add(key, [Versioned(seqno, data)], own=True)
        self._wishes.listed(key, [item.name for item in floors if is_wish(item.name)])
        return True

    async def _check_not_truncated(self, folder: str, seqno: int, took_s: float) -> None:
        """`Indeterminate` if the refusal says nothing: of two copies of a creation the first one may have
        counted, and been truncated, before the second one met an orphan of a writer that slept. That takes
        longer than a creation does."""
        if took_s > FRESH_S and await self._floor(folder) > seqno:
            raise Indeterminate(f"version {seqno} was refused, and is truncated")

    async def wish(self, keys: Sequence[str], who: str, for_s: float, waited_s: float) -> None:
        """One request for each key, and one to delete what it has left before."""
        self._check(keys)
        void = self._wishes.take(keys, who)
        for key in keys if for_s > 0 else ():
            if self._heads.seqno(key) is None:
                await self.head(key)
            if self._heads.seqno(key) != NOTHING:  # a folder with nothing else is no key
                await self._bucket.create(self._wishes.name(key, who, for_s, waited_s), b"")
        if void:
            await self._bucket.delete(void)

    def stand_back_s(self, key: str, who: str, waited_s: float) -> float:
        return self._wishes.stand_back_s(key, who, waited_s)

    async def truncate(self, key: str, seqno: int) -> int:
        self._check([key])
        folder = folder_of(key)
        newest, behind, _ = await self._look(key)
        if newest is None or seqno > version_of(newest.name):  # perhaps the list passed what was truncated
            head = await self.head(key)
            if head is None or seqno > head.seqno:
                raise ValueError(f"cannot truncate {key!r} at {seqno}: its head is {head and head.seqno}")
        listed = await self._floors(folder) if behind is None else behind
        before = greatest_floor(listed)
        name = folder + floor_name(seqno)
        is_new = seqno > before and await self._bucket.create(name, b"") is not None
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
            await self._bucket.delete([item.name for item in void])

    # --- hints -----------------------------------------------------------------------------------

    async def watch(self, key: str) -> None:
        self._check([key])
        seqno = self._heads.seqno(key)
        if seqno is None:  # then the first look may come too late; a hint may come early
            return
        with self._waiters.waiting(key) as woken:
            for delay in delays_of_polls(self._poll_s):
                await asyncio.wait([woken], timeout=delay)
                if woken.done():
                    return
                newest = (await self._look(key)).newest
                if (NOTHING if newest is None else version_of(newest.name)) != seqno:
                    return

    # --- the rest --------------------------------------------------------------------------------

    async def check(self) -> None:
        """`InvalidLocation` for a bucket that ignores conditions, or looks and then writes: it would silently
        lose commits. Two requests, side by side; until some races of creations have ended well, each client
        of the location also makes these."""
        self._check()
        if self._obeys_conditions:
            return
        probe, probed = partial(self._bucket.create, PROBE, b""), partial(self._bucket.get, PROBED)
        created, passed = await both(probe, probed)
        if created is not None or passed is None:
            await self._check_races()
            await self._bucket.create(PROBED, b"")
        self._obeys_conditions = True

    async def _check_races(self) -> None:
        """Let several create one object at once: at most one of them may have done it. One that is refused,
        for whatever reason, has not; races that nobody wins show nothing, and fail."""
        names = [f"{PROBE}-{self._runtime.token()}" for _ in range(RACES)]
        try:
            for name in names:
                race = [partial(self._raced, name, b"%d" % number) for number in range(RACERS)]
                outcomes = await run_bounded(RACERS, race)
                failures = [each for each in outcomes if isinstance(each, Error)]
                won = sum(isinstance(each, str) for each in outcomes)
                if won > 1:
                    raise InvalidLocation(
                        f"{self._bucket!r} lets several writers create one object: it ignores If-None-Match, "
                        "or looks and then writes; use a store with conditional writes, or Postgres as "
                        "consensus store"
                    )
                if not won:
                    raise failures[0] if failures else StorageUnavailable(f"{self!r}: nobody won a race")
        finally:
            with suppress(Error):
                await self._bucket.delete(names)

    async def _raced(self, name: str, data: bytes) -> str | Error | None:
        try:
            return await self._bucket.create(name, data)
        except Error as error:
            return error

    async def now(self) -> float:
        self._check()
        return await self._bucket.now()

    async def clock(self) -> float:
        self._check()
        return await self._bucket.clock()

    @property
    def keeps_keys(self) -> bool:
        return True

    @property
    def clock_error_s(self) -> float:
        return self._bucket.clock_error_s

    def limit_clock(self, ahead_max_s: float) -> None:
        self._bucket.limit_clock(ahead_max_s)

    async def facts(self) -> dict[str, str]:
        polls = {"hints": f"polled, every {self._poll_s:g} to {POLL_MAX_S:g} s"}
        return {**await self._bucket.facts(), **polls}

    async def aclose(self) -> None:
        self._closed = True
        self._waiters.wake_all()
        await self._bucket.aclose()


def delays_of_polls(first_s: float) -> Iterator[float]:
    """The pauses of a watch, from `first_s` to `POLL_MAX_S`, without end."""
    while True:
        yield first_s
        first_s = min(first_s * POLL_GROWTH, POLL_MAX_S)
