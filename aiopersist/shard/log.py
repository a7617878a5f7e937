"""Reading a shard's state: a rollup, then diffs.

The consensus store has the newest versions, as diffs; the blob store has rollups. The earliest live version
is 0, or has a rollup at exactly its seqno, and every diff names the latest rollup. So a state is read in two
steps: first the head; then, at the same time, the rollup that it names and the diffs after that. Meanwhile
other processes may commit and truncate versions; then the read begins again at a newer head."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from math import inf

from aiopersist.base.ending import both
from aiopersist.base.errors import Corruption
from aiopersist.shard.stack import Stack
from aiopersist.state.diff import Diff, apply, tombstone
from aiopersist.state.invariants import check_state
from aiopersist.state.model import State
from aiopersist.state.rollup_file import decode_rollup
from aiopersist.state.seal import decode_version
from aiopersist.storage.consensus import Versioned

PREFIXES = {"s": "shard/", "i": "indexed/"}  # by the first letter of an id: of a shard, of an `Indexed`
SCAN_LIMIT = 512  # versions per request: at most a few MB, since inline parts are small
FEW = 8  # versions: applying them takes less than a millisecond


class Truncated(Exception):
    """Versions that should be read were truncated: another process collects."""


def consensus_key(shard: str) -> str:
    """The key of the versions of `shard`."""
    return PREFIXES[shard[0]] + shard


async def list_shards(stack: Stack) -> list[str]:
    """The ids of all shards, and of every `Indexed`. Two requests."""
    listed = [(prefix, await stack.consensus.list_keys(prefix)) for prefix in PREFIXES.values()]
    return [key.removeprefix(prefix) for prefix, keys in listed for key in keys]


async def versions_between(
    stack: Stack, shard: str, first: int, last: int
) -> AsyncIterator[Sequence[Versioned]]:
    """The versions from `first` to `last`, as many at a time as one request reads. `Truncated`."""
    at = first
    while at <= last:
        versions = await _page_from(stack, shard, at, last)
        if not versions or versions[0].seqno != at:
            raise Truncated(f"version {at} of {shard}")
        yield versions
        at = versions[-1].seqno + 1


async def _page_from(stack: Stack, shard: str, first: int, last: int) -> Sequence[Versioned]:
    """As many of the versions from `first` to `last` as one request reads. After a truncation they begin
    later, or there are none. A head at or beyond `last` was read before."""
    return await stack.consensus.versions(consensus_key(shard), first, min(first + SCAN_LIMIT - 1, last))


async def load(stack: Stack, shard: str) -> State | None:
    """The state at the head; `None` if there is no such shard. Costs a read of the head, of the latest rollup
    if there is one, and a scan for every 512 versions since then; the first scan runs beside the read of the
    rollup."""
    # A head, and the missing part of its state: `Corruption`, unless the head moves.
    fault: tuple[int, str] | None = None
    while True:
        head = await stack.consensus.head(consensus_key(shard))
        if head is None:
            return None
        if fault is not None and fault[0] == head.seqno:
            raise Corruption(fault[1], shard_id=shard)
        diff = await stack.compute_few(len(head.data), _decode, head, shard)
        if diff.changes.finalized:  # a tombstone needs nothing before it
            return tombstone(diff, shard)
        state, begun = None, None
        if diff.rollup is not None:
            named = partial(read_rollup, stack, diff.rollup.key, diff.rollup.checksum)
            newer = partial(_newer, stack, shard, diff.rollup.seqno, head)
            state, begun = await both(named, newer)
            if state is None:  # replaced and collected meanwhile
                fault = head.seqno, f"rollup {diff.rollup} is named by the head and is not there"
                continue
        read = await replay(stack, shard, state, head, begun)
        if read is not None:
            return read
        fault = head.seqno, f"versions between rollup {diff.rollup} and the head are not there"


async def read_rollup(stack: Stack, key: str, checksum: str) -> State | None:
    """The state in a rollup; `None` if the blob was deleted. Damaged bytes are read again at most twice."""
    for last in (False, False, True):
        data = await stack.blob.uncached.get(key)
        if data is None:
            return None
        try:
            return await stack.compute(_decode_rollup, data, checksum)
        except Corruption:
            if last:
                raise
    raise AssertionError("the last attempt returns or raises")


def _decode_rollup(data: bytes, checksum: str) -> State:
    return check_state(decode_rollup(data, checksum))


async def _newer(stack: Stack, shard: str, seqno: int, head: Versioned) -> Sequence[Versioned]:
    """The first versions after `seqno`, up to `head`: as many as one request reads."""
    if seqno + 1 >= head.seqno:
        return [head] if seqno + 1 == head.seqno else []
    return await _page_from(stack, shard, seqno + 1, head.seqno)


async def replay(
    stack: Stack, shard: str, state: State | None, head: Versioned, begun: Sequence[Versioned] | None = None
) -> State | None:
    """The state after `state` and the versions up to `head`; `None` if some were truncated meanwhile.
    `begun`: the first of these versions, if they were read before."""
    at = -1 if state is None else state.seqno
    if begun is None:
        begun = await _newer(stack, shard, at, head)
    if not begun or begun[0].seqno != at + 1:
        return None
    state = await _after(stack, shard, state, begun)
    try:
        async for versions in versions_between(stack, shard, begun[-1].seqno + 1, head.seqno):
            state = await _after(stack, shard, state, versions)
    except Truncated:
        return None
    return state


async def _after(stack: Stack, shard: str, state: State | None, versions: Sequence[Versioned]) -> State:
    few = len(versions) <= FEW
    size = sum(len(version.data) for version in versions) if few else inf
    return await stack.compute_few(size, replayed, versions, shard, state)


def decoded(versions: Sequence[Versioned], shard: str) -> list[Diff]:
    """The diffs of the versions; `Corruption` for a version that is damaged, or has another number."""
    return [_decode(version, shard) for version in versions]


def replayed(versions: Sequence[Versioned], shard: str, state: State | None) -> State:
    """The state after `state` and these versions. `Corruption` for a version that is damaged, has another
    number, or does not follow."""
    for diff in decoded(versions, shard):
        try:
            state = apply(diff, state)
        except Corruption:
            raise
        except Exception as error:  # any error: the version names a missing record, or has a wrong value
            raise Corruption(f"version {diff.seqno} cannot be applied: {error!r}", shard_id=shard) from error
    assert state is not None  # there is a version
    return state


async def version_at(stack: Stack, shard: str, seqno: int, commit: str) -> bool:
    """Whether version `seqno` has the commit id `commit`, or was truncated. One request."""
    versions = await stack.consensus.scan(consensus_key(shard), seqno, 1)
    return not versions or versions[0].seqno != seqno or _decode(versions[0], shard).commit == commit


def _decode(version: Versioned, shard: str) -> Diff:
    diff = decode_version(version.data, shard)
    if diff.seqno != version.seqno:
        raise Corruption(f"version {version.seqno} says that it is {diff.seqno}", shard_id=shard)
    return diff
