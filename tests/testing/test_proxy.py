"""The proxy loses exactly what it is told to lose, in front of an echo server and of Postgres."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from aiopersist.testing import servers
from aiopersist.testing.proxy import TcpProxy, completes_command


class Echo:
    """Remembers what it heard and says it back."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self.ended = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1000):
                self.heard += data
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.ended += 1
            writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, TcpProxy]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with TcpProxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
        yield echo, proxy
    server.close()


async def connect(proxy: TcpProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(proxy.host, proxy.port)


async def until(condition: object) -> None:
    async with asyncio.timeout(50):
        while not condition():  # type: ignore[operator]  # a plain callable
            await asyncio.sleep(0.005)


async def is_cut(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


async def test_it_forwards_and_counts(echo: tuple[Echo, TcpProxy]) -> None:
    server, proxy = echo
    reader, writer = await connect(proxy)
    writer.write(b"x" * 300_000)
    assert await reader.readexactly(300_000) == b"x" * 300_000
    assert (proxy.bytes_to_server, proxy.bytes_to_client) == (300_000, 300_000)
    assert (proxy.accepted, proxy.connections) == (1, 1)
    writer.write_eof()
    assert await is_cut(reader)
    await until(lambda: proxy.connections == 0)
    assert server.ended == 1
    writer.close()


async def test_cut_ends_both_sides_and_refuse_turns_away(echo: tuple[Echo, TcpProxy]) -> None:
    server, proxy = echo
    reader, writer = await connect(proxy)
    writer.write(b"a")
    assert await reader.readexactly(1) == b"a"
    proxy.refuse()
    assert proxy.cut() == 1
    assert await is_cut(reader)
    await until(lambda: server.ended == 1)
    again, other = await connect(proxy)
    assert await is_cut(again)
    assert proxy.refused == 1
    proxy.accept()
    third, last = await connect(proxy)
    last.write(b"b")
    assert await third.readexactly(1) == b"b"
    for w in (writer, other, last):
        w.close()


async def test_a_held_answer_comes_later_and_the_server_has_done_its_work(
    echo: tuple[Echo, TcpProxy],
) -> None:
    server, proxy = echo
    reader, writer = await connect(proxy)
    proxy.hold_answers()
    writer.write(b"work")
    await until(lambda: server.heard == b"work")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(4), 0.05)
    proxy.release_answers()
    assert await reader.readexactly(4) == b"work"
    writer.close()


async def test_a_held_request_reaches_the_server_after_its_client_is_gone(
    echo: tuple[Echo, TcpProxy],
) -> None:
    server, proxy = echo
    reader, writer = await connect(proxy)
    proxy.hold_requests()
    writer.write(b"late")
    await until(lambda: proxy.connections == 1)
    await asyncio.sleep(0.05)
    assert proxy.cut_clients() == 1
    assert await is_cut(reader)
    assert server.heard == b""
    proxy.release_requests()
    await until(lambda: server.heard == b"late")
    await until(lambda: proxy.connections == 0)
    writer.close()


async def test_bytes_held_back_are_lost_by_a_cut(echo: tuple[Echo, TcpProxy]) -> None:
    server, proxy = echo
    reader, writer = await connect(proxy)
    proxy.hold_requests()
    writer.write(b"never")
    await until(lambda: proxy.connections == 1)
    await asyncio.sleep(0.05)
    proxy.cut()
    proxy.release_requests()
    assert await is_cut(reader)
    await until(lambda: server.ended == 1)
    assert server.heard == b""
    writer.close()


async def test_a_delay_delays(echo: tuple[Echo, TcpProxy]) -> None:
    _, proxy = echo
    reader, writer = await connect(proxy)
    proxy.delay_s = 0.05
    before = asyncio.get_running_loop().time()
    writer.write(b"a")
    await reader.readexactly(1)
    assert asyncio.get_running_loop().time() - before >= 0.1
    writer.close()


async def test_a_swallowed_answer_is_lost_after_the_work_was_done(echo: tuple[Echo, TcpProxy]) -> None:
    server, proxy = echo
    reader, writer = await connect(proxy)
    other_reader, other = await connect(proxy)
    lost = proxy.swallow_answers_then_cut(lambda answer: b"!" in answer)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    writer.write(b"two!")
    assert await lost == b"two!"
    assert await is_cut(reader)
    assert server.heard == b"onetwo!"
    other.write(b"three!")  # once only, and only that connection
    assert await other_reader.readexactly(6) == b"three!"
    for w in (writer, other):
        w.close()


async def test_postgres_commits_a_statement_whose_answer_is_lost(
    postgres_server: servers.PostgresServer,
) -> None:
    direct = await asyncpg.connect(postgres_server.dsn())
    await direct.execute("create table if not exists lost_answers (n int)")
    async with TcpProxy(postgres_server.host, postgres_server.port) as proxy:
        connection = await asyncpg.connect(postgres_server.url(host=proxy.host, port=proxy.port))
        lost = proxy.swallow_answers_then_cut(completes_command)
        with pytest.raises((ConnectionError, asyncpg.PostgresConnectionError)):
            await connection.execute("insert into lost_answers values ($1)", 7)
        assert b"INSERT 0 1" in await lost
        connection.terminate()
    assert await direct.fetchval("select count(*) from lost_answers") == 1
    await direct.close()


async def test_postgres_commits_a_statement_that_arrives_after_its_client_died(
    postgres_server: servers.PostgresServer,
) -> None:
    direct = await asyncpg.connect(postgres_server.dsn())
    await direct.execute("create table if not exists late_requests (n int)")
    async with TcpProxy(postgres_server.host, postgres_server.port) as proxy:
        connection = await asyncpg.connect(postgres_server.url(host=proxy.host, port=proxy.port))
        statement = await connection.prepare("insert into late_requests values ($1)")
        proxy.hold_requests()
        sent = asyncio.create_task(statement.fetch(7))
        await asyncio.sleep(0.1)
        proxy.cut_clients()
        with pytest.raises((ConnectionError, asyncpg.PostgresConnectionError)):
            await sent
        assert await direct.fetchval("select count(*) from late_requests") == 0
        proxy.release_requests()
        async with asyncio.timeout(50):
            while await direct.fetchval("select count(*) from late_requests") == 0:
                await asyncio.sleep(0.01)
        connection.terminate()
    await direct.close()


def message(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(b"", False, id="nothing"),
        pytest.param(message(b"1", b"") + message(b"t", b"\0\0"), False, id="parsed"),
        pytest.param(message(b"C", b"BEGIN\0"), False, id="begin"),
        pytest.param(message(b"C", b"SET\0"), False, id="set"),
        pytest.param(message(b"2", b"") + message(b"C", b"INSERT 0 1\0"), True, id="insert"),
        pytest.param(message(b"C", b"SELECT 1\0")[:-3], True, id="broken off"),
    ],
)
def test_which_answer_completes_a_command(answer: bytes, expected: bool) -> None:
    assert completes_command(answer) is expected
