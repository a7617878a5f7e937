"""Diffs of the state, the only form in which a change of a shard is written.

A command says what it *changes* (`Changes`); `diff_of` makes that a `Diff`, one version; `apply` makes
the next state. The process that commits and every process that reads run the same `apply` on the
same bytes, so two states of one version cannot differ.

Each diff names the commit id of the version before it: a version that does not follow from ours
comes from a store that was restored from a backup (`follows`).
"""

import gzip
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic import Field, ValidationError
from pydantic_core import from_json

from aiopersist.errors import Corruption
from aiopersist.frontier import Antichain
from aiopersist.state.ids import Ids
from aiopersist.state.model import (
    FORMAT,
    FORMAT_OF_CLOCKS,
    FORMAT_OF_IDS,
    FORMAT_OF_MOST,
    Claim,
    Clock,
    CriticalReader,
    HollowBatch,
    LeasedReader,
    Level,
    Retention,
    Rollup,
    State,
    TransactionRecord,
    Writer,
    are_known_earlier,
)
from aiopersist.state.once import OnceChanges
from aiopersist.state.position import SubscriptionRecord
from aiopersist.state.record import HollowPart, Record
from aiopersist.state.streams import StreamsChanges, changed_streams, gone_parts, new_parts

MAPS = (
    "schemas",
    "readers",
    "critical",
    "retention",
    "subscriptions",
    "writers",
    "transactions",
    "batches",
    "levels",
    "claims",
    "rollups",
)

COMMIT_BYTES = 256  # the commit id of a version lies within the first bytes


class Changes(Record):
    """The values that a command sets (in maps: by key) and the keys that it drops (by map). Unset fields stay
    as they are.

    The defaults are made by `dict`: a default that is a dict is copied for each field of each diff that is
    read, and that took a third of the time of an append's diff."""

    shard: str | None = None
    clock: Clock = Clock.LOGICAL
    table: bool = False
    since: Antichain | None = None
    upper: Antichain | None = None
    finalized: bool = False
    schemas: dict[int, dict[str, Any]] = Field(default_factory=dict)
    readers: dict[str, LeasedReader] = Field(default_factory=dict)
    critical: dict[str, CriticalReader] = Field(default_factory=dict)
    retention: dict[int, Retention] = Field(default_factory=dict)
    subscriptions: dict[str, SubscriptionRecord] = Field(default_factory=dict)
    writers: dict[str, Writer] = Field(default_factory=dict)
    spent: dict[str, list[str]] = Field(default_factory=dict)
    """By writer, the ids that are new. The ids of a dropped writer go with it."""
    transactions: dict[str, TransactionRecord] = Field(default_factory=dict)
    once: OnceChanges | None = None
    batches: dict[int, HollowBatch] = Field(default_factory=dict)
    levels: dict[int, Level] = Field(default_factory=dict)
    fuel: int | None = None
    claims: dict[int, Claim] = Field(default_factory=dict)
    rollups: dict[int, Rollup] = Field(default_factory=dict)
    collected: int | None = None
    streams: StreamsChanges | None = None
    drop: dict[str, tuple[int | str, ...]] = Field(default_factory=dict)


class RollupName(Record):
    """The latest rollup, as every diff names it."""

    seqno: int
    key: str
    checksum: str


class Diff(Record):
    """One version: its changes against the version before it, and which version that is."""

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
    number = format_of(changes)
    if state is None:
        first = {"format": number, "seqno": 0, "prev": None, "rollup": None}
        return Diff.of(**first, commit=commit, at=at, changes=changes)
    return Diff.of(
        format=number,
        seqno=state.seqno + 1,
        commit=commit,
        prev=state.commit,
        at=at,
        rollup=latest_rollup(changes.rollups or state.rollups),
        changes=changes,
    )


def format_of(value: Changes | State) -> int:
    """The least format in which `value` can be written."""
    if value.subscriptions or (isinstance(value, Changes) and "subscriptions" in value.drop):
        return FORMAT
    if value.once or value.clock is not Clock.LOGICAL or value.table:
        return FORMAT_OF_CLOCKS
    if value.spent or not are_known_earlier(value.readers.values()):
        return FORMAT_OF_IDS
    return FORMAT_OF_MOST


