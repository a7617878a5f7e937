"""Goal: a location opens as it is named, a client owns all handles that it opened, names agree, and no
resource stays open."""

import asyncio
import logging
import socket
import uuid
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.client.client_kit import is_used
from tests.conftest import StoreUrls
from tests.support.schemas import KIND, SCHEMA

pytestmark = pytest.mark.usefixtures("started_postgres")


NAMES = [
    "a",
    " ",
    ".",
    "..",
    "a/b",
    "%41",
    "ä" * 256,
    "x" * 512,
    "\0",
    "a\nb",
    "name/",
    "😀" * 128,
    "S" + "0" * 36,
]


# --- locations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["str", "path", "relative", "location", "urls", "environment", "two_env"])
async def test_every_way_to_name_a_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Goal: all lead to the same place: a directory with `blob/` and `state.db`."""
    blob, consensus = f"file://{tmp_path}/blob", f"sqlite://{tmp_path}/state.db"
    monkeypatch.chdir(tmp_path.parent)
    if form == "environment":
        monkeypatch.setenv("AIOPERSIST_LOCATION", str(tmp_path))
    if form == "two_env":
        monkeypatch.setenv("AIOPERSIST_BLOB", blob)
        monkeypatch.setenv("AIOPERSIST_CONSENSUS", consensus)
    opening = {
        "str": lambda: ap.open(str(tmp_path)),
        "path": lambda: ap.open(tmp_path),
        "relative": lambda: ap.open(tmp_path.name),
        "location": lambda: ap.open(ap.Location(blob, consensus)),
        "urls": lambda: ap.open(blob=blob, consensus=consensus),
    }.get(form, ap.open)
    async with opening() as client:
        await is_used(client)
    assert (tmp_path / "blob").is_dir()
    assert (tmp_path / "state.db").is_file()
    async with ap.open(tmp_path) as again:
        assert list(await again.list_shards()) == ["used"]


async def test_memory_is_private_or_shared_by_name() -> None:
    name = uuid.uuid4().hex
    async with ap.open("mem://") as one, ap.open("mem://") as two:
        await is_used(one)
        assert await two.list_shards() == {}
    async with ap.open(f"mem://{name}") as one:
        await is_used(one)
    async with ap.open(f"mem://{name}") as two:  # it lives as long as the process
        assert list(await two.list_shards()) == ["used"]


async def test_instances_are_used_and_left_open() -> None:
    blob, consensus = MemoryBlob(), MemoryConsensus()
    async with ap.open(blob=blob, consensus=consensus) as client:
        await is_used(client)
    async with ap.open(blob=blob, consensus=consensus) as client:
        assert list(await client.list_shards()) == ["used"]
    assert await consensus.list_keys("name/") != []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "AIOPERSIST_LOCATION"),
        ({"blob": "mem://x"}, "consensus"),
        ({"consensus": "mem://x"}, "blob"),
        ({"location": "here", "blob": "mem://x"}, "not both"),
        ({"location": "gopher://bucket"}, "gopher"),
        (
            {"location": "postgres://u:secret@h/db"},
            r"ap.open\(blob='s3://bucket/prefix', consensus=",
        ),
        ({"location": "postgresql://h/db"}, "blob='file:///directory'"),
        ({"location": "sqlite:///x/state.db"}, r"ap.open\(DIRECTORY\)"),
        ({"location": "file:///x"}, r"ap.open\('/...'\)"),
        ({"location": "file//x"}, "file: write a URL as file://..., a directory as ./..."),
        ({"location": "S3;//bucket/x"}, "write a URL as S3://"),
        ({"location": "postgres//u:secret@h/db"}, "write a URL as postgres://..."),
        ({"location": "mem//"}, "write a URL as mem://"),
        ({"location": ":memory:"}, "write mem://"),
        ({"location": ""}, "directory"),
        ({"location": 7}, "int"),
        ({"blob": "ftp://x", "consensus": "mem://x"}, "ftp"),
        ({"blob": "mem://x", "consensus": "mysql://x"}, "mysql"),
        ({"location": "s3://bucket/x?poll_s=often"}, "poll_s"),
        ({"blob": "file:///x?fsnyc=off", "consensus": "mem://x"}, "fsnyc"),
        ({"blob": "file:///x?fsync=maybe", "consensus": "mem://x"}, "fsync"),
        ({"blob": "nothing", "consensus": "mem://x"}, "URL"),
        ({"blob": 7, "consensus": "mem://x"}, "int"),
        ({"blob": "mem://x", "consensus": "postgres://host/db?sslmoed=on"}, "sslmoed"),
    ],
)
def test_what_cannot_be_used_fails_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    """Goal: before anything is awaited, and the message names what is at fault."""
    for name in ("LOCATION", "BLOB", "CONSENSUS"):
        monkeypatch.delenv(f"AIOPERSIST_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ap.InvalidLocation, match=says) as refused:
        ap.open(**arguments)
    assert "secret" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_may_be_called_as_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("./file//x", "file/y", "data//z"):
        async with ap.open(name) as client:
            await is_used(client)
    assert {p.name for p in (tmp_path / "file").iterdir()} == {"x", "y"}


async def test_stores_of_two_locations_are_refused() -> None:
    one, two = uuid.uuid4().hex, uuid.uuid4().hex
    for name in (one, two):
        async with ap.open(f"mem://{name}") as client:
            await client.ping()
    with pytest.raises(ap.InvalidLocation):
        await ap.open(blob=f"mem://{one}", consensus=f"mem://{two}")
    async with ap.open(f"mem://{one}"):
        pass


@pytest.mark.parametrize("store", ["blob", "consensus"])
async def test_a_ping_asks_both_stores(store: str) -> None:
    """Goal: what is in a cache says nothing about a store."""
    faults = {"blob": Faults(), "consensus": Faults()}
    blob = FaultyBlob(ap.open_blob("mem://"), faults["blob"])
    consensus = FaultyConsensus(ap.open_consensus("mem://"), faults["consensus"])
    async with ap.open(blob=blob, consensus=consensus, settings=ap.Settings(open_timeout_s=0.2)) as client:
        await client.ping()
        faults[store].rates = {Outcome.REFUSED: 1.0}
        for _ in range(2):
            with pytest.raises(ap.StorageUnavailable):
                await client.ping()
        faults[store].heal()
        await client.ping()


@pytest.mark.parametrize("store", ["refuses", "silent", "s3", "bucket"])
async def test_a_store_that_cannot_be_reached(tmp_path: Path, store: str) -> None:
    """Goal: `StorageUnavailable` within the timeout for opening, whether it refuses or never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if store == "silent":
            listening.listen()
        port = listening.getsockname()[1]
        urls = {"blob": f"file://{tmp_path}", "consensus": f"postgres://u:hush@127.0.0.1:{port}/db"}
        if store in ("s3", "bucket"):
            endpoint = f"s3://b/p?endpoint=http://127.0.0.1:{port}&access_key=k&secret_key=hush"
            endpoint += "&region=us-east-1"
            urls = {"location": endpoint} if store == "bucket" else {"blob": endpoint, "consensus": "mem://"}
        began = asyncio.get_running_loop().time()
        with pytest.raises(ap.StorageUnavailable) as caught:
            await ap.open(**urls, settings=ap.Settings(open_timeout_s=0.5))  # type: ignore[arg-type]
        assert 0.2 < asyncio.get_running_loop().time() - began < 25
        assert "hush" not in repr(caught.value) + str(caught.value)


