"""Goal: a location opens as it is named, a client owns all it opened, names agree, nothing is left open."""

import asyncio
import logging
import multiprocessing
import os
import socket
import threading
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus
from tests.conftest import StoreUrls
from tests.support.schemas import KIND, SCHEMA

pytestmark = pytest.mark.usefixtures("started_postgres")


@pytest.fixture
async def client(location: StoreUrls) -> AsyncIterator[ap.Client]:
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        yield client


async def is_used(client: ap.Client) -> None:
    """It can be written and read."""
    async with client.writer("used", SCHEMA) as w:
        await w.write([("a", 1)])
    async with client.reader("used", SCHEMA) as r, r.snapshot() as s:
        assert await s.rows() == [("a", 1, 1)]


# --- locations -----------------------------------------------------------------------------------


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
        ({"location": "s3://bucket"}, "s3"),
        ({"location": ""}, "directory"),
        ({"location": 7}, "int"),
        ({"blob": "ftp://x", "consensus": "mem://x"}, "ftp"),
        ({"blob": "mem://x", "consensus": "mysql://x"}, "mysql"),
        ({"blob": "file:///x?fsnyc=off", "consensus": "mem://x"}, "fsnyc"),
        ({"blob": "file:///x?fsync=maybe", "consensus": "mem://x"}, "fsync"),
        ({"blob": "nothing", "consensus": "mem://x"}, "URL"),
        ({"blob": 7, "consensus": "mem://x"}, "int"),
        ({"blob": "mem://x", "consensus": "postgres://host/db?sslmoed=on"}, "sslmoed"),
    ],
)
def test_what_cannot_be_used_fails_at_once(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], says: str
) -> None:
    """Goal: before anything is awaited, and the message names what is at fault."""
    for name in ("LOCATION", "BLOB", "CONSENSUS"):
        monkeypatch.delenv(f"AIOPERSIST_{name}", raising=False)
    with pytest.raises(ap.InvalidLocation, match=says):
        ap.open(**arguments)


async def test_stores_of_two_locations_are_refused() -> None:
    one, two = uuid.uuid4().hex, uuid.uuid4().hex
    for name in (one, two):
        async with ap.open(f"mem://{name}") as client:
            await client.ping()
    with pytest.raises(ap.InvalidLocation):
        await ap.open(blob=f"mem://{one}", consensus=f"mem://{two}")
    async with ap.open(f"mem://{one}"):
        pass


@pytest.mark.parametrize("store", ["refuses", "silent", "s3"])
async def test_a_store_that_cannot_be_reached(tmp_path: Path, store: str) -> None:
    """Goal: `StorageUnavailable` within the timeout for opening, whether it refuses or never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if store == "silent":
            listening.listen()
        port = listening.getsockname()[1]
        urls = {"blob": f"file://{tmp_path}", "consensus": f"postgres://u:hush@127.0.0.1:{port}/db"}
        if store == "s3":
            endpoint = f"s3://b/p?endpoint=http://127.0.0.1:{port}&access_key=k&secret_key=hush"
            urls = {"blob": f"{endpoint}&region=us-east-1", "consensus": "mem://"}
        began = asyncio.get_running_loop().time()
        with pytest.raises(ap.StorageUnavailable) as caught:
            await ap.open(**urls, settings=ap.Settings(open_timeout_s=0.5))  # type: ignore[arg-type]
        assert 0.2 < asyncio.get_running_loop().time() - began < 8
        assert "hush" not in repr(caught.value) + str(caught.value)


# --- secrets -------------------------------------------------------------------------------------


async def test_no_secret_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: in no repr, no error, no log line."""
    caplog.set_level(logging.DEBUG)
    s3 = "s3://bucket/p?endpoint=http://127.0.0.1:1&region=r&access_key=key&secret_key=hush"
    postgres = "postgres://user:hush@127.0.0.1:1/db?schema=s"
    shown = [repr(ap.Location(s3, postgres)), repr(ap.open_blob(s3)), repr(ap.open_consensus(postgres))]
    for urls in ({"blob": s3, "consensus": "mem://"}, {"blob": "mem://", "consensus": postgres}):
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


# --- settings ------------------------------------------------------------------------------------


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


# --- names ---------------------------------------------------------------------------------------

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
            lambda name=name: client.drop(name),
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


# --- drop ----------------------------------------------------------------------------------------


