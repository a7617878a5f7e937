"""Goal: a client that is far from the store comes through beside a process that is near and never pauses,
with each kind of change, on each kind of real store. Its tries are counted, so the machine's pace decides
nothing. The bounds are shown in virtual time by `tests/shard/test_fairness.py` and
`tests/worlds/test_distances.py`."""

import asyncio
import os
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyConsensus
from aiopersist.testing.proxy import TcpProxy
from aiopersist.testing.servers import PostgresServer, S3Server
from tests.conftest import StoreUrls
from tests.table.kit import in_time, table
from tests.table.near import NUMBERS, Call
from tests.table.processes import ROOT

WAY_S = 0.02  # each way; what the other one does takes some milliseconds in all
CALLS = 2
START_S = 120.0  # where the machine has much else to do
TRIES = 12  # of a call; it needs four as a rule, and without wishes any number

Tries = Callable[[], int]


@asynccontextmanager
async def process_near(urls: StoreUrls, stash: str) -> AsyncIterator[Process]:
    """Its input tells it what to do."""
    command = (sys.executable, "-m", "tests.table.near", *urls, stash)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, stdin=PIPE, stdout=PIPE)
    try:
        yield process
        assert process.returncode is None
    finally:
        await process.communicate()


async def begin(near: Process, what: str) -> None:
    assert near.stdin is not None and near.stdout is not None
    near.stdin.write(f"{what}\n".encode())
    async with asyncio.timeout(START_S):
        assert await near.stdout.readline() == b"begun\n"


async def calls_of(client: ap.Client) -> dict[str, Call]:
    """Each is one commit to one shard."""
    t = table(client)
    writer = await client.writer("s", ap.Schema(str, int), clock="wall")
    ix = await client.indexed("ix", background=False)
    stream = await ix.register("stream", str, int)

    async def body(tx: ap.Transaction) -> None:
        tx.put(t, "far", (await tx.get(t, "far") or 0) + 1)

    return {
        "put": lambda n: t.put("far", n),
        "update": lambda n: t.update("near", lambda old: (old or 0) + 1),
        "transact": lambda n: client.transact(body),
        "write": lambda n: writer.write([("far", n)]),
        "index": lambda n: ix.write([(stream, [("far", n, n, 1)])]),
    }


async def come_through(call: Call, tries: Tries) -> None:
    for n in range(1, CALLS + 1):
        before = tries()
        await in_time(call(n))
        assert tries() - before <= TRIES


async def clients_come_through(
    blob: str, consensus: str | FaultyConsensus, be_far: Callable[[], None], near: Process
) -> None:
    async with ap.open(blob=blob, consensus=consensus, maintenance=False) as client:
        calls = await calls_of(client)
        for call in calls.values():
            await call(0)
        count = client.metrics["consensus.compare_and_set"]
        be_far()
        for what, call in calls.items():
            await begin(near, what)
            before = await table(client).get("near") or 0
            await come_through(call, lambda: count.count)
            if what == "put":
                assert (await table(client).get("near") or 0) > before + CALLS, "the other one goes on"
        assert await table(client).get("far") == 2 * CALLS, "by put and transact"


async def stashes_come_through(url: str, near: Process, far_s: float = 0.0) -> None:
    """The store of this opener is `far_s` away."""
    async with ap.stash.open(url, exclusive=False) as stash:
        store, tried = stash._session.store, 0
        commit, load = store.commit, store.load

        async def far_commit(*arguments: Any) -> Any:
            nonlocal tried
            tried += 1
            await asyncio.sleep(far_s)
            return await commit(*arguments)

        async def far_load(*arguments: Any) -> Any:
            await asyncio.sleep(far_s)
            return await load(*arguments)

        await NUMBERS.upsert_key(stash, "far", 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "commit", far_commit)
            patch.setattr(store, "load", far_load)
            await begin(near, "stash")

            def change(numbers: Any) -> None:
                numbers.set("far", numbers.get("far") + 1)

            await come_through(lambda n: NUMBERS.upsert_key(stash, "far", n), lambda: tried)
            await come_through(lambda n: ap.stash.transact(stash, change, NUMBERS), lambda: tried)
        assert (await NUMBERS.peek_one(stash))["far"] == 2 * CALLS


async def test_on_sqlite(tmp_path: Path) -> None:
    urls = StoreUrls(f"file://{tmp_path}/blob?fsync=off", f"sqlite://{tmp_path}/state.db")
    stash, faults = f"sqlite://{tmp_path}/stash.db", Faults()
    consensus = ap.open_consensus(urls.consensus)

    def be_far() -> None:
        faults.latency_s = (2 * WAY_S, 2 * WAY_S)

    try:
        async with process_near(urls, stash) as near:
            await clients_come_through(urls.blob, FaultyConsensus(consensus, faults), be_far, near)
            await stashes_come_through(stash, near, 2 * WAY_S)
    finally:
        await consensus.aclose()


async def test_on_postgres(tmp_path: Path, postgres_server: PostgresServer, postgres_schema: str) -> None:
    blob, url = f"file://{tmp_path}/blob?fsync=off", postgres_server.url(postgres_schema)
    async with TcpProxy(postgres_server.host, postgres_server.port) as proxy:
        through = postgres_server.url(postgres_schema, host=proxy.host, port=proxy.port)

        def be_far() -> None:
            proxy.delay_s = WAY_S

        async with process_near(StoreUrls(blob, url), url) as near:
            await clients_come_through(blob, through, be_far, near)
            await stashes_come_through(through, near)


async def test_on_a_bucket_alone(s3_server: S3Server) -> None:
    place, (host, _, port) = uuid.uuid4().hex, s3_server.endpoint.rpartition("/")[2].partition(":")
    async with TcpProxy(host, int(port)) as proxy:
        through = f"http://{proxy.host}:{proxy.port}"
        far = StoreUrls(*(s3_server.url(f"{place}/{name}", endpoint=through) for name in StoreUrls._fields))

        def be_far() -> None:
            proxy.delay_s = WAY_S

        urls = StoreUrls(*(s3_server.url(f"{place}/{name}") for name in StoreUrls._fields))
        async with process_near(urls, "") as near:
            await clients_come_through(*far, be_far, near)
