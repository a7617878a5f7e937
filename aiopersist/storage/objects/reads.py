"""The reads of consensus on objects. Why they are right: see the header of `consensus.py`.

A *look* lists the folder of a key from the newest version on. If a list of `SHORT` names has room for all
versions, it also passes the floors behind them, which saves a second list. Objects that this handle read or
created last are not read again.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from aiopersist.base.ending import both
from aiopersist.base.errors import Error, StorageUnavailable
from aiopersist.base.resource import run_bounded
from aiopersist.base.runtime import Runtime
from aiopersist.storage.consensus import HEADS_AT_ONCE, Consensus, Versioned, sliced
from aiopersist.storage.keys import check_consensus_key, closed
from aiopersist.storage.objects.bucket import Bucket, Object, Tagged
from aiopersist.storage.objects.bulk import TOGETHER_MAX, TOGETHER_MIN, passed
from aiopersist.storage.objects.heads import NOTHING, KnownHeads
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
from aiopersist.storage.objects.recent import RecentObjects, UnfinishedReads
from aiopersist.storage.objects.tails import TAIL_MAX, Tails, unpacked

GETS_AT_ONCE = 16
LISTS_AT_ONCE = 8
PAGE = 1000  # names in an answer
MORE = 20  # versions that may have come since the newest that is known
SHORT = 16  # names that take a driver as long as a request without any
ROUNDS_MAX = 20  # of a read, while others commit and truncate between its requests
FEW_FLOORS = 4  # names behind the versions: the floor, one that is void, wishes


class Look(NamedTuple):
    """What a list has shown of a key."""

    newest: Tagged | None
    """The newest version."""
    behind: list[Tagged] | None
    """Floors and wishes; `None`: the list did not go on to them."""
    known_before: int | None
    """The greatest seqno that was known to have been the head before the list."""


class ObjectReads(Consensus):
    """A subclass writes."""

    def __init__(self, bucket: Bucket, runtime: Runtime) -> None:
        self._bucket = bucket
        self._runtime = runtime
        self._heads = KnownHeads(runtime)
        self._recent = RecentObjects()
        self._unfinished = UnfinishedReads()
        self._tails = Tails()
        self._closed = False

    # --- heads -----------------------------------------------------------------------------------

    async def head(self, key: str) -> Versioned | None:
        self._check([key])
        return await self._head(key)

    async def likely_head(self, key: str, seqno: int) -> Versioned | None:
        self._check([key])
        if self._heads.seqno(key) is not None:  # then the object of its head is known, too, as a rule
            return await self._head(key)
        look, _ = await both(partial(self._look, key), partial(self._guess, key, seqno))
        return await self._head(key, look)

    async def _guess(self, key: str, seqno: int) -> None:
        """Read a version that may be there."""
        name = folder_of(key) + version_name(seqno)
        with suppress(Error):  # only the list tells whether it matters
            stored = await self._bucket.get(name)
            if stored is not None:
                self._recent.saw(key, name, stored)

    async def _head(self, key: str, look: Look | None = None) -> Versioned | None:
        """The head; `look`: what a list has shown since the call began."""
        folder = folder_of(key)
        newest, stored = None, None
        for _ in range(ROUNDS_MAX):
            newest, behind, known_before = look or await self._look(key)
            look = None
            if newest is None:
                if not await self._floor(folder, behind):
                    self._saw_head(key, NOTHING, 0, known_before)
                    return None
                continue  # versions were truncated while the list passed them
            stored, floor = await both(partial(self._read, key, newest), partial(self._floor, folder, behind))
            seqno = version_of(newest.name)
            if stored is not None and stored.tag == newest.tag and floor <= seqno:
                self._saw_head(key, seqno, floor, known_before)
                versions = unpacked(newest.name, seqno, stored.data)
                self._recent.saw(key, newest.name, stored)
                self._tails.add(key, versions)
                return versions[-1]
        raise self._contradiction(newest, stored and stored.tag)

    def _contradiction(self, listed: Tagged | None, tag: str | None) -> StorageUnavailable:
        """The error if other answers contradict each new list: nobody commits and truncates so fast."""
        if listed is None:
            return StorageUnavailable(f"{self!r}: lists show floors, and no version above them")
        other = "it is not there" if tag is None else f"its ETag is {tag!r}"
        return StorageUnavailable(
            f"{self!r}: {listed.name} is listed with the ETag {listed.tag!r}, and {other}"
        )

    def _saw_head(self, key: str, seqno: int, floor: int, known_before: int | None) -> None:
        """Remember the head. If an earlier look saw a greater one, the bucket was restored from a backup, or
        the key was removed."""
        if known_before is not None and seqno < known_before:
            for memory in self._heads, self._tails, self._recent, self._unfinished:
                memory.forget(key)
        self._heads.saw(key, seqno, floor)

    async def _look(self, key: str) -> Look:
        folder, live, known_before = folder_of(key), self._heads.live(key), self._heads.seqno(key)
        limit = SHORT if live is None or live + FEW_FLOORS < SHORT else 1
        listed = await self._bucket.find(folder, after=folder + VERSIONS, limit=limit)
        newest = next(iter(_among(listed, folder + VERSIONS)), None)
        return Look(newest, None if len(listed) == limit else _among(listed, folder + FLOORS), known_before)

    async def _read(self, key: str, listed: Tagged) -> Object | None:
        return self._recent.find(key, listed) or await self._bucket.get(listed.name)

    async def _floor(self, folder: str, listed: Sequence[Tagged] | None = None) -> int:
        """The greatest floor, of those that a list has shown if it has; 0 if there is none."""
        return greatest_floor(await self._floors(folder) if listed is None else listed)

    async def _floors(self, folder: str) -> list[Tagged]:
        """All floors, and wishes."""
        return await self._bucket.find(folder + FLOORS)

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        self._check(known)
        looks = await self._looks(list(known))
        read = await run_bounded(
            HEADS_AT_ONCE, [partial(self._moved, *item, looks.get(item[0])) for item in known.items()]
        )
        return {key: head for key, (has_moved, head) in zip(known, read, strict=True) if has_moved}

    async def _looks(self, keys: Sequence[str]) -> dict[str, Look]:
        """Looks at many keys, by few lists; some may be missing."""
        if len(keys) < TOGETHER_MIN or not self._bucket.seeks:
            return {}
        by_folder = {folder_of(key): (key, self._heads.seqno(key)) for key in keys}
        groups = sliced(dict.fromkeys(sorted(by_folder)), TOGETHER_MAX)
        lists = [partial(passed, self._bucket, list(group)) for group in groups]
        shown = [item for each in await run_bounded(LISTS_AT_ONCE, lists) for item in each.items()]
        return {by_folder[folder][0]: Look(*seen, by_folder[folder][1]) for folder, seen in shown}

    async def _moved(self, key: str, seqno: int | None, look: Look | None) -> tuple[bool, Versioned | None]:
        """Whether the head is not at `seqno`, and the head if so."""
        look = look or await self._look(key)
        newest = None if look.newest is None else version_of(look.newest.name)
        if newest is not None and newest == seqno and await self._floor(folder_of(key), look.behind) <= seqno:
            return False, None  # else it may be an orphan, and newer versions came while the list went on
        head = await self._head(key, look)
        return (None if head is None else head.seqno) != seqno, head

    # --- several versions ------------------------------------------------------------------------

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        self._check([key])
        if limit <= 0:
            return []
        folder, listed, tags = folder_of(key), list[Tagged](), dict[str, str]()
        for _ in range(ROUNDS_MAX):
            versions, behind = await self._versions(key, from_seqno)
            listed = versions[:limit]
            if not listed:
                floor = await self._floor(folder, behind)
                if floor <= from_seqno:
                    return []
                from_seqno = floor  # they were truncated while the list passed them
                continue
            read, floor = await both(
                partial(self._contents, key, listed, tags), partial(self._floor, folder, behind)
            )
            if floor > version_of(listed[0].name):  # what lies below it does not count
                from_seqno = floor
                continue
            seqnos = [version_of(version.name) for version in listed]
            if read.keys() >= {*seqnos}:
                version = [Versioned(seqno, read[seqno]) for seqno in seqnos]
                if len(listed) == len(versions):
                    self._heads.saw(key, seqnos[-1], floor)
                    self._tails.add(key, version[-TAIL_MAX:])
                self._unfinished.forget(key)
                return version
        differs = next((each for each in listed if tags.get(each.name) != each.tag), None)
        raise self._contradiction(differs, differs and tags.get(differs.name))

    async def _versions(self, key: str, from_seqno: int) -> tuple[list[Tagged], list[Tagged] | None]:
        """The versions from a seqno on, in ascending order, and floors and wishes if the lists went on to
        them. The first page is as long as the known head makes likely: older names cost time, too."""
        folder, names = folder_of(key), list[Tagged]()
        after, last = folder + VERSIONS, folder + version_name(max(from_seqno, 0))
        newest = self._heads.seqno(key)
        limit = PAGE if newest is None else max(min(newest - from_seqno + MORE, PAGE), MORE)
        while True:
            page = await self._bucket.find(folder, after=after, limit=limit)
            names += page
            if len(page) < limit or page[-1].name > last:
                break
            after, limit = page[-1].name, PAGE
        versions = [listed for listed in names if listed.name <= last][::-1]
        return versions, _among(names, folder + FLOORS) if len(page) < limit else None

    async def _contents(self, key: str, versions: Sequence[Tagged], tags: dict[str, str]) -> dict[int, bytes]:
        """The data of these versions, by seqno, as far as the objects are those that were listed: some of
        them, from the newest on, with their tails; then those that no tail has. `tags` gets the tags of the
        objects that were read."""
        read: dict[int, bytes] = {}

        async def get(listed: Tagged) -> None:
            stored = self._unfinished.find(key, listed.name)
            if stored is None or stored.tag != listed.tag:
                stored = await self._got(key, listed.name)
            tags[listed.name] = "" if stored is None else stored.tag
            if stored is not None and stored.tag == listed.tag:
                read.update(unpacked(listed.name, version_of(listed.name), stored.data))

        for chosen in versions[:: -(TAIL_MAX + 1)], versions:
            missing = [listed for listed in chosen if version_of(listed.name) not in read]
            await run_bounded(GETS_AT_ONCE, [partial(get, listed) for listed in missing])
        return read

    async def leftovers(self, key: str) -> list[Versioned]:
        """What lies below the floor, and the tails of the other versions as far as they reach below it."""
        self._check([key])
        folder = folder_of(key)
        listed = await self._bucket.find(folder + VERSIONS)
        floor, versions_below = await self._floor(folder), list[Versioned]()

        async def get(name: str) -> None:
            stored = await self._bucket.get(name)
            if stored is not None:
                versions = unpacked(name, version_of(name), stored.data)
                versions_below.extend(version for version in versions if version.seqno < floor)

        near = (each.name for each in listed if version_of(each.name) <= floor + TAIL_MAX)
        await run_bounded(GETS_AT_ONCE, [partial(get, name) for name in near])
        return versions_below

    async def versions(self, key: str, first: int, last: int) -> list[Versioned]:
        self._check([key])
        read = dict(self._tails.newest(key))
        lowest, newest = min(read, default=0), max(read, default=-1)

        async def get(seqno: int) -> None:
            name = folder_of(key) + version_name(seqno)
            stored = self._unfinished.find(key, name) or await self._got(key, name)
            if stored is not None:
                read.update(self._true_of(unpacked(name, seqno, stored.data)))

        if len(read) > 1 and first < lowest <= last + 1 <= newest + 1:
            tailed = range(lowest, first, 1 - len(read))  # each is likely to carry so many before it
            await run_bounded(GETS_AT_ONCE, [partial(get, seqno) for seqno in tailed])
        if all(seqno in read for seqno in range(first, last + 1)):
            self._unfinished.forget(key)
            return [Versioned(seqno, read[seqno]) for seqno in range(first, last + 1)]
        return await super().versions(key, first, last)

    async def _got(self, key: str, name: str) -> Object | None:
        stored = await self._bucket.get(name)
        if stored is not None:
            self._unfinished.add(key, name, stored)
        return stored

    def _true_of(self, unlisted: Sequence[Versioned]) -> Sequence[Versioned]:
        """The true versions of an object that no list has shown: it may be an orphan, but its tail is not."""
        return unlisted[:-1]

    # --- keys ------------------------------------------------------------------------------------

    async def list_keys(self, prefix: str) -> list[str]:
        self._check()
        short = quoted_key(prefix)
        keys = [key_of(short + rest) for rest in await self._bucket.folders(short)]
        hashed = [
            partial(self._bucket.get, f"{HASHED}{rest}/{KEY}") for rest in await self._bucket.folders(HASHED)
        ]
        long = [stored.data.decode() for stored in await run_bounded(GETS_AT_ONCE, hashed) if stored]
        return sorted([*keys, *(key for key in long if key.startswith(prefix))])

    def _check(self, keys: Mapping[str, object] | Sequence[str] = ()) -> None:
        if self._closed:
            raise closed("consensus store")
        for key in keys:
            check_consensus_key(key)


def _among(listed: Sequence[Tagged], prefix: str) -> list[Tagged]:
    return [each for each in listed if each.name.startswith(prefix)]
