"""A pgbouncer before a real Postgres: the one on the `PATH` or in `/usr/sbin`, or the one that
`AIOPERSIST_TEST_PGBOUNCER` names."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from aiopersist.testing.servers import PostgresServer
from aiopersist.testing.started import (
    PORT_ATTEMPTS,
    connects,
    process,
    tail,
    temporary_directory,
    unused_port,
    wait_until,
)


def pgbouncer_path() -> str | None:
    """The path of the program, or `None`."""
    named = os.environ.get("AIOPERSIST_TEST_PGBOUNCER")
    if named:
        return shutil.which(named)
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")


def pgbouncer_version() -> tuple[int, ...]:
    """The version of that program, such as `(1, 24, 1)`."""
    said = subprocess.run([str(pgbouncer_path()), "--version"], check=True, capture_output=True, text=True)
    return tuple(map(int, re.findall(r"\d+", said.stdout.splitlines()[0])))


@contextmanager
def pgbouncer(
    postgres: PostgresServer, mode: str = "transaction", *, port: int | None = None, **options: object
) -> Iterator[PostgresServer]:
    """A pgbouncer in that pool mode; `options` go to its configuration. `port`: of a proxy before Postgres.
    What it yields has the URLs that lead through it."""
    program = pgbouncer_path()
    if program is None:
        raise RuntimeError("there is no pgbouncer: apt-get install pgbouncer")
    with temporary_directory("pgbouncer") as directory:
        directory.chmod(0o755)
        file = directory / "pgbouncer.ini"
        for _ in range(PORT_ATTEMPTS):
            conf = {
                "listen_addr": "127.0.0.1",
                "listen_port": (listens := unused_port()),
                "unix_socket_dir": "",
                "auth_type": "any",
                "pool_mode": mode,
                **options,
            }
            target = f"* = user={postgres.user} host={postgres.host} port={port or postgres.port}"
            lines = ["[databases]", target, "[pgbouncer]", *(f"{name} = {conf[name]}" for name in conf)]
            file.write_text("\n".join(lines) + "\n")
            user = ["-u", "nobody"] if os.geteuid() == 0 else []  # it refuses root
            with process([program, *user, str(file)], directory / "log", "KILL") as guard:
                if wait_until(connects, listens, guard):
                    yield replace(postgres, host="127.0.0.1", port=listens)
                    return
        raise RuntimeError(f"pgbouncer did not start:\n{tail(directory / 'log')}")