async def test_dropping_a_shard(location: StoreUrls) -> None:
    """Goal: fences handles of every client, ends what waits, never tells the empty upper as progress, and
    frees the name."""
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as client,
        ap.open(blob=location.blob, consensus=location.consensus) as other,
    ):
        w, r = await other.writer("t", SCHEMA), await other.reader("t", SCHEMA)
        await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
        shard = w.shard_id
        told: list[Any] = []

        async def listening() -> None:
            async with r.listen(as_of=0) as listen:
                async for item in listen:
                    told.append(item)  # noqa: PERF401  # what came before the error

        waiting = [
            asyncio.create_task(w.wait_for_upper_past(9)),
            asyncio.create_task(listening()),
            asyncio.create_task(_waiting_snapshot(r)),
        ]
        await asyncio.sleep(0.1)
        await client.drop("t")
        async with asyncio.timeout(15):
            for task in waiting:
                with pytest.raises(ap.ShardFinalized):
                    await task
        assert not any(isinstance(item, ap.Progress) and item.upper == ap.Antichain() for item in told)
        for call in (
            lambda: w.compare_and_append([], 1, 2),
            lambda: w.append([], 1, 2),
            lambda: w.write([("a", 1)]),
            w.fetch_recent_upper,
            lambda: w.wait_for_upper_past(0),
            lambda: other.writer(shard, SCHEMA),
            lambda: other.reader(shard),
            lambda: other.schema(shard),
        ):
            with pytest.raises(ap.ShardFinalized):
                async with asyncio.timeout(5):
                    await call()
        assert await client.list_shards() == {}
        with pytest.raises(ap.UnknownShard):
            await client.drop("t")
        async with client.writer("t", SCHEMA) as again:
            assert again.shard_id != shard
            assert again.upper == ap.Antichain(0)
        await w.aclose()
        await r.aclose()


async def _waiting_snapshot(r: ap.ReadHandle[str, int]) -> None:
    async with r.snapshot(7):
        pass


# --- one shape of every resource -----------------------------------------------------------------


async def test_awaited_or_entered_and_closed_in_another_task(client: ap.Client) -> None:
    for name, opener in (
        ("w", lambda: client.writer("t", SCHEMA)),
        ("r", lambda: client.reader("t", SCHEMA)),
    ):
        async with opener() as entered:
            assert entered.shard_id
        awaited = await asyncio.create_task(_awaited(opener()))
        await asyncio.create_task(awaited.aclose())
        await awaited.aclose()
        await asyncio.gather(awaited.aclose(), awaited.aclose())
        for handle in (entered, awaited):
            with pytest.raises(ap.InvalidUsage) as caught:
                await handle.fetch_recent_upper()
            assert caught.value.kind is KIND.CLOSED, name


async def _awaited(opening: Any) -> Any:
    return await opening


async def test_an_exception_of_the_body_leaves_unwrapped(mem: ap.Client) -> None:
    error = KeyError("mine")
    for opener in (lambda: ap.open("mem://"), lambda: mem.writer("t", SCHEMA)):
        with pytest.raises(KeyError) as caught:
            async with opener():
                raise error
        assert caught.value is error


@pytest.mark.parametrize("closed", ["handle", "client"])
async def test_calls_that_wait_are_told_that_it_closed(closed: str) -> None:
    """Goal: not cancelled, but told; also those that wait for the store, and for their turn."""
    faults = Faults()
    stores = FaultyBlob(MemoryBlob(), faults), FaultyConsensus(MemoryConsensus(), faults)
    client = await ap.open(blob=stores[0], consensus=stores[1])
    w = await client.writer("t", SCHEMA)
    faults.latency_s = (0.2, 0.2)
    calls = [
        asyncio.create_task(call)
        for call in (
            w.wait_for_upper_past(5),
            w.compare_and_append([], 0, 1),
            w.compare_and_append([], 0, 2),
            w.write([("a", 1)]),
            w.fetch_recent_upper(),
        )
    ]
    await asyncio.sleep(0.05)
    await (w if closed == "handle" else client).aclose()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, ap.InvalidUsage)
        assert result.kind is KIND.CLOSED
    assert not any(task.cancelling() for task in calls)
    await client.aclose()


async def test_a_client_closes_its_handles_once_for_all(location: StoreUrls) -> None:
    client = await ap.open(blob=location.blob, consensus=location.consensus)
    w, r = await client.writer("t", SCHEMA), await client.reader("t", SCHEMA)
    await asyncio.gather(client.aclose(), client.aclose())
    await client.aclose()
    for call in (
        lambda: w.write([("a", 1)]),
        w.settle,
        r.fetch_recent_upper,
        client.ping,
        client.list_shards,
        lambda: client.writer("t", SCHEMA),
        lambda: client.reader("t"),
        lambda: client.drop("t"),
    ):
        with pytest.raises(ap.InvalidUsage) as caught:
            await call()
        assert caught.value.kind is KIND.CLOSED
    await w.aclose()
    await r.aclose()
    async with (
        ap.open(blob=location.blob, consensus=location.consensus, maintenance=False) as again,
        again.writer("t", SCHEMA) as w,
    ):
        state = w._shard.state
        assert list(state.writers) == [w.writer_id]  # the others said good-bye
        assert not state.readers


