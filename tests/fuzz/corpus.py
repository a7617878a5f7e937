"""The corpus: bytes and texts of each kind, as a real location has them and as users hand them over.

    python -m tests.fuzz.corpus

makes it anew, in `tests/fuzz/corpus`: a file of each kind, with a JSON list of the values in base64.
"""

import asyncio
import io
import json
import sqlite3
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import UUID

import pyarrow as pa

import aiopersist as ap
from aiopersist.base.frontier import Antichain
from aiopersist.cli.files import READERS
from aiopersist.cli.formats import Format, sink_of
from aiopersist.data.part.stats import collect, key_lower
from aiopersist.fastapi.events import PAST_MARK
from aiopersist.read import cursor as cursors
from aiopersist.read.cursor import Cursor
from aiopersist.read.places import cursor_of
from aiopersist.shard.log import PREFIXES
from aiopersist.stash.rows import codecs
from aiopersist.state.diff import decode_diff, encode_diff
from aiopersist.state.keys import BlobKey
from aiopersist.state.position import WithinContents
from aiopersist.state.record import HollowPart, encode
from aiopersist.storage.objects.tails import packed
from aiopersist.storage.postgres.hints import payloads
from aiopersist.web.reading import EarlierPages, RowPlace
from tests.compatibility import write as location
from tests.fuzz.schemas import SALES, Sale

FOLDER = Path(__file__).with_name("corpus")
EACH_MAX, BYTES_MAX = 12, 9000
WHERE = [
    'key >= "a" and val.amount > 3',
    "not (key in ('a', 'b''c') or val is null) and `val`.amount <> -1.5e3",
    "(((key = 'x')))",
    "val.shop is not null and val.amount not in (1, 2, 3)",
]
PLACE = WithinContents(as_of=7, key='"apple"', is_key_done=False, past=1, rows=3, schema_id=0, chosen="x")
SHARD = "s2b7ddd32-692f-4f26-9c7d-76eacbcf50f2"
CURSORS = [
    Cursor(SHARD, Antichain(3), None, False, 7, "7b001373f6d51b68d3ba33669ad7fad2.5f048829"),
    Cursor(SHARD, Antichain((0, 2), (1, 1)), (1, 0), True, 7, "7b001373f6d51b68d3ba33669ad7fad2"),
]
CURSOR = cursors.encode(CURSORS[0])
URLS = [
    "/data/orders",
    "mem://name",
    "file:///data/blob?fsync=off",
    "sqlite:///data/state.db",
    "postgres://user:secret@host:5432/db?schema=orders&sslmode=require",
    "s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1",
    "s3://bucket/prefix?poll_s=2",
]


async def _use(folder: Path) -> dict[str, list[bytes]]:
    """Make a location with everything in it, and return what users have of it."""
    urls = {"blob": f"file://{folder}/blob", "consensus": f"sqlite://{folder}/state.db"}
    found: dict[str, list[bytes]] = {}
    async with ap.open(**urls, settings=location.SETTINGS, maintenance=False) as client:
        contents = {write.__name__: await write(client) for write in location.WRITES}
        found["batch"] = [contents["prices"]["batch"].encode()]
        await _use_tables(client)
        async with client.reader("prices", location.PRICES) as reader:
            async with reader.snapshot(1) as snapshot:
                found["part"] = [part.to_transmittable() for part in snapshot.parts()]
        found["writer"] = [await client.workers.register_writer("prices", location.PRICES, 60.0)]
        async with client.workers.shared_read("prices") as shared:
            found["piece"] = await shared.pieces(2)
        async with client.workers.shared_compaction("prices") as compaction:
            found["compaction"] = await compaction.pieces(2)
            found["compacted"] = [await client.workers.compact_piece(piece) for piece in found["compaction"]]
    return found


async def _use_tables(client: ap.Client) -> None:
    table = client.table("stock", str, int)
    for number in range(6):
        await table.put(f"item {number}", number, once=f"request {number}")
    async with table.subscription("billing") as subscription:
        await subscription.ack(await anext(subscription))
    await client.admin.force_compaction("stock")
    await table.put("apple", 1, once="a last one")
    tagged = client.table("tagged", str, int)
    await tagged.put("apple", 1)
    await client.tag(tagged, "kept")
    await client.tag(tagged, "dropped", expires=timedelta(days=1))
    await client.untag(tagged, "dropped")


