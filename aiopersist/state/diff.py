"""Diffs of the state, the only form in which a change of a shard is written.

A command returns its *changes* (`Changes`), `diff_of` makes a `Diff` of them, one version, and `apply` makes
the next state. All processes run the same `apply` on the same bytes, also the process that commits, which
decodes its own bytes first. So two states of one version cannot differ.

Each diff names the commit id of the version before it. A version that does not follow from ours comes from a
store that was restored from a backup (`follows`).
"""

import gzip
import zlib
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from msgspec import field
from msgspec.structs import asdict
from pydantic_core import from_json

from aiopersist.base.errors import Corruption
from aiopersist.base.frontier import Antichain
from aiopersist.state.ids import Ids
from aiopersist.state.model import (
    FORMAT,
    FORMAT_OF_CLOCKS,
    FORMAT_OF_IDS,
    FORMAT_OF_MOST,
    FORMAT_OF_SUBSCRIPTIONS,
    FORMAT_OF_TAGS,
    Claim,
    Clock,
    CriticalReader,
    HollowBatch,
    LeasedReader,
    Level,
    Retention,
    Rollup,
    State,
    Tag,
    TransactionRecord,
    Writer,
    are_known_earlier,
)
from aiopersist.state.once import OnceChanges
from aiopersist.state.position import SubscriptionRecord
from aiopersist.state.record import HollowPart, Record, decoder, encode, inline_bytes
from aiopersist.state.streams import StreamsChanges, changed_streams, gone_parts, new_parts

MAPS = (
    "schemas",
    "readers",
    "critical",
    "retention",
    "subscriptions",
    "tags",
    "writers",
    "transactions",
    "batches",
    "levels",
    "claims",
    "rollups",
)

COMMIT_BYTES = 256  # the commit id of a version lies within the first bytes


class Changes(Record, frozen=True, kw_only=True):
    """The values that a command sets (in maps: by key) and the keys that it drops (by map)."""

    shard: str | None = None
    clock: Clock = Clock.LOGICAL
    table: bool = False
    since: Antichain | None = None
    upper: Antichain | None = None
    finalized: bool = False
    schemas: dict[int, dict[str, Any]] = {}
    readers: dict[str, LeasedReader] = {}
    critical: dict[str, CriticalReader] = {}
    retention: dict[int, Retention] = {}
    subscriptions: dict[str, SubscriptionRecord] = {}
    tags: dict[str, Tag] = {}
    writers: dict[str, Writer] = {}
    consumed: dict[str, list[str]] = field(default_factory=dict, name="spent")
    """The new ids by writer. The ids of a dropped writer are dropped with it."""
    transactions: dict[str, TransactionRecord] = {}
    once: OnceChanges | None = None
    batches: dict[int, HollowBatch] = {}
    levels: dict[int, Level] = {}
    fuel: int | None = None
    claims: dict[int, Claim] = {}
    rollups: dict[int, Rollup] = {}
    collected: int | None = None
    streams: StreamsChanges | None = None
    drop: Mapping[str, tuple[int | str, ...]] = {}

    @property
    def plain(self) -> "dict[str, Any]":
        """The set fields that apply to the state without further rules."""
        fields = {name: getattr(self, name) for name in _PLAIN}
        return {
            name: value
            for name, value in fields.items()
            if value is not None and (value or type(value) is not dict)
        }


class RollupName(Record, frozen=True, kw_only=True):
    """The latest rollup, as every diff names it."""

    seqno: int
    key: str
    checksum: str


class Diff(Record, frozen=True, kw_only=True):
    """One version: its changes, and the version before it."""

    format: int
    seqno: int
    commit: str
    prev: str | None
    """The commit id of the version before; `None` for version 0."""
    at: float
    rollup: RollupName | None
    changes: Changes


def diff_of(changes: Changes, state: State | None, *, commit: str, at: float) -> Diff:
    """The version that makes `changes` of `state` (`None`: of nothing, the first version)."""
    return Diff(
        format=format_of(changes),
        seqno=0 if state is None else state.seqno + 1,
        commit=commit,
        prev=None if state is None else state.commit,
        at=at,
        rollup=None if state is None else latest_rollup(changes.rollups or state.rollups),
        changes=changes,
    )


def format_of(value: Changes | State) -> int:
    """The least format in which `value` can be written."""
    drop = value.drop if isinstance(value, Changes) else ()
    if value.tags or "tags" in drop:
        return FORMAT_OF_TAGS
    if value.subscriptions or "subscriptions" in drop:
        return FORMAT_OF_SUBSCRIPTIONS
    if value.once or value.clock is not Clock.LOGICAL or value.table:
        return FORMAT_OF_CLOCKS
    if value.consumed or (value.readers and not are_known_earlier(value.readers.values())):
        return FORMAT_OF_IDS
    return FORMAT_OF_MOST


