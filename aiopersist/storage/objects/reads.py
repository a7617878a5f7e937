"""The reads of consensus on objects. Why they are right: see the header of `consensus.py`.

A *look* lists the folder of a key from the newest version on. Where a list of `SHORT` names has room for all
versions, it passes the floors behind them as well, and a second list is saved. So are gets of an object that
this handle has read or created.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from aiopersist.ending import both
from aiopersist.errors import Error
from aiopersist.resource import run_bounded
from aiopersist.runtime import Runtime
from aiopersist.storage.consensus import HEADS_AT_ONCE, Consensus, Versioned
from aiopersist.storage.keys import check_consensus_key, closed
from aiopersist.storage.objects.bucket import Bucket, Object, Tagged
from aiopersist.storage.objects.known import NOTHING, KnownHeads
from aiopersist.storage.objects.names import (
    FLOORS,
    HASHED,
    KEY,
    VERSIONS,
    folder_of,
    greatest_floor,
    key_of,
    quoted_key,
    version_name,
    version_of,
)
from aiopersist.storage.objects.seen import SeenObjects
from aiopersist.storage.objects.tails import TAIL_MAX, Tails, unpacked

GETS_AT_ONCE = 16
PAGE = 1000  # names in an answer
MORE = 20  # versions that may have come since the newest that is known
SHORT = 16  # names that take a driver as long as a request without any
FEW_FLOORS = 4  # names behind the versions: the floor, one that is void, wishes


class Look(NamedTuple):
    """What a list has shown of a key."""

    newest: Tagged | None
    """The newest version."""
    behind: list[Tagged] | None
    """Floors and wishes; `None`: the list did not go on to them."""
    known: int | None
    """The greatest seqno that was known to have been the head before the list."""


class ObjectReads(Consensus):
    """A subclass writes."""

    def __init__(self, bucket: Bucket, runtime: Runtime) -> None:
        self._bucket = bucket
        self._runtime = runtime
        self._known = KnownHeads(runtime)
        self._seen = SeenObjects()
        self._tails = Tails()
        self._closed = False

    # --- heads -----------------------------------------------------------------------------------

    async def head(self, key: str) -> Versioned | None:
        self._check([key])
        return await self._head(key)

    async def likely_head(self, key: str, seqno: int) -> Versioned | None:
        self._check([key])
        if self._known.seqno(key) is not None:  # then the object of its head is known, too, as a rule
            return await self._head(key)
        look, _ = await both(partial(self._look, key), partial(self._guess, key, seqno))
        return await self._head(key, look)

    async def _guess(self, key: str, seqno: int) -> None:
        """Read a version that may be there."""
        name = folder_of(key) + version_name(seqno)
        with suppress(Error):  # only the list tells whether it matters
            stored = await self._bucket.get(name)
            if stored is not None:
                self._seen.saw(key, name, stored)

    async def _head(self, key: str, look: Look | None = None) -> Versioned | None:
        """The head; `look`: what a list has shown since the call began."""
        folder = folder_of(key)
        while True:
            newest, behind, known = look or await self._look(key)
            look = None
            if newest is None:
                if not await self._floor(folder, behind):
                    self._saw_head(key, NOTHING, 0, known)
                    return None
                continue  # versions were truncated while the list passed them
            stored, floor = await both(partial(self._read, key, newest), partial(self._floor, folder, behind))
            seqno = version_of(newest.name)
            if stored is not None and stored.tag == newest.tag and floor <= seqno:
                self._saw_head(key, seqno, floor, known)
                versions = unpacked(newest.name, seqno, stored.data)
                self._seen.saw(key, newest.name, stored)
                self._tails.add(key, versions)
                return versions[-1]

    def _saw_head(self, key: str, seqno: int, floor: int, known: int | None) -> None:
        """This is the head, and `known` was known before it was looked for: a greater one is gone, so the
        bucket was restored from a backup, or the key removed."""
        if known is not None and seqno < known:
            for memory in self._known, self._tails, self._seen:
                memory.forget(key)
        self._known.saw(key, seqno, floor)

    async def _look(self, key: str) -> Look:
        folder, live, known = folder_of(key), self._known.live(key), self._known.seqno(key)
        limit = SHORT if live is None or live + FEW_FLOORS < SHORT else 1
        listed = await self._bucket.find(folder, after=folder + VERSIONS, limit=limit)
        newest = next(iter(_among(listed, folder + VERSIONS)), None)
        return Look(newest, None if len(listed) == limit else _among(listed, folder + FLOORS), known)

    async def _read(self, key: str, listed: Tagged) -> Object | None:
        return self._seen.find(key, listed) or await self._bucket.get(listed.name)

    async def _floor(self, folder: str, listed: Sequence[Tagged] | None = None) -> int:
        """The greatest floor, of those that a list has shown if it has; 0 if there is none."""
        return greatest_floor(await self._floors(folder) if listed is None else listed)

    async def _floors(self, folder: str) -> list[Tagged]:
        """All floors, and wishes."""
        return await self._bucket.find(folder + FLOORS)

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        self._check(known)
        read = await run_bounded(HEADS_AT_ONCE, [partial(self._moved, *item) for item in known.items()])
        return {key: head for key, (has_moved, head) in zip(known, read, strict=True) if has_moved}

    async def _moved(self, key: str, seqno: int | None) -> tuple[bool, Versioned | None]:
        """Whether the head is not at `seqno`, and the head if so."""
        look = await self._look(key)
        there = None if look.newest is None else version_of(look.newest.name)
        if there is not None and there == seqno and greatest_floor(look.behind or ()) <= seqno:
            return False, None
        head = await self._head(key, look)
        return (None if head is None else head.seqno) != seqno, head

    # --- several versions ------------------------------------------------------------------------

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        self._check([key])
        folder = folder_of(key)
        while limit > 0:
            versions, behind = await self._versions(key, from_seqno)
            wanted = versions[:limit]
            if not wanted:
                floor = await self._floor(folder, behind)
                if floor <= from_seqno:
                    break
                from_seqno = floor  # they were truncated while the list passed them
                continue
            read, floor = await both(partial(self._contents, wanted), partial(self._floor, folder, behind))
            if floor > version_of(wanted[0].name):  # what lies below it does not count
                from_seqno = floor
                continue
            seqnos = [version_of(found.name) for found in wanted]
            if read.keys() >= {*seqnos}:
                found = [Versioned(seqno, read[seqno]) for seqno in seqnos]
                if len(wanted) == len(versions):
                    self._known.saw(key, seqnos[-1], floor)
                    self._tails.add(key, found[-TAIL_MAX:])
                return found
        return []

    async def _versions(self, key: str, from_seqno: int) -> tuple[list[Tagged], list[Tagged] | None]:
        """The versions from a seqno on, in ascending order, and floors and wishes if the lists went on to
        them. The first page is as long as the known head makes likely: older names cost time, too."""
        folder, found = folder_of(key), list[Tagged]()
        after, last = folder + VERSIONS, folder + version_name(max(from_seqno, 0))
        known = self._known.seqno(key)
        limit = PAGE if known is None else max(min(known - from_seqno + MORE, PAGE), MORE)
        while True:
            page = await self._bucket.find(folder, after=after, limit=limit)
            found += page
            if len(page) < limit or page[-1].name > last:
                break
            after, limit = page[-1].name, PAGE
        versions = [listed for listed in found if listed.name <= last][::-1]
        return versions, _among(found, folder + FLOORS) if len(page) < limit else None

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

    async def versions(self, key: str, first: int, last: int) -> list[Versioned]:
        self._check([key])
        read = dict(self._tails.newest(key))
        lowest, newest = min(read, default=0), max(read, default=-1)

        async def get(seqno: int) -> None:
            name = folder_of(key) + version_name(seqno)
            stored = await self._bucket.get(name)
            if stored is not None:
                read.update(self._true_of(unpacked(name, seqno, stored.data)))

        if len(read) > 1 and first < lowest <= last + 1 <= newest + 1:
            tailed = range(lowest, first, 1 - len(read))  # each is likely to carry so many before it
            await run_bounded(GETS_AT_ONCE, [partial(get, seqno) for seqno in tailed])
        if all(seqno in read for seqno in range(first, last + 1)):
            return [Versioned(seqno, read[seqno]) for seqno in range(first, last + 1)]
        return await super().versions(key, first, last)

    def _true_of(self, unlisted: Sequence[Versioned]) -> Sequence[Versioned]:
        """What is true of an object that no list has shown: it may be an orphan, but its tail is not."""
        return unlisted[:-1]

    # --- keys ------------------------------------------------------------------------------------

    async def list_keys(self, prefix: str) -> list[str]:
        self._check()
        short = quoted_key(prefix)
        keys = [key_of(short + rest) for rest in await self._bucket.folders(short)]
        hashed = [
            partial(self._bucket.get, f"{HASHED}{rest}/{KEY}") for rest in await self._bucket.folders(HASHED)
        ]
        long = [found.data.decode() for found in await run_bounded(GETS_AT_ONCE, hashed) if found]
        return sorted([*keys, *(key for key in long if key.startswith(prefix))])

    def _check(self, keys: Mapping[str, object] | Sequence[str] = ()) -> None:
        if self._closed:
            raise closed("consensus store")
        for key in keys:
            check_consensus_key(key)


def _among(listed: Sequence[Tagged], prefix: str) -> list[Tagged]:
    return [each for each in listed if each.name.startswith(prefix)]
