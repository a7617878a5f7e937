"""Names of shards: keys of the consensus store. Each has a shard id, or, once freed, no id.

A name is created by compare-and-set, so two first users get the same shard. After a lost answer the name is
read again: all processes see the same id.
"""

import json
import re
import uuid
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar
from urllib.parse import quote, unquote
from zlib import crc32

from aiopersist.base.errors import Corruption, Indeterminate, InvalidUsage, UnknownShard, UsageKind, shown
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.shard.log import PREFIXES, consensus_key
from aiopersist.shard.stack import Stack
from aiopersist.storage.consensus import Versioned, sliced
from aiopersist.storage.stall import StallLog

NAME_BYTES_MAX = 512
HEADS_AT_ONCE = 256  # names; their heads are in memory

_UUID4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


class ShardId(str):
    """The id of a shard: `s` and a random UUID."""

    __slots__ = ()
    kind: ClassVar[str] = "shard"
    letter: ClassVar[str] = "s"
    names: ClassVar[str] = "name/"
    """The prefix of the keys of names in the consensus store."""

    def __new__(cls, text: str) -> Self:
        if not isinstance(text, str) or not cls.is_id(text):
            what = f"{text!r} is not {cls.__name__}: {cls.letter} and a uuid4"
            raise InvalidUsage(UsageKind.INVALID_NAME, what, name=text)
        return super().__new__(cls, text)

    @classmethod
    def is_id(cls, text: str) -> bool:
        """Whether `text` has the form of an id of this class."""
        return re.fullmatch(cls.letter + _UUID4, text) is not None

    @classmethod
    def new(cls, runtime: Runtime = SYSTEM) -> Self:
        """A fresh id."""
        return cls(f"{cls.letter}{runtime.uuid()}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """`text` as an id; `InvalidUsage` of kind `INVALID_NAME` if it is none."""
        return cls(text)

    @property
    def uuid(self) -> uuid.UUID:
        return uuid.UUID(self[1:])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class IndexedId(ShardId):
    """The id of an `Indexed`: `i` and a random UUID. An `Indexed` and a shard may have the same name."""

    __slots__ = ()
    kind = "Indexed"
    letter = "i"
    names = "indexed-name/"


class RecordId(ShardId):
    """The id of an internal shard of the library. Its names do not clash with those of users."""

    __slots__ = ()
    kind = "record"
    names = "record-name/"


Id = TypeVar("Id", bound=ShardId)


def id_of(text: str) -> ShardId:
    """`text` as the id of a shard or of an `Indexed`."""
    return IndexedId(text) if text.startswith(IndexedId.letter) else ShardId(text)


async def resolve(stack: Stack, name: str) -> ShardId:
    """The shard with the name or id `name`; `UnknownShard`. One request for a name."""
    shard = await find(stack, name, ShardId)
    if shard is None:
        is_other = IndexedId.is_id(name) or await find(stack, name, IndexedId) is not None
        other = f": {name!r} is an Indexed, which its own calls read" if is_other else ""
        raise UnknownShard(f"there is no shard named {name!r}{other}")
    return shard


async def resolve_any(stack: Stack, name: str) -> ShardId:
    """The shard, or else the `Indexed`, with the name or id `name`; `UnknownShard`. One request for the name
    of a shard, two for that of an `Indexed`."""
    shard: ShardId | None = await find(stack, name, ShardId)
    if shard is None:
        shard = IndexedId(name) if IndexedId.is_id(name) else await find(stack, name, IndexedId)
    if shard is None:
        raise UnknownShard(f"there is no shard, table or Indexed named {name!r}")
    return shard


async def find(stack: Stack, name: str, kind: type[Id]) -> Id | None:
    """The shard or `Indexed` with that name, if there is one."""
    return (await _read(stack, name, kind))[0]


async def resolve_or_create(stack: Stack, name: str, kind: type[Id]) -> Id:
    """The id of `name`; a free name gets a fresh id. Two requests for a new name."""
    fresh = kind.new(stack.runtime)
    stall = stack.stall_log(lambda: f"the creation of {kind.kind} {name!r}")
    for pause in _pauses(stack.runtime):
        if pause:
            await stack.runtime.sleep(pause)
        shard, seqno = await _read(stack, name, kind)
        if shard is not None:
            return shard
        await _write(stack, name, kind, seqno, fresh, stall)
    raise AssertionError("delays do not end")


async def free(stack: Stack, name: str, shard: ShardId) -> None:
    """Free `name`, unless it has another shard by now."""
    stall = stack.stall_log(lambda: f"the drop of shard {name!r}")
    for pause in _pauses(stack.runtime):
        if pause:
            await stack.runtime.sleep(pause)
        current, seqno = await _read(stack, name, ShardId)
        if current != shard or current == name:
            return
        await _write(stack, name, ShardId, seqno, None, stall)


def _pauses(runtime: Runtime) -> Iterator[float]:
    """The pauses before each read. The second read, after the first write, has none: it sees the effect."""
    return chain(repeat(0.0, 2), runtime.delays())


async def names(stack: Stack, kind: type[Id]) -> dict[str, Id]:
    """All names of that kind in use. A name without a shard is left out: its creator stopped too early. Three
    requests, and one more for every few hundred names; in a bucket one more."""
    from aiopersist.shard.resting import read_resting  # imported late: opening a shard does not need it

    resting = await read_resting(stack)
    keys = await stack.consensus.list_keys(kind.names)
    heads = await stack.consensus.heads({key: resting.get(key) for key in keys})
    by_name = sorted((_name(key, kind), head) for key, head in heads.items() if head is not None)
    ids = {name: shard for name, head in by_name if (shard := named(name, head, kind)) is not None}
    existing = set(await stack.consensus.list_keys(PREFIXES[kind.letter])) if ids else set()
    return {name: shard for name, shard in ids.items() if consensus_key(shard) in existing}


class KnownNames(Generic[Id]):
    """The names of one kind that are in use, as of the last look. A look reads only names that moved."""

    def __init__(self, kind: type[Id]) -> None:
        self._kind = kind
        self._seqnos: dict[str, int] = {}
        self._resting: dict[str, int] | None = None
        self.ids: dict[str, Id] = {}
        """The ids by name."""

    async def look(self, stack: Stack) -> bool:
        """Update the names; returns whether any changed. A request for all keys, and one per some hundred."""
        if self._resting is None:
            from aiopersist.shard.resting import read_resting

            self._resting = await read_resting(stack)
        keys = await stack.consensus.list_keys(self._kind.names)
        freed = self._seqnos.keys() - set(keys)
        for key in freed:
            del self._seqnos[key]
            self.ids.pop(_name(key, self._kind), None)
        changed = bool(freed)
        seqnos = {key: self._seqnos.get(key, self._resting.get(key)) for key in keys}
        for part in sliced(seqnos, HEADS_AT_ONCE):
            for key, head in (await stack.consensus.heads(part)).items():
                changed = True
                self._take(key, head)
        return changed

    def _take(self, key: str, head: Versioned | None) -> None:
        name = _name(key, self._kind)
        shard = None if head is None else named(name, head, self._kind)
        self.ids.pop(name, None)
        self._seqnos.pop(key, None)
        if head is not None:
            self._seqnos[key] = head.seqno
        if shard is not None:
            self.ids[name] = shard


class Naming(NamedTuple):
    """The id of a name, and the version of the name."""

    seqno: int
    shard: str


async def forget_names(stack: Stack, in_use: dict[str, Naming], resting: dict[str, int]) -> None:
    """Remove the names that were freed more than `settings.tombstone_retention_s` ago, or note them in
    `resting` if the store keeps all keys. Notes names in use in `in_use`; they are read again only after a
    change. Two requests, one more for every few hundred names, and one for each removed name."""
    keys = await stack.consensus.list_keys(ShardId.names)
    seqnos = {key: in_use[key].seqno if key in in_use else resting.get(key) for key in keys}
    heads = await stack.consensus.heads(seqnos)
    oldest = await stack.consensus.now() - stack.settings.tombstone_retention_s
    for key in {*in_use} - {*keys}:
        del in_use[key]
    for key, head in heads.items():
        in_use.pop(key, None)
        if head is None:
            continue
        shard = named(_name(key, ShardId), head, ShardId)
        if shard is not None:
            in_use[key] = Naming(head.seqno, shard)
        elif stack.consensus.keeps_keys:
            resting[key] = head.seqno
        else:
            await _forget_name(stack, key, head, oldest)


async def _forget_name(stack: Stack, key: str, head: Versioned, oldest: float) -> None:
    freed_at = json.loads(head.data).get("at")
    if freed_at is None:  # an earlier version of the library freed it without a time: free it again
        name = _name(key, ShardId)
        stall = stack.stall_log(lambda: f"a look at the name {name!r}")
        await _write(stack, name, ShardId, head.seqno, None, stall)
    elif isinstance(freed_at, int | float) and freed_at < oldest:  # else it is damaged, and is not removed
        await stack.consensus.remove(key, head)


async def _read(stack: Stack, name: str, kind: type[Id]) -> tuple[Id | None, int | None]:
    if kind is ShardId and kind.is_id(check_name(name)):
        return kind(name), None
    head = await stack.consensus.likely_head(_key(name, kind), 0)  # most names are written once
    if head is None:
        return None, None
    return named(name, head, kind), head.seqno


def named(name: str, head: Versioned, kind: type[Id]) -> Id | None:
    """The id in this version of the name; `Corruption` for bytes that have none, are damaged, or are of
    another name or version."""
    try:
        value: dict[str, Any] = json.loads(head.data)
        shard = kind(value["shard"]) if value["shard"] else None
        is_sound = "sum" not in value or value["sum"] == _sum_of(_key(name, kind), head.seqno, value)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise Corruption(f"the name {name!r} says {head.data[:80]!r}") from e
    if not is_sound:
        raise Corruption(f"the name {name!r} does not have its checksum: {head.data[:80]!r}")
    return shard


def _sum_of(key: str, seqno: int, value: dict[str, Any]) -> str:
    """The checksum of a version of a name. Versions of earlier releases have none."""
    said = [key, seqno, value["shard"], value.get("at")]
    return f"{crc32(json.dumps(said).encode()):08x}"


async def _write(
    stack: Stack, name: str, kind: type[ShardId], expected: int | None, shard: ShardId | None, stall: StallLog
) -> None:
    value: dict[str, Any] = {"format": 1, "shard": shard}
    if shard is None:
        value["at"] = await stack.consensus.now()
    key, seqno = _key(name, kind), 0 if expected is None else expected + 1
    data = json.dumps({**value, "sum": _sum_of(key, seqno, value)}).encode()
    try:
        await stack.consensus.compare_and_set(key, expected, data)
    except Indeterminate as error:  # the caller reads the name again
        stall.note(error)


def _key(name: str, kind: type[ShardId]) -> str:
    return kind.names + quote(check_name(name), safe=" ")


def _name(key: str, kind: type[ShardId]) -> str:
    return unquote(key.removeprefix(kind.names))


def check_name(name: object) -> str:
    """`name` itself if it is a valid name; else `InvalidUsage` of kind `INVALID_NAME`."""
    if isinstance(name, str) and is_text(name) and len(name.encode()) <= NAME_BYTES_MAX:
        return name
    raise InvalidUsage(
        UsageKind.INVALID_NAME,
        f"{shown(name)} is no name: any text of 1 to {NAME_BYTES_MAX} bytes is",
        name=name,
    )


def is_text(value: object) -> bool:
    """Whether `value` is non-empty text that UTF-8 can write."""
    try:
        return isinstance(value, str) and len(value.encode()) > 0
    except UnicodeEncodeError:  # a lone surrogate
        return False