def latest_rollup(rollups: Mapping[int, Rollup]) -> RollupName | None:
    """The newest of `rollups`. A version that adds a rollup names this rollup itself: older versions may be
    truncated as soon as it exists."""
    if not rollups:
        return None
    seqno = max(rollups)
    return RollupName(seqno=seqno, key=rollups[seqno].key, checksum=rollups[seqno].checksum)


def follows(diff: Diff, state: State | None) -> bool:
    """Whether `diff` is the version after `state`, of the same history."""
    if state is None:
        return diff.seqno == 0 and diff.prev is None
    return diff.seqno == state.seqno + 1 and diff.prev == state.commit


def apply(diff: Diff, state: State | None) -> State:
    """The state after `diff`. `Corruption` if `diff` does not follow from `state`."""
    if not follows(diff, state):
        raise Corruption(
            f"version {diff.seqno} does not follow from {state!r}: was the store restored from a backup?",
            shard_id=state.shard if state else diff.changes.shard,
        )
    changes = diff.changes
    if state is None:
        state = _before(diff)
    if changes.finalized:
        return tombstone(diff, state.shard)
    update: dict[str, Any] = {"seqno": diff.seqno, "commit": diff.commit, "at": diff.at}
    for name, value in changes.plain.items():
        update[name] = {**getattr(state, name), **value} if name in MAPS else value
    for name, keys in changes.drop.items():
        if name == "transactions":
            continue
        kept = update.get(name) or dict(getattr(state, name))
        for key in keys:
            del kept[int(key) if name in _INT_KEYS else key]
        update[name] = kept
    if changes.transactions or changes.consumed or changes.drop or any(map(_IDS, changes.writers.values())):
        update |= _changed_ids(changes, state)
    if changes.once is not None:
        update["once"] = state.once.changed(changes.once.times, diff.at, changes.once.oldest)
    if changes.streams is not None:
        update["streams"] = changed_streams(changes.streams, state.streams)
    if "tags" in changes.drop or not state.tags.keys().isdisjoint(changes.tags):
        update["dropped_at"] = diff.seqno
    if changes.batches or "batches" in changes.drop or changes.streams is not None:
        new, gone = added_parts(changes), replaced_parts(changes, state)
        update["inline_bytes"] = state.inline_bytes + inline_bytes(new)
        if gone:
            update["inline_bytes"] -= inline_bytes(gone)
            if _blobs(gone) - _blobs(new):
                update["dropped_at"] = diff.seqno
    return state.replace(**update)


_APART = {"shard", "clock", "table", "finalized", "drop", "streams", "consumed", "transactions", "once"}
_PLAIN = tuple(name for name in Changes.__struct_fields__ if name not in _APART)
_IDS = attrgetter("consumed")


def _before(diff: Diff) -> State:
    """The state that version 0 changes: it has only what every state has."""
    changes = diff.changes
    if changes.shard is None or changes.since is None or changes.upper is None:
        raise Corruption("a first version sets no shard, since or upper", shard_id=changes.shard)
    return State(
        shard=changes.shard,
        seqno=diff.seqno,
        commit=diff.commit,
        at=diff.at,
        since=changes.since,
        upper=changes.upper,
        clock=changes.clock,
        table=changes.table,
    )


def _changed_ids(changes: Changes, state: State) -> dict[str, Any]:
    """The changed maps of ids, which may have a million: unchanged ids are not copied. Also the writers, if
    their records have ids, as earlier versions of the library wrote them."""
    update: dict[str, Any] = {}
    if changes.transactions or "transactions" in changes.drop:
        gone = map(str, changes.drop.get("transactions", ()))
        update["transactions"] = Ids.of(state.transactions).changed(changes.transactions, gone)
    writers_gone = changes.drop.get("writers", ())
    before = {writer: record.consumed for writer, record in changes.writers.items() if record.consumed}
    if before or changes.consumed or not state.consumed.keys().isdisjoint(writers_gone):
        consumed = {writer: ids for writer, ids in state.consumed.items() if writer not in writers_gone}
        for writer, ids in (*before.items(), *changes.consumed.items()):
            consumed[writer] = consumed.get(writer, Ids[None]()).changed(dict.fromkeys(ids))
        update["consumed"] = consumed
    if before:
        kept = {**state.writers, **changes.writers}
        update["writers"] = {w: without_consumed(r) for w, r in kept.items() if w not in writers_gone}
    return update