async def test_closing_under_cancellation_goes_on(tmp_path: Path) -> None:
    """Goal: who is cancelled while closing leaves; the release is done by the client."""
    async with ap.open(tmp_path) as client:
        w = await client.writer("t", SCHEMA)
        closing = asyncio.create_task(w.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        shard = client._shards._known[w.shard_id]
        async with asyncio.timeout(5):
            while w.writer_id in (await shard.open()).writers:
                await asyncio.sleep(0.01)


async def test_a_store_that_is_gone_does_not_keep_from_closing() -> None:
    faults = Faults()
    stores = FaultyBlob(MemoryBlob(), faults), FaultyConsensus(MemoryConsensus(), faults)
    client = await ap.open(blob=stores[0], consensus=stores[1], settings=ap.Settings(retry_timeout_s=0.1))
    await client.writer("t", SCHEMA)
    from aiopersist.testing.faults import Outcome

    faults.rates = {Outcome.REFUSED: 1.0}
    async with asyncio.timeout(8):
        await client.aclose()


async def test_another_loop_is_refused_at_once(mem: ap.Client) -> None:
    """Goal: in another thread every call is `WRONG_LOOP`, closing too; here all goes on."""
    w, r = await mem.writer("t", SCHEMA), await mem.reader("t", SCHEMA)
    found: list[Any] = []

    def elsewhere() -> None:
        for call in (
            lambda: w.write([("a", 1)]),
            w.fetch_recent_upper,
            w.settle,
            w.aclose,
            r.fetch_recent_upper,
            mem.ping,
            mem.aclose,
            lambda: _awaited(mem.writer("t", SCHEMA)),
        ):
            try:
                found.append(asyncio.run(call()))
            except Exception as error:
                found.append(error)

    await asyncio.to_thread(elsewhere)
    assert [getattr(error, "kind", error) for error in found] == [KIND.WRONG_LOOP] * 8
    assert await w.write([("a", 1)]) == 0


def _child(connection: Any, call: Any) -> None:
    try:
        asyncio.run(call())
        connection.send(None)
    except BaseException as error:
        connection.send(getattr(error, "kind", repr(error)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_fork_is_refused_at_once(mem: ap.Client) -> None:
    w = await mem.writer("t", SCHEMA)
    here, there = multiprocessing.Pipe()
    threading.Thread(target=lambda: None).start()
    child = multiprocessing.get_context("fork").Process(target=_child, args=(there, w.fetch_recent_upper))
    child.start()
    assert await asyncio.to_thread(here.poll, 20)
    assert here.recv() == KIND.WRONG_LOOP
    await asyncio.to_thread(child.join)
    assert await w.write([("a", 1)]) == 0


# --- nothing is left open ------------------------------------------------------------------------


def open_files(below: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(str(below)):
            found.append(target)
    return found


async def test_nothing_of_the_location_is_open_afterwards(tmp_path: Path) -> None:
    """Goal: no file, no task, no thread of its lanes, also when calls were cancelled before."""
    tasks = len(asyncio.all_tasks())
    threads = {thread.name for thread in threading.enumerate()}
    client = await ap.open(tmp_path)
    await is_used(client)
    w = await client.writer("t", SCHEMA)
    waiting = asyncio.create_task(w.wait_for_upper_past(9))
    hurried = asyncio.create_task(w.write([("a", 1)]))
    await asyncio.sleep(0.001)
    hurried.cancel()
    assert open_files(tmp_path)
    await client.aclose()
    await asyncio.gather(waiting, hurried, return_exceptions=True)
    assert open_files(tmp_path) == []
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == tasks
    async with asyncio.timeout(5):  # a thread that was told to end ends soon
        while any("sqlite" in name for name in {t.name for t in threading.enumerate()} - threads):
            await asyncio.sleep(0.01)


async def test_maintenance_may_be_left_to_others(tmp_path: Path) -> None:
    async with ap.open(tmp_path, maintenance=False, settings=ap.Settings(rollup_every=2)) as client:
        for _ in range(3):
            await is_used_again(client)
    assert not list(tmp_path.rglob("*.rollup"))
    async with ap.open(tmp_path, settings=ap.Settings(rollup_every=2)) as client:
        for _ in range(3):
            await is_used_again(client)
        async with asyncio.timeout(5):
            while not list(tmp_path.rglob("*.rollup")):
                await asyncio.sleep(0.01)


async def is_used_again(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        await w.write([("a", 1)])