# --- secrets ------------------------------------------------------------------------------------------


async def test_no_secret_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: in no repr, no error, no log line."""
    caplog.set_level(logging.DEBUG)
    s3 = "s3://bucket/p?endpoint=http://127.0.0.1:1&region=r&access_key=key&secret_key=hush"
    postgres = "postgres://user:hush@127.0.0.1:1/db?schema=s"
    shown = [repr(ap.Location(s3, postgres)), repr(ap.open_blob(s3)), repr(ap.open_consensus(postgres))]
    shown.append(repr(ap.open_consensus(s3)))
    pairs = [{"blob": s3, "consensus": "mem://"}, {"blob": "mem://", "consensus": postgres}]
    for urls in (*pairs, {"location": s3}):
        try:
            await ap.open(**urls, settings=ap.Settings(open_timeout_s=0.2))  # type: ignore[arg-type]
        except ap.StorageUnavailable as error:
            while error is not None:
                shown += [str(error), repr(error)]
                error = error.__cause__  # type: ignore[assignment]
    for bad in (f"{s3}&bogus=hush", f"{postgres}&bogus=hush", "postgres://user:hush@host:port/db"):
        with pytest.raises(ap.InvalidLocation) as caught:
            ap.open(blob=bad, consensus=bad)
        shown.append(str(caught.value))
    assert "hush" not in "\n".join([*shown, caplog.text])


# --- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("reader_lease_s", "12.5", 12.5),
        ("ROLLUP_EVERY", "7", 7),
        ("BLOB_TARGET_SIZE", "100", 100),
        ("BLOB_CACHE_BYTES", "5", 5),
    ],
)
def test_settings_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, found: Any
) -> None:
    monkeypatch.setenv(f"AIOPERSIST_{name.upper()}", value)
    assert getattr(ap.Settings(), name.lower()) == found
    assert getattr(ap.Settings(**{name.lower(): 1}), name.lower()) == 1  # an argument wins


@pytest.mark.parametrize(
    "values", [{"no_such": 1}, {"rollup_every": -1}, {"reader_lease_s": -0.5}, {"open_timeout_s": 0}]
)
def test_settings_refuse_what_they_do_not_know(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        ap.Settings(**values)
    ((name, value),) = values.items()
    monkeypatch.setenv(f"AIOPERSIST_{name.upper()}", str(value))
    with pytest.raises(ValidationError):
        ap.Settings()


# --- names --------------------------------------------------------------------------------------------


async def test_any_text_is_a_name(client: ap.Client) -> None:
    """Goal: each is another shard, and all are listed as they were given."""
    found = {}
    for name in NAMES:
        async with client.writer(name, SCHEMA) as w:
            found[name] = w.shard_id
    assert await client.list_shards() == found
    assert len(set(found.values())) == len(NAMES)
    for name, shard in found.items():
        assert await client.shard_id(name) == shard
        assert await client.shard_id(shard) == shard


@pytest.mark.parametrize("name", ["", "x" * 513, "ä" * 257, "a\ud800", None, 7, b"bytes"], ids=repr)
async def test_what_is_no_name(mem: ap.Client, name: Any) -> None:
    calls = (
        lambda: mem.writer(name, SCHEMA),
        lambda: mem.reader(name),
        lambda: mem.shard_id(name),
        lambda: mem.drop(name),
        lambda: mem.schema(name),
        lambda: mem.txn_number(name, "app"),
    )
    for call in calls:
        with pytest.raises(ap.InvalidUsage) as caught:
            await call()
        assert caught.value.kind is KIND.INVALID_NAME
    assert await mem.list_shards() == {}


def test_the_form_of_a_shard_id() -> None:
    shard = ap.ShardId.new()
    assert ap.ShardId.parse(str(shard)) == shard
    assert shard.startswith("s")
    assert uuid.UUID(shard[1:]).version == 4
    for text in ("", "s", str(uuid.uuid4()), f"S{uuid.uuid4()}", f"s{uuid.uuid1()}", f"s{uuid.uuid4()} "):
        with pytest.raises(ap.InvalidUsage) as caught:
            ap.ShardId.parse(text)
        assert caught.value.kind is KIND.INVALID_NAME


async def test_a_name_in_the_form_of_an_id_is_that_id(mem: ap.Client) -> None:
    shard = ap.ShardId.new()
    async with mem.writer(str(shard), SCHEMA) as w:
        assert w.shard_id == shard
        await w.write([("a", 1)])
    assert await mem.list_shards() == {}
    async with mem.reader(shard, SCHEMA) as r, r.snapshot() as s:
        assert await s.rows() == [("a", 1, 1)]


async def test_first_users_of_a_name_agree(location: StoreUrls) -> None:
    """Goal: of many at the same moment, in several clients, all write to one shard."""
    clients = [await ap.open(blob=location.blob, consensus=location.consensus) for _ in range(3)]
    writers = await asyncio.gather(*(client.writer("t", SCHEMA) for client in clients * 3))
    assert len({w.shard_id for w in writers}) == 1
    await asyncio.gather(*(w.write([("a", n)]) for n, w in enumerate(writers)))
    async with clients[0].reader("t", SCHEMA) as r, r.snapshot() as s:
        assert len(await s.rows()) == 9
    await asyncio.gather(*(client.aclose() for client in clients))


async def test_only_a_writer_creates(client: ap.Client) -> None:
    """Goal: all other calls raise `UnknownShard` and create nothing; a reader too, if not told to create."""
    for name in ("nothing", str(ap.ShardId.new())):
        calls = (
            lambda name=name: client.reader(name),
            lambda name=name: client.reader(name, SCHEMA),
            lambda name=name: client.reader(name, create=True),
            lambda name=name: client.schema(name),
            lambda name=name: client.txn_number(name, "app"),
            lambda name=name: client.compare_and_evolve_schema(name, 0, SCHEMA),
            lambda name=name: client.admin.drop(name),
            lambda name=name: client.shard_id(name),
        )
        for call in calls:
            with pytest.raises(ap.UnknownShard) as caught:
                await call()
            assert isinstance(caught.value, LookupError)
    assert await client.list_shards() == {}
    async with client.reader("t", SCHEMA, create=True) as r:
        assert (r.since, r.upper) == (ap.Antichain(0), ap.Antichain(0))
    async with client.reader("u", ap.Schema(key=str, val=int, time=2), create=True) as r:
        assert r.upper == ap.Antichain((0, 0))


async def test_two_first_writers_with_other_schemas(mem: ap.Client) -> None:
    results = await asyncio.gather(
        mem.writer("t", SCHEMA), mem.writer("t", ap.Schema(key=bytes, val=int)), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == ["CodecMismatch", "WriteHandle"]
