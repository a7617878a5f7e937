"""Goal: a commit that happened and whose answer was lost on the network is neither lost nor repeated, and
its caller gets the right answer. A proxy in front of a real Postgres drops that very answer."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from aiopersist.spark import connect, register
from aiopersist.spark.write import _append_at
from aiopersist.testing.proxy import TcpProxy, completes_command
from aiopersist.testing.servers import PostgresServer
from tests.spark.faults import FORMAT, audit, contents_now, faulty
from tests.spark.schemas import COLUMNS

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

ARM, ARMED = b"arm", b"ok!"


def some_rows(version: int, n: int = 2000) -> list[tuple[int, str]]:
    return [(i, f"row {i} of version {version}") for i in range(n)]


def tells_of_a_commit(answer: bytes) -> bool:
    """Whether it is that to a compare-and-set: one row of at least three columns."""
    at = 0
    while at + 7 <= len(answer):
        if answer[at : at + 1] == b"D":
            return int.from_bytes(answer[at + 5 : at + 7], "big") >= 3 and completes_command(answer)
        at += 1 + int.from_bytes(answer[at + 1 : at + 5], "big")
    return False


class Network:
    """A proxy on a loop of its own, and a port where any process may ask it to drop the next answer."""

    def __init__(self, portal: BlockingPortal, proxy: TcpProxy) -> None:
        self.portal = portal
        self.proxy = proxy
        self.lost: list[asyncio.Future[bytes]] = []
        self.server = portal.call(self._listen)
        self.address: tuple[str, int] = self.server.sockets[0].getsockname()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._asked, "127.0.0.1", 0)

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(ARM))
        self.lost.append(self.proxy.swallow_answers_then_cut(tells_of_a_commit))
        writer.write(ARMED)
        await writer.drain()
        writer.close()

    def drops(self) -> int:
        """How many answers are lost by now."""
        return sum(lost.done() for lost in self.lost)

    async def close(self) -> None:
        self.server.close()


def arm(address: tuple[str, int]) -> None:
    """From any process."""
    with socket.create_connection(address) as asking:
        asking.sendall(ARM)
        assert asking.recv(len(ARMED)) == ARMED


def losing(address: tuple[str, int]) -> Callable[..., Any]:
    """A hook of commits, whose append gets no answer."""

    def commit(real: Any, *_: Any) -> Any:
        from aiopersist.spark import write

        plain = write._append_at

        async def armed(*args: Any) -> int:
            arm(address)
            return await plain(*args)

        write._append_at = armed
        try:
            return real()
        finally:
            write._append_at = plain

    return commit


@pytest.fixture
def network(postgres_server: PostgresServer) -> Iterator[Network]:
    with start_blocking_portal() as portal:
        proxy = TcpProxy(postgres_server.host, postgres_server.port)
        with portal.wrap_async_context_manager(proxy):
            network = Network(portal, proxy)
            yield network
            portal.call(network.close)


@pytest.fixture
def urls(network: Network, postgres_server: PostgresServer, postgres_schema: str, tmp_path: Path) -> Any:
    host, port = network.proxy.host, network.proxy.port
    url = postgres_server.url(postgres_schema, host=host, port=port)
    return {"blob": f"file://{tmp_path / 'blob'}", "consensus": url}


@pytest.fixture
def direct(urls: dict[str, str], postgres_server: PostgresServer, postgres_schema: str) -> Any:
    """The same place, around the network."""
    return {**urls, "consensus": postgres_server.url(postgres_schema)}


def test_of_the_engine(
    spark: Any, urls: Any, direct: Any, name: str, network: Network, monkeypatch: Any
) -> None:
    """Goal: the time that is returned is that of the append, with a transaction of the caller's or none."""

    async def armed(*args: Any) -> int:
        arm(network.address)
        return await _append_at(*args)

    expected: list[Any] = []
    with connect(spark, **urls, maintenance=False) as sc:
        sc.write_df(spark.createDataFrame([], COLUMNS), name, keys=["id"])
        monkeypatch.setattr("aiopersist.spark.write._append_at", armed)
        for version in range(1, 4):
            df = spark.createDataFrame(some_rows(version), COLUMNS).repartition(2)
            txn = ("app", version) if version > 1 else None
            assert sc.write_df(df, name, txn=txn) == version
            assert network.drops() == version
            expected += some_rows(version)
        assert sc.write_df(df, name, mode="upsert", txn=("app", 4)) == 4
        gone = spark.createDataFrame([(i,) for i in range(1000)], "id long")
        assert sc.write_df(gone, name, mode="delete", txn=("app", 5)) == 5
        assert sc.delete_where(name, pc.field("key", "id") >= 1500) == 6
        assert network.drops() == 6
    audit(direct, name, some_rows(3)[1000:1500])


def test_of_the_committers_hook(spark: Any, urls: Any, direct: Any, name: str, network: Network) -> None:
    """Goal: the same in the process that Spark starts for a commit, for a batch."""
    connect(spark, **direct)
    spark.dataSource.register(faulty({"writer.commit": losing(network.address)}))
    try:
        expected: list[Any] = []
        for version in range(1, 3):
            df = spark.createDataFrame(some_rows(version), COLUMNS).repartition(2)
            df.write.format(FORMAT).mode("append").options(**urls, keys="id").save(name)
            assert network.drops() == version
            expected += some_rows(version)
            assert contents_now(direct, name).total() == len(expected)
    finally:
        register(spark)
    audit(direct, name, expected)


def test_of_a_streams_commit(
    spark: Any, urls: Any, direct: Any, name: str, network: Network, tmp_path: Path
) -> None:
    """Goal: each batch of a stream is there once, though no answer to its append arrived."""
    with connect(spark, **direct) as sc:
        for version in range(2):
            sc.write_df(spark.createDataFrame(some_rows(version, 500), COLUMNS), name, keys=["id"])
    spark.dataSource.register(faulty({"streamWriter.commit": losing(network.address)}))
    try:
        source = spark.readStream.format(FORMAT).options(**direct, startingTime=0, max_rows_per_trigger=1)
        sink = (
            source.load(name)
            .drop("_time")
            .writeStream.format(FORMAT)
            .options(**urls, keys="id", diff="_diff")
        )
        query = sink.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True)
        assert query.start(f"{name}-to").awaitTermination(100)
    finally:
        register(spark)
    assert network.drops() == 2
    audit(direct, f"{name}-to", [(i, n) for version in range(2) for i, n in some_rows(version, 500)])


def test_of_a_compaction(
    spark: Any, urls: Any, direct: Any, name: str, network: Network, monkeypatch: Any
) -> None:
    """Goal: a compaction that was applied unheard is done, and changes nothing."""
    from aiopersist.compact.shared_compaction import SharedCompaction

    plain = SharedCompaction.apply

    async def armed(*args: Any) -> bool:
        arm(network.address)
        return await plain(*args)

    monkeypatch.setattr(SharedCompaction, "apply", armed)
    expected: list[Any] = []
    with connect(spark, **urls, maintenance=False) as sc:
        for version in range(3):
            expected += some_rows(version, 700)
            df = spark.createDataFrame(some_rows(version, 700), COLUMNS)
            sc.write_df(df, name, keys=["id"])
        assert sc.compact(name)
        assert network.drops() == 1
        assert not sc.compact(name)
    audit(direct, name, expected)
