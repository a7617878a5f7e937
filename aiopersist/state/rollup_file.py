"""Rollups: whole states, as bytes in the blob store."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator

from msgspec import field

from aiopersist.base.errors import Corruption
from aiopersist.state.diff import check_format, format_of, not_understood, without_consumed
from aiopersist.state.ids import PAGE_IDS, Ids
from aiopersist.state.model import FORMAT_OF_IDS, State, TransactionRecord
from aiopersist.state.once import NO_IDS, OnceIds, packed, unpacked
from aiopersist.state.record import Record, decoder, encode


class RollupFile(Record, frozen=True, kw_only=True):
    """The first line of a rollup."""

    format: int
    state: State


class _Page(Record, frozen=True, kw_only=True):
    """A further line: some of the ids. A worker thread holds the interpreter's lock while it encodes or
    decodes a page, for a millisecond; a million ids in one piece would take a second."""

    transactions: dict[str, TransactionRecord] = {}
    consumed: dict[str, list[str]] = field(default_factory=dict, name="spent")
    once: list[str] = []


def encode_rollup(state: State) -> bytes:
    """The state as compressed JSON: a line `{"format": 1, "state": {...}}`. Many ids follow as lines of their
    own. A field of a later format that has its default is not written, so older releases can read the
    rollup."""
    number = format_of(state)
    if not state.consumed and not state.once and len(state.transactions) <= PAGE_IDS:
        lines = [encode(RollupFile(format=number, state=state.replace(once=NO_IDS)))]
    else:
        rest = state.replace(transactions=Ids(), consumed={}, once=OnceIds(ever=state.once.ever))
        number = max(number, FORMAT_OF_IDS)
        lines = [encode(RollupFile(format=number, state=rest)), *map(encode, _pages(state))]
    rollup = gzip.compress(b"\n".join(lines), 1, mtime=0)
    hashes = b"".join(b"\n" + encode(_Page(once=[page])) for page in packed(state.once))
    return rollup + gzip.compress(hashes, 0, mtime=0) if hashes else rollup  # hashes do not compress


def _pages(state: State) -> Iterator[_Page]:
    for transactions in Ids.of(state.transactions).pages():
        yield _Page(transactions=transactions)
    for writer, ids in state.consumed.items():
        for page in ids.pages():
            yield _Page(consumed={writer: list(page)})


def decode_rollup(data: bytes, checksum: str) -> State:
    """The state in a rollup; `Corruption` unless the bytes have the `checksum` that the state names."""
    if checksum_of(data) != checksum:
        raise Corruption("a rollup's bytes do not have the checksum that the state names")
    try:
        first, *rest = gzip.decompress(data).split(b"\n")
        rollup = decoder(RollupFile)(first)
        check_format("a rollup", rollup.format)
        return _with_pages(rollup.state, map(decoder(_Page), rest))
    except (ValueError, RecursionError, OSError, EOFError, zlib.error) as e:
        raise not_understood("a rollup", data, e) from e


def _with_pages(state: State, pages: Iterator[_Page]) -> State:
    """The whole state. Consumed ids that earlier versions of the library wrote into the records of writers
    are moved to `State.consumed`."""
    transactions, consumed, once = state.transactions, dict(state.consumed), state.once
    for writer, record in state.writers.items():
        if record.consumed:
            consumed[writer] = Ids(dict.fromkeys(record.consumed))
    for page in pages:
        transactions = transactions.changed(page.transactions)
        once = unpacked(once, page.once)
        for writer, ids in page.consumed.items():
            consumed[writer] = consumed.get(writer, Ids[None]()).changed(dict.fromkeys(ids))
    writers = {writer: without_consumed(record) for writer, record in state.writers.items()}
    return state.replace(transactions=transactions, consumed=consumed, once=once, writers=writers)


def checksum_of(data: bytes) -> str:
    """128 bits of SHA-256, so that no other rollup is taken for this one."""
    return hashlib.sha256(data).hexdigest()[:32]
