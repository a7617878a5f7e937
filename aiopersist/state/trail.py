"""Which blobs versions name, for the sweep, and for a collection by a process that has not followed the
versions (`drops.py`). Only these names are decoded, at half the cost of whole diffs.

A part is *live* at a version if a batch or a tag of the state at that version names it. Keys never come back:
a part that was named and is no longer live is dropped for good. A new tag names live parts only.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from aiopersist.base.errors import Corruption
from aiopersist.state.diff import RollupName, check_format, not_understood
from aiopersist.state.model import State
from aiopersist.state.names import NamingPath, keys_of, named_by, path_of_tag
from aiopersist.state.record import decoder
from aiopersist.state.seal import check_seal


class _PartNames(Struct):
    key: str | None = None


class _BatchNames(Struct):
    parts: tuple[_PartNames, ...] = ()


class _RollupNames(Struct):
    key: str
    checksum: str


class _TagNames(Struct):
    rollup: _RollupNames
    parts: tuple[str, ...] = ()


class _DropNames(Struct, frozen=True):
    batches: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()


class _ArrangementNames(Struct):
    unsealed: dict[int, _BatchNames] = {}
    trace: dict[int, _BatchNames] = {}
    drop_unsealed: tuple[int, ...] = ()
    drop_trace: tuple[int, ...] = ()


class _StreamsNames(Struct, frozen=True):
    destroyed: tuple[str, ...] = ()
    arrangements: dict[str, _ArrangementNames] = {}


class _ChangesNames(Struct):
    batches: dict[int, _BatchNames] = {}
    tags: dict[str, _TagNames] = {}
    rollups: dict[int, _RollupNames] = {}
    streams: _StreamsNames = _StreamsNames()
    drop: _DropNames = _DropNames()

    def new(self) -> Iterator[tuple[NamingPath, set[str]]]:
        """The blobs that new batches and tags name, by path."""
        yield from ((at, keys_of(batch.parts)) for at, batch in self.batches.items())
        for name, changes in self.streams.arrangements.items():
            yield from (((name, "unsealed", at), keys_of(b.parts)) for at, b in changes.unsealed.items())
            yield from (((name, "trace", at), keys_of(b.parts)) for at, b in changes.trace.items())
        yield from ((path_of_tag(name), {tag.rollup.key, *tag.parts}) for name, tag in self.tags.items())

    def dropped(self) -> Iterator[NamingPath]:
        """The paths of batches and tags that are dropped one by one; the streams in `destroyed` are dropped
        whole."""
        yield from self.drop.batches
        yield from map(path_of_tag, self.drop.tags)
        for name, changes in self.streams.arrangements.items():
            yield from ((name, "unsealed", at) for at in changes.drop_unsealed)
            yield from ((name, "trace", at) for at in changes.drop_trace)


class Names(Struct):
    """The part of a version that is about blobs. The other fields of the diff are skipped."""

    format: int
    seqno: int
    commit: str
    prev: str | None
    rollup: RollupName | None
    changes: _ChangesNames


def decode_names(data: bytes, shard: str) -> Names:
    """`Corruption` as for `decode_version`: blobs that a damaged version fails to name would be deleted."""
    try:
        names: Names = decoder(Names)(data)
    except (ValueError, RecursionError) as error:
        raise not_understood("a diff of the state", data, error) from error
    check_format("a diff of the state", names.format)
    check_seal(data, names.commit, shard)
    return names


class Trail:
    """The blobs that successive versions name, and the parts that are live at the last version."""

    def __init__(self, base: State | None = None) -> None:
        """`base` is the state at the first version; `None` where that is version 0."""
        self._live = {} if base is None else dict(named_by(base))
        self.parts: set[str] = {key for keys in self._live.values() for key in keys}
        """All parts that were named, and the rollups of tags."""
        self.rollups: dict[int, RollupName] = {}
        """All rollups that were named, by version."""
        self._base = None if base is None else (base.seqno, base.commit)
        self._last: tuple[int, str | None] = self._base or (-1, None)

    def add(self, versions: Iterable[bytes], shard: str) -> None:
        """Follow the next versions of the shard; the first may be that of the base. `Corruption` for a
        version that does not follow: it is of another history of the shard, from before a restore, and parts
        that it drops may be live in this history."""
        for data in versions:
            names = decode_names(data, shard)
            self._check_follows(names, shard)
            for path in names.changes.dropped():
                self._live.pop(path, None)
            for path, keys in names.changes.new():
                self._live[path] = keys
                self.parts |= keys
            if gone := {*names.changes.streams.destroyed}:
                self._live = {path: keys for path, keys in self._live.items() if _stream(path) not in gone}
            for seqno, rollup in names.changes.rollups.items():
                self.rollups[seqno] = RollupName(seqno=seqno, key=rollup.key, checksum=rollup.checksum)
            if names.rollup is not None:
                self.rollups[names.rollup.seqno] = names.rollup

    def _check_follows(self, names: Names, shard: str) -> None:
        seqno, commit = self._last
        this = names.seqno, names.commit
        if this != self._base and (names.seqno, names.prev) != (seqno + 1, commit):
            what = f"version {names.seqno} does not follow from version {seqno}"
            raise Corruption(f"{what}: was the store restored from a backup?", shard_id=shard)
        self._last, self._base = this, None

    @property
    def dropped(self) -> set[str]:
        """The parts that were named and are no longer live."""
        return self.parts.difference(*self._live.values())


def _stream(path: NamingPath) -> str | None:
    return None if isinstance(path, int) else path[0]