def without_consumed(record: Writer) -> Writer:
    """The record without ids, which the state keeps elsewhere."""
    return record.replace(consumed=()) if record.consumed else record


_END = State(shard="", seqno=0, commit="", at=0.0, since=Antichain(), upper=Antichain(), finalized=True)


def tombstone(diff: Diff, shard: str) -> State:
    """The state of a finalized shard, from its newest version alone."""
    collected = diff.changes.collected or 0
    return _END.replace(shard=shard, seqno=diff.seqno, commit=diff.commit, at=diff.at, collected=collected)


def finalized(state: State) -> State:
    """The state after `state` if the shard was finalized, and even its tombstone is deleted."""
    seqno = state.seqno + 1
    return _END.replace(shard=state.shard, seqno=seqno, commit="", at=state.at, collected=seqno)


def tombstone_of(shard: str, data_deleted_at: int = 0) -> Changes:
    """The changes of each version of a finalized shard. They drop no keys, since the earlier state does not
    count. `data_deleted_at`: the seqno of this version, if the data of the shard is deleted."""
    empty = Antichain()
    changes = Changes(shard=shard, since=empty, upper=empty, finalized=True)
    return changes.replace(collected=data_deleted_at) if data_deleted_at else changes


def added_parts(changes: Changes) -> list[HollowPart]:
    """The parts of the batches that `changes` sets."""
    parts = [part for batch in changes.batches.values() for part in batch.parts]
    return parts if changes.streams is None else parts + new_parts(changes.streams)


def replaced_parts(changes: Changes, state: State) -> list[HollowPart]:
    """The parts of the batches of `state` that `changes` replaces or drops."""
    ordinals = (*changes.batches, *map(int, changes.drop.get("batches", ())))
    gone = [state.batches[ordinal] for ordinal in ordinals if ordinal in state.batches]
    parts = [part for batch in gone for part in batch.parts]
    return parts if changes.streams is None else parts + gone_parts(changes.streams, state.streams)


def _blobs(parts: Iterable[HollowPart]) -> set[str]:
    return {part.key for part in parts if part.key is not None}


_INT_KEYS = ("schemas", "retention", "batches", "levels", "claims", "rollups")


def encode_diff(diff: Diff) -> bytes:
    """The diff as JSON, without unset fields."""
    return encode(diff)


def decode_diff(data: bytes) -> Diff:
    """The diff of these bytes; `Corruption` for other bytes, or for a later format."""
    try:
        diff: Diff = decoder(Diff)(data)
    except (ValueError, RecursionError) as e:
        raise not_understood("a diff of the state", data, e) from e
    check_format("a diff of the state", diff.format)
    return diff


def decode_commit(data: bytes) -> str:
    """The commit id of a version, from its first bytes. If they lack it, the whole version is decoded."""
    try:
        begin = from_json(data[:COMMIT_BYTES], allow_partial=True)
    except ValueError:
        begin = None
    fields = begin if isinstance(begin, dict) else {}
    commit, is_ours = fields.get("commit"), fields.get("format") in range(1, FORMAT + 1)
    return commit if is_ours and isinstance(commit, str) else decode_diff(data).commit


def read_back(data: bytes, diff: Diff) -> Diff:
    """The diff of `data`, which was encoded from `diff` before it got its checksum. `Corruption` unless both
    are equal: a value that JSON lacks (an infinity becomes null) is a bug of the command. A rollup needs no
    such check: its records passed it, or were read."""
    read = decode_diff(data)
    if read.changes != diff.changes:
        ours, theirs = asdict(diff.changes), asdict(read.changes)
        names = [name for name in ours if ours[name] != theirs[name]]
        raise Corruption(f"a diff of the state does not read back as it is: {names}")
    return read


def check_format(what: str, number: int) -> None:
    """`Corruption` for a later format: its fields may have the same names and another meaning."""
    if number > FORMAT:
        raise _from_the_future(what, number)


def not_understood(what: str, data: bytes, error: Exception) -> Corruption:
    """The error for `data` that could not be read."""
    import json

    try:
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        number = json.loads(text.partition(b"\n")[0])["format"]
    except (ValueError, KeyError, TypeError, OSError, EOFError, RecursionError, zlib.error):
        return Corruption(f"{what} is not readable: {error}")
    if isinstance(number, int) and number > FORMAT:
        return _from_the_future(what, number)
    return Corruption(f"{what} is not readable: {error}")


def _from_the_future(what: str, number: int) -> Corruption:
    return Corruption(f"{what} has format {number}, this version reads up to {FORMAT}: upgrade aiopersist")