def latest_rollup(rollups: Mapping[int, Rollup]) -> RollupName | None:
    """The newest of `rollups`. A version that adds a rollup names that very rollup: older versions may be
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
    _check_values(changes, _NEVER_NULL & changes.model_fields_set if state else _AT_FIRST)
    if state is None:
        return _first_state(diff)
    if changes.finalized:
        return tombstone(diff, state.shard)
    update: dict[str, Any] = {"seqno": diff.seqno, "commit": diff.commit, "at": diff.at}
    for name in changes.model_fields_set - _CHANGED_APART:
        value = getattr(changes, name)
        update[name] = {**getattr(state, name), **value} if name in MAPS else value
    for name, keys in changes.drop.items():
        if name == "transactions":
            continue
        kept = update.get(name) or dict(getattr(state, name))
        for key in keys:
            del kept[int(key) if name in _INT_KEYS else key]
        update[name] = kept
    if changes.writers:
        update["writers"] = {writer: without_spent(record) for writer, record in update["writers"].items()}
    update |= _changed_ids(changes, state)
    if changes.once is not None:
        update["once"] = state.once.changed(changes.once.times, diff.at, changes.once.oldest)
    if changes.streams is not None:
        update["streams"] = changed_streams(changes.streams, state.streams)
    if changes.batches or "batches" in changes.drop or changes.streams is not None:
        new, gone = added_parts(changes), replaced_parts(changes, state)
        update["inline_bytes"] = state.inline_bytes + inline_bytes(new) - inline_bytes(gone)
        if _blobs(gone) - _blobs(new):
            update["dropped_at"] = diff.seqno
    return state.replace(**update)


_CHANGED_APART = {"drop", "streams", "spent", "transactions", "once"}


_AT_FIRST = {"shard", "since", "upper"}
_NEVER_NULL = {*_AT_FIRST, "fuel", "collected"}


def _check_values(changes: Changes, names: Collection[str]) -> None:
    """`Corruption` unless these have a value."""
    for name in names:
        if getattr(changes, name) is None:
            raise Corruption(f"a version sets no {name}", shard_id=changes.shard)


def _first_state(diff: Diff) -> State:
    """The state at version 0."""
    changes = diff.changes
    fields = (*MAPS, "shard", "clock", "table", "since", "upper", "finalized")
    values = {name: getattr(changes, name) for name in fields}
    values["transactions"] = Ids(changes.transactions)
    streams = None if changes.streams is None else changed_streams(changes.streams, None)
    return State.of(**values, seqno=diff.seqno, commit=diff.commit, at=diff.at, streams=streams)


def _changed_ids(changes: Changes, state: State) -> dict[str, Any]:
    """The changed maps of ids, which may hold a million: ids that stay are not copied."""
    update: dict[str, Any] = {}
    if changes.transactions or "transactions" in changes.drop:
        gone = map(str, changes.drop.get("transactions", ()))
        update["transactions"] = Ids.of(state.transactions).changed(changes.transactions, gone)
    writers_gone = changes.drop.get("writers", ())
    before = {writer: record.spent for writer, record in changes.writers.items() if record.spent}
    if before or changes.spent or not state.spent.keys().isdisjoint(writers_gone):
        spent = {writer: ids for writer, ids in state.spent.items() if writer not in writers_gone}
        for writer, ids in (*before.items(), *changes.spent.items()):
            spent[writer] = spent.get(writer, Ids[None]()).changed(dict.fromkeys(ids))
        update["spent"] = spent
    return update


def without_spent(record: Writer) -> Writer:
    """The record as the state in memory keeps it."""
    return record.replace(spent=()) if record.spent else record


def tombstone(diff: Diff, shard: str) -> State:
    """The state of a finalized shard, from its newest version alone."""
    return _end(shard, diff.seqno, diff.commit, diff.at, diff.changes.collected or 0)


def finalized(state: State) -> State:
    """The state after `state` where the shard was finalized, and even its tombstone is gone."""
    return _end(state.shard, state.seqno + 1, "", state.at, state.seqno + 1)


def _end(shard: str, seqno: int, commit: str, at: float, collected: int) -> State:
    values = {"shard": shard, "seqno": seqno, "commit": commit, "at": at, "collected": collected}
    return State.of(**values, since=Antichain(), upper=Antichain(), finalized=True)


def tombstone_of(shard: str, data_deleted_at: int = 0) -> Changes:
    """The changes of every version of a finalized shard: nothing before it counts, so nothing is dropped.
    `data_deleted_at`: the seqno of this version, if the data of the shard is deleted."""
    empty = Antichain()
    changes = Changes(shard=shard, since=empty, upper=empty, finalized=True)
    return changes.replace(collected=data_deleted_at) if data_deleted_at else changes


def added_parts(changes: Changes) -> list[HollowPart]:
    """The parts of the batches that `changes` sets."""
    return [part for batch in changes.batches.values() for part in batch.parts] + new_parts(changes.streams)


def replaced_parts(changes: Changes, state: State) -> list[HollowPart]:
    """The parts of the batches of `state` that `changes` replaces or drops."""
    ordinals = (*changes.batches, *map(int, changes.drop.get("batches", ())))
    gone = (state.batches[ordinal] for ordinal in ordinals if ordinal in state.batches)
    return [part for batch in gone for part in batch.parts] + gone_parts(changes.streams, state.streams)


def inline_bytes(parts: Iterable[HollowPart]) -> int:
    """Bytes of the inline ones of `parts`."""
    return sum(part.size for part in parts if part.inline is not None)


def _blobs(parts: Iterable[HollowPart]) -> set[str]:
    return {part.key for part in parts if part.key is not None}


_INT_KEYS = ("schemas", "retention", "batches", "levels", "claims", "rollups")


def encode_diff(diff: Diff) -> bytes:
    """The diff as JSON, without unset fields."""
    return diff.__pydantic_serializer__.to_json(diff, exclude_unset=True)


def decode_diff(data: bytes) -> Diff:
    """`Corruption` for bytes that are no diff, or are of a format that this version does not understand."""
    try:
        diff: Diff = Diff.__pydantic_validator__.validate_json(data)  # skips a layer of Python
    except ValidationError as e:
        raise not_understood("a diff of the state", data, e) from e
    check_format("a diff of the state", diff.format)
    return diff


def decode_commit(data: bytes) -> str:
    """The commit id of a version. It stands at the beginning; the rest, which may be large, is decoded only
    if it does not."""
    try:
        begin = from_json(data[:COMMIT_BYTES], allow_partial=True)
    except ValueError:
        begin = None
    fields = begin if isinstance(begin, dict) else {}
    commit, is_ours = fields.get("commit"), fields.get("format") in range(1, FORMAT + 1)
    return commit if is_ours and isinstance(commit, str) else decode_diff(data).commit


def reads_as(data: bytes, diff: Diff) -> None:
    """`Corruption`, before it is written, unless `data` decodes to `diff`: a value that JSON cannot say (an
    infinity is null in it) would be known in this process alone, and no other process could go on.

    If it does, `apply` makes the same state of both: it is a function of the state before, of the values of
    the diff, which are equal, and of which changes are set. JSON keeps the order of maps.
    A rollup needs no such check: it consists of records that passed it, or were read.
    """
    read = decode_diff(data)
    if read != diff or read.changes.model_fields_set != diff.changes.model_fields_set:
        sides = ({"changes": None, **dict(side), **dict(side.changes)} for side in (diff, read))
        ours, theirs = map(dict, sides)
        names = [name for name in ours if ours[name] != theirs.get(name)]
        raise Corruption(f"a diff of the state does not read back as it is: {names}")


def check_format(what: str, found: int) -> None:
    """`Corruption` for a later format: its fields may have our names and another meaning."""
    if found > FORMAT:
        raise _from_the_future(what, found)


def not_understood(what: str, data: bytes, error: Exception) -> Corruption:
    """Why `data` could not be read."""
    import json

    try:
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        found = json.loads(text.partition(b"\n")[0])["format"]
    except (ValueError, KeyError, TypeError, OSError, EOFError, RecursionError, zlib.error):
        return Corruption(f"{what} is not readable: {error}")
    if isinstance(found, int) and found > FORMAT:
        return _from_the_future(what, found)
    return Corruption(f"{what} is not readable: {error}")


def _from_the_future(what: str, found: int) -> Corruption:
    return Corruption(f"{what} has format {found}, this version reads up to {FORMAT}: upgrade aiopersist")
