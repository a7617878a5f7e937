"""Every decoder of bytes and texts that a store or a user hands over, and which errors it may raise."""

import asyncio
import gzip
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import aiopersist as ap
from aiopersist.base.errors import (
    Corruption,
    Error,
    InvalidLocation,
    InvalidUpdate,
    InvalidUsage,
    LeaseExpired,
    UnknownShard,
    Unsupported,
)
from aiopersist.base.settings import Settings
from aiopersist.cli.command import CannotBegin, Problems
from aiopersist.cli.files import READERS
from aiopersist.cli.formats import Format
from aiopersist.cli.load import Source
from aiopersist.cli.tables import key_of, val_of
from aiopersist.cli.when import as_of_option, duration_of
from aiopersist.compact import shared_compaction
from aiopersist.data.part.inline import checksum, decode_inline
from aiopersist.data.part.key_range import bounds_of, leaves
from aiopersist.data.part.part import read_footer
from aiopersist.data.part.select import prune
from aiopersist.data.part.stats import decode_key_lower, decode_stats, merge
from aiopersist.data.part.where_text import parse_where
from aiopersist.fastapi.events import place_of
from aiopersist.parts.envelope import Envelope
from aiopersist.read import cursor as cursors
from aiopersist.read import leased, shared_read
from aiopersist.read.places import FORM, within_of
from aiopersist.shard import catalog
from aiopersist.shard.log import decoded, replayed
from aiopersist.stash.errors import StashError
from aiopersist.stash.model import Codecs, StoredRows
from aiopersist.stash.rows import check_codecs, contents_by_key, decode, decode_at
from aiopersist.stash.sqlite_checks import check_rows
from aiopersist.state.diff import decode_commit
from aiopersist.state.invariants import check_state
from aiopersist.state.keys import BlobKey
from aiopersist.state.record import HollowPart, Record, decoder
from aiopersist.state.rollup_file import checksum_of, decode_rollup, encode_rollup
from aiopersist.state.seal import decode_version
from aiopersist.state.trail import Trail
from aiopersist.storage import identity
from aiopersist.storage.consensus import Versioned
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.objects.tails import unpacked
from aiopersist.storage.postgres.hints import heard
from aiopersist.storage.urls import open_blob, open_consensus, parse_location
from aiopersist.web.reading import EarlierPages, RowPlace
from aiopersist.web.rows import parse_key
from aiopersist.write import transmit
from aiopersist.write.checks import check_once
from tests.compatibility.write import PRICES
from tests.fuzz import corpus
from tests.fuzz.pieces import USES, user
from tests.fuzz.schemas import SALES

SHARD = catalog.ShardId(corpus.SHARD)


class Decoder(NamedTuple):
    """`decode` takes any bytes, and returns, or raises one of `errors`."""

    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]


def log(data: bytes) -> None:
    """The versions of a shard, one in each line, and what is done with the state."""
    versions = [Versioned(seqno, line) for seqno, line in enumerate(data.split(b"\n"))]
    for version in versions:
        decode_commit(version.data)
    decoded(versions, SHARD)
    Trail().add([version.data for version in versions], SHARD)
    state = replayed(versions, SHARD, None)
    assert state is not None
    file = encode_rollup(check_state(state))
    assert decode_rollup(file, checksum_of(file)).seqno == state.seqno


def rollup(data: bytes) -> None:
    encode_rollup(check_state(decode_rollup(data, checksum_of(data))))


def rollup_text(data: bytes) -> None:
    """What is compressed in a rollup."""
    rollup(gzip.compress(data, 1, mtime=0))