def _stored(folder: Path) -> dict[str, list[bytes]]:
    """What the stores have: versions as earlier releases wrote them, without their checksums."""
    connection = sqlite3.connect(folder / "state.db")
    rows = connection.execute("SELECT key, data FROM versions ORDER BY key, seqno").fetchall()
    logs: dict[str, list[bytes]] = {}
    found: dict[str, list[bytes]] = {"name": [], "identity": []}
    for key, data in rows:
        if key.startswith(tuple(PREFIXES.values())):
            diff = decode_diff(data)
            prev = None if diff.prev is None else diff.prev.partition(".")[0]
            plain = diff.replace(commit=diff.commit.partition(".")[0], prev=prev)
            logs.setdefault(key, []).append(encode_diff(plain))
        else:
            found["identity" if key.startswith("location") else "name"].append(data)
    found["log"] = [b"\n".join(log) for log in logs.values() if b'"seqno":0' in log[0]]
    blobs = sorted((folder / "blob").rglob("*.*"))
    found["rollup"] = [path.read_bytes() for path in blobs if path.suffix == ".rollup"]
    found["parquet"] = [path.read_bytes() for path in blobs if path.suffix == ".parquet"]
    found["inline"] = [
        part.inline
        for log in logs.values()
        for data in log
        for batch in decode_diff(data).changes.batches.values()
        for part in batch.parts
        if part.inline is not None
    ]
    return found


def _files() -> dict[str, list[bytes]]:
    """Files of columns, as users load them."""
    vals = [{"n": 1, "tags": ["a", None], "at": datetime(2026, 1, 1)}, {"n": None, "tags": [], "at": None}]
    nested = pa.record_batch({"key": pa.array(["a", "b"]), "val": pa.array(vals)})
    flat = pa.record_batch(
        {"key": pa.array([1, 2]), "name": ["x", None], "good": [True, False], "w": [0.5, 1]}
    )
    found: dict[str, list[bytes]] = {}
    for form in READERS:
        for batch in (flat, nested) if form is not Format.CSV else (flat,):
            sink = sink_of(form, file := io.BytesIO(), batch.schema)
            sink.write(batch)
            sink.close()
            found.setdefault(f"file {form}", []).append(file.getvalue())
    return found


def _made() -> dict[str, list[bytes]]:
    rows = [['"a"', '"b"'], ["1", "2"], [0, 1], [1, 1]]
    place = RowPlace('"apple"', 1, 7)
    given = [Sale(amount=1, at=datetime(2026, 1, 1, tzinfo=UTC)), Sale(amount=7, shop="x", price=Decimal(1))]
    sales = pa.table(
        {
            "key": ["a", "b"],
            "val": [sale.model_dump() for sale in given],
            "time": [1, 2],
            "diff": [1, 1],
        },
        SALES.arrow_schema,
    )
    found = collect(sales)
    part = HollowPart(size=1, rows=2, checksum="", key_lower=key_lower(sales), stats=found)
    return {
        "schema": [json.dumps(schema.to_record()).encode() for schema in (SALES, location.PRICES)],
        "stats": [encode(part)],
        "when": [
            b"17",
            b"-3",
            b"2026-01-31T12:00Z",
            b"2026-01-31T12:00:00.5+01:00",
            b"now-5min",
            b"now-1.5d",
        ],
        "cli_value": [b"tea", b"17", b"[null, 1.5]", b'{"amount": 1, "shop": "x", "price": "1.5"}'],
        "web_key": [b"tea", b"0x00ff", b"-17", b"2026-01-31 12:00:00", b"1.25", b'{"a": "x", "b": [1]}'],
        "event": [CURSOR.encode(), f"{CURSOR}{PAST_MARK}12".encode()],
        "blob_key": [BlobKey.new(SHARD, f"w{SHARD[1:]}", UUID(SHARD[1:])).encode()],
        "object": [packed(b"token", tail, b"data") for tail in ([], [b"one", b"", b"three"])],
        "where": [text.encode() for text in WHERE],
        "url": [url.encode() for url in URLS],
        "stash_rows": [json.dumps(rows).encode()],
        "stash_codecs": [json.dumps(codecs(location.PRICES)).encode()],
        "feed_cursor": [cursor_of(SHARD, PLACE).encode()],
        "cursor": [cursors.encode(cursor).encode() for cursor in CURSORS],
        "place": [place.text.encode()],
        "trail": [EarlierPages((RowPlace(), place)).text.encode()],
        "hint": [text.encode() for text in payloads("sender", ["shard/one", "name/größe"])],
        "text": [b"orders", "gr\u00f6\u00dfe/\u65e5\u672c".encode(), SHARD.encode()],
    }


@cache
def corpus(kind: str) -> tuple[bytes, ...]:
    """The values of that kind."""
    return tuple(map(b64decode, json.loads((FOLDER / f"{kind}.json").read_text())))


def main() -> None:
    with TemporaryDirectory() as folder:
        found = asyncio.run(_use(Path(folder))) | _stored(Path(folder)) | _made() | _files()
    keep(found)


def keep(found: dict[str, list[bytes]]) -> None:
    for kind, values in sorted(found.items()):
        some = sorted({value for value in values if len(value) <= BYTES_MAX}, key=len)[:EACH_MAX]
        assert some, f"no {kind} of at most {BYTES_MAX} bytes"
        lines = ",\n".join(json.dumps(b64encode(value).decode()) for value in some)
        (FOLDER / f"{kind}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
