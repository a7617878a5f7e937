"""Goal: the servers that other tests use keep their promises, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import asyncpg
import pytest

from aiopersist.testing import servers
from aiopersist.testing.started import connects


async def test_postgres_is_durable_and_reachable_both_ways(postgres_server: servers.PostgresServer) -> None:
    for socket in (False, True):
        connection = await asyncpg.connect(postgres_server.dsn(socket=socket))
        assert await connection.fetchval("show fsync") == "on"
        assert int(await connection.fetchval("show max_connections")) >= 100
        await connection.close()


def test_each_test_has_a_schema_of_its_own(
    postgres_url: str, postgres_server: servers.PostgresServer, postgres_schema: str
) -> None:
    assert postgres_url == postgres_server.url(postgres_schema)
    assert "?schema=t_" in postgres_url


def test_s3_keeps_what_is_put(s3_server: servers.S3Server, s3_url: str) -> None:
    client = servers.s3_client(s3_server.endpoint)
    client.put_object(Bucket=s3_server.bucket, Key="a/b", Body=b"x" * 100_000)
    assert client.get_object(Bucket=s3_server.bucket, Key="a/b")["Body"].read() == b"x" * 100_000
    assert s3_url.startswith(f"s3://{s3_server.bucket}/t-")
    assert f"endpoint={s3_server.endpoint}&" in s3_url


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOPERSIST_TEST_VERSITYGW", "/nowhere/versitygw")
    with pytest.raises(RuntimeError, match="no program is there"):
        servers.versitygw_path()


def test_an_endpoint_of_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOPERSIST_TEST_S3_ENDPOINT", "http://127.0.0.1:1")
    assert servers.s3_labels()[0] == "endpoint"


@pytest.mark.slow
def test_a_server_dies_with_the_process_that_started_it() -> None:
    """Killed without a chance to clean up: the guard sees its pipe close."""
    script = (
        "import sys; from aiopersist.testing import servers\n"
        "with servers.postgres_server() as s: print(s.port, flush=True); sys.stdin.read()"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # short, for the paths of sockets
        child = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TMPDIR": directory},
        )
        assert child.stdout is not None and child.stdin is not None
        port = int(child.stdout.readline())
        assert servers._postgres_accepts(port)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdin.close()
        child.stdout.close()
        deadline = servers.SYSTEM.monotonic() + 20
        while connects(port):
            assert servers.SYSTEM.monotonic() < deadline, "Postgres outlived its test run"
        while list(Path(directory).glob("*/data/postmaster.pid")):  # still writing its last files
            assert servers.SYSTEM.monotonic() < deadline, "Postgres did not shut down"


@pytest.mark.slow
def test_two_postgres_at_once_and_none_afterwards() -> None:
    with servers.postgres_server() as one, servers.postgres_server() as two:
        assert one.port != two.port
        assert servers._postgres_accepts(one.port) and servers._postgres_accepts(two.port)
    assert not connects(one.port) and not connects(two.port)
    assert not Path(one.socket_dir).exists()


@pytest.mark.slow
def test_an_option_that_postgres_refuses_shows_its_log() -> None:
    with (
        pytest.raises(RuntimeError, match="no_such_option"),
        servers.postgres_server({"no_such_option": 1}),
    ):
        pass


def test_moto_answers(s3_server: servers.S3Server) -> None:
    if s3_server.label != "moto":
        pytest.skip("about moto")
    with urllib.request.urlopen(s3_server.endpoint + "/moto-api/") as answer:
        assert answer.status == 200