def schema(data: bytes) -> None:
    """The record of a schema; base64 in a text of JSON."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(record, dict):  # as the state has it
        found: ap.Schema[Any, Any, Any] = ap.Schema.from_record(record)
        repr(found)
        ap.Schema.from_record(found.to_record())


def stats(data: bytes) -> None:
    """The statistics of a part, and its least key."""
    try:
        part = decoder(HollowPart)(data)
    except (ValueError, RecursionError) as error:
        raise Corruption("as a version and a rollup say") from error
    decode_key_lower(part.key_lower, SALES)
    known = part.stats or {}
    decode_stats(known, SALES)
    merge([known, known], SALES)
    prune(pc.field("val", "amount") > 3, [part.stats], SALES)
    bounds_of(part.stats, leaves(SALES))


class _Ref(NamedTuple):
    size: int
    footer_bytes: int
    checksum: str


def footer(data: bytes) -> None:
    read_footer(data, _Ref(len(data), len(data), checksum(data)))


def envelope(kind: Envelope, model: type[Record]) -> Callable[[bytes], object]:
    return lambda data: (kind.trace(data), kind.decode(data, model))


def body(kind: Envelope, decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """The rest of the value after its checksum, which is right."""
    return lambda data: decode(b"%s %d %s\n%s" % (kind.magic, kind.format, checksum(data).encode(), data))


def text(decode: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: decode(data.decode(errors="surrogateescape"))


def recoded(decode: Callable[[str], object], prefix: str = "") -> Callable[[bytes], object]:
    """The values within a cursor, whose checksum is right."""
    from base64 import urlsafe_b64encode
    from zlib import crc32

    def checked(data: bytes) -> object:
        return decode(prefix + urlsafe_b64encode(crc32(data).to_bytes(4, "big") + data).decode().rstrip("="))

    return checked


def where(data: str) -> None:
    parse_where(data, SALES)


def when(data: str) -> None:
    duration_of(data)
    as_of_option(data)


def cli_values(data: str) -> None:
    """A key and a val of a command line."""
    struct = pa.struct([("a", pa.string()), ("b", pa.timestamp("us", "UTC"))])
    others = ap.Schema(pa.int64(), pa.list_(pa.binary())), ap.Schema(pa.field("", struct, False), UUID)
    for of, value_of in product((SALES, PRICES, *others), (key_of, val_of)):
        with suppress(CannotBegin):
            value_of(data, of)


def web_key(data: str) -> None:
    struct = pa.struct([("a", pa.string()), ("b", pa.list_(pa.int64()))])
    others = pa.timestamp("us", "UTC"), pa.decimal128(9, 2), pa.bool_()
    for of in (pa.string(), pa.binary(), pa.int64(), *others, struct):
        with suppress(ValueError):
            parse_key(data, of)


def url(data: str) -> None:
    for open_it in (open_blob, open_consensus):
        try:
            store: Any = open_it(data)
        except InvalidLocation:
            continue
        asyncio.run(store.aclose())
    parse_location(data)


def stash_rows(data: bytes) -> None:
    """Rows as SQLite gives them: values of any type in any column."""
    try:
        rows = StoredRows(*map(list, json.loads(data)))
    except (ValueError, TypeError, RecursionError):
        return
    if len(set(map(len, rows.columns))) > 1:
        return
    check_rows("orders", "prices", rows)
    decode(rows, PRICES, 0)
    decode_at(rows, PRICES, 5)
    contents_by_key(rows, PRICES, 5, "prices")


def stash_codecs(data: bytes) -> None:
    try:
        key, val = json.loads(data)
    except (ValueError, TypeError, RecursionError):
        return
    if isinstance(key, str) and isinstance(val, str):
        check_codecs("prices", Codecs(key, val), PRICES)


def name(data: bytes) -> None:
    """The record of a name; and a key that a record has."""
    head = Versioned(0, data)
    catalog.named("orders", head, catalog.ShardId)


def names(data: str) -> None:
    catalog.check_name(data)
    key = catalog._key(data, catalog.ShardId)
    assert catalog._name(key, catalog.ShardId) == data
    check_once(data, None, Settings())


def an_id(data: str) -> None:
    catalog.ShardId.parse(data)


def location_id(data: bytes) -> None:
    """The identity in one store, and in both."""

    async def check(blob_data: bytes | None, consensus_data: bytes, versions: int) -> None:
        blob, consensus = MemoryBlob(), MemoryConsensus()
        if blob_data is not None:
            await blob.set(identity.BLOB_KEY, blob_data)
        for version in range(versions):
            await consensus.compare_and_set(
                identity.CONSENSUS_KEY, version - 1 if version else None, consensus_data
            )
        await identity.check_identity(blob, consensus)

    asyncio.run(check(data, data, 2))
    asyncio.run(check(None, data, 1))
    other = b"e83cb58e-d7b2-4871-8230-27846ea03e54"
    if data != other:
        with pytest.raises(InvalidLocation):
            asyncio.run(check(other, data, 2))


def file(form: Format) -> Callable[[bytes], object]:
    """A file as `aiopersist load` reads it, into a new shard."""

    def load(data: bytes) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder, "rows")
            path.write_bytes(data)
            for table in Source([str(path)], [form], ("key",), False, None).rows():
                table.validate(full=True)

    return load


FILES = {f"file {form}": form for form in READERS}
"""Kinds whose decoders may end the process."""
ENVELOPES: dict[str, tuple[Envelope, type[Record]]] = {
    "batch": (transmit.ENVELOPE, transmit.Transmittable),
    "writer": (transmit.WRITER, transmit.TransmittedWriter),
    "part": (leased.ENVELOPE, leased.TransmittedPart),
    "piece": (shared_read.ENVELOPE, shared_read.TransmittedPiece),
    "compaction": (shared_compaction.PIECE, shared_compaction.CompactionPiece),
    "compacted": (shared_compaction.RESULT, shared_compaction.CompactedPiece),
}
_ENVELOPES = ENVELOPES.items()
CORRUPT = (Corruption,)
USED = (InvalidUpdate, Corruption, Unsupported, LeaseExpired, UnknownShard, ap.DiffOverflow)
USAGE = (InvalidUsage,)

DECODERS: dict[str, Decoder] = {
    "log": Decoder(log, CORRUPT),
    "version": Decoder(lambda data: decode_version(data, SHARD), CORRUPT),
    "schema": Decoder(schema, CORRUPT),
    "stats": Decoder(stats, CORRUPT),
    "rollup": Decoder(rollup, CORRUPT),
    "rollup text": Decoder(rollup_text, CORRUPT),
    "inline": Decoder(lambda data: decode_inline(data, PRICES, None), CORRUPT),
    "parquet": Decoder(footer, (Corruption, Unsupported)),
    **{kind: Decoder(envelope(*of), (InvalidUpdate,)) for kind, of in _ENVELOPES},
    **{f"{kind} body": Decoder(body(of[0], envelope(*of)), (InvalidUpdate,)) for kind, of in _ENVELOPES},
    **{f"{kind} used": Decoder(body(ENVELOPES[kind][0], user(kind)), USED) for kind in USES},
    "cursor": Decoder(text(lambda data: cursors.decode(data, SHARD)), USAGE),
    "cursor body": Decoder(recoded(lambda data: cursors.decode(data, SHARD)), USAGE),
    "feed_cursor": Decoder(text(lambda data: within_of(data, SHARD)), USAGE),
    "feed_cursor body": Decoder(recoded(lambda data: within_of(data, SHARD), FORM), USAGE),
    "place": Decoder(text(RowPlace.of), USAGE),
    "place body": Decoder(recoded(RowPlace.of), USAGE),
    "trail": Decoder(text(EarlierPages.of), USAGE),
    "trail body": Decoder(recoded(EarlierPages.of), USAGE),
    "where": Decoder(text(where), USAGE),
    **{kind: Decoder(file(form), (Problems,)) for kind, form in FILES.items()},
    "when": Decoder(text(when), (CannotBegin,)),
    "cli_value": Decoder(text(cli_values), ()),
    "web_key": Decoder(text(web_key), ()),
    "event": Decoder(text(place_of), USAGE),
    "blob_key": Decoder(text(BlobKey.parse), USAGE),
    "object": Decoder(partial(unpacked, "name", 7), CORRUPT),
    "url": Decoder(text(url), (InvalidLocation,)),
    "stash_rows": Decoder(stash_rows, (Corruption, StashError, ap.DiffOverflow)),
    "stash_codecs": Decoder(stash_codecs, (Corruption, ap.CodecMismatch)),
    "hint": Decoder(text(heard), ()),
    "name": Decoder(name, CORRUPT),
    "text": Decoder(text(names), USAGE),
    "id": Decoder(text(an_id), USAGE),
    "identity": Decoder(location_id, (InvalidLocation,)),
}
assert all(
    issubclass(error, Error | Problems | CannotBegin)
    for decoder in DECODERS.values()
    for error in decoder.errors
)
