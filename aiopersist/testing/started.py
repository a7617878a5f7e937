"""Programs that a test starts, and that end with it, even if the test is killed."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from aiopersist.base.runtime import SYSTEM

START_TIMEOUT_S = 60.0  # a loaded machine with two cores; usually well below 1 s
STOP_TIMEOUT_S = 20.0
POLL_S = 0.02
PORT_ATTEMPTS = 5  # a free port may be taken by another process before the server binds it


# Waits for the server; ends it with the signal $0 as soon as standard input closes.
_GUARD = 'exec 3<&0; "$@" & pid=$!; (read _ <&3; kill -s "$0" $pid) 2>/dev/null & wait $pid'


@contextmanager
def http_server(
    command: Callable[[int], Sequence[str]],
    directory: Path,
    env: Mapping[str, str],
    stop_signal: str = "TERM",
) -> Iterator[str]:
    """The URL of a server that `command` starts on the port that it is given; its log is in `directory`."""
    for _ in range(PORT_ATTEMPTS):
        port = unused_port()
        with process(command(port), directory / "log", stop_signal, env=env) as guard:
            if wait_until(connects, port, guard):
                yield f"http://127.0.0.1:{port}"
                return
    raise RuntimeError(f"{command(0)[0]} did not start:\n{tail(directory / 'log')}")


@contextmanager
def process(
    command: Sequence[str],
    log: Path,
    stop_signal: str,
    *,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as output:
        guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, stop_signal, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=log.parent,
            env=env,
            user=user,
            start_new_session=True,  # Ctrl-C in a terminal goes to the tests, which then stop the server
        )
    assert guard.stdin is not None
    try:
        yield guard
    finally:
        guard.stdin.close()
        try:
            guard.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(guard.pid, signal.SIGKILL)
            guard.wait()


@contextmanager
def temporary_directory(name: str) -> Iterator[Path]:
    """A directory of its own, which is removed in the end."""
    directory = Path(tempfile.mkdtemp(prefix=f"aiop-{name}-")).resolve()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def unused_port() -> int:
    """A TCP port on 127.0.0.1 on which no process listened a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def wait_until(ready: Callable[[int], bool], port: int, guard: "subprocess.Popen[bytes]") -> bool:
    """Whether the server became ready; `False` as soon as its process has ended."""
    deadline = SYSTEM.monotonic() + START_TIMEOUT_S
    while SYSTEM.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            guard.wait(POLL_S)
            return False
        if ready(port):
            return guard.poll() is None
    return False


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:] if log.exists() else "(no output)"
