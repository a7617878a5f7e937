"""The backend of the page, served by uvicorn with several workers, and what drives it."""

import asyncio
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvicorn

from tests.examples import BLOCK, ROOT

GUARD_S = 60.0  # for anything that may take long on a loaded machine


def write_app(folder: Path) -> None:
    """`app.py` as the page has it, without its tests."""
    blocks = BLOCK.findall((ROOT / "docs/fastapi.md").read_text(encoding="utf-8"))
    code = [block for block in blocks if "with TestClient" not in block]
    (folder / "app.py").write_text("\n".join(code), encoding="utf-8")


class Backend(NamedTuple):
    """A running server."""

    process: "subprocess.Popen[bytes]"
    url: str

    def workers(self) -> set[int]:
        """The processes that serve."""
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                status = (path / "stat").read_text().rpartition(")")[2].split()
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if int(status[1]) == self.process.pid and status[0] != "Z" and b"spawn_main" in command:
                found.add(int(path.name))
        return found

    def ended(self) -> int:
        """Tell it to end, and wait until it has."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(GUARD_S)


@asynccontextmanager
async def uvicorn_serves(folder: Path, workers: int, env: Mapping[str, str]) -> AsyncIterator[Backend]:
    """`uvicorn app:app` in that folder, ready."""
    options = ["--workers", str(workers)]
    if "timeout_worker_healthcheck" in inspect.signature(uvicorn.Config).parameters:
        options += ["--timeout-worker-healthcheck", str(int(GUARD_S))]  # else a slow worker is killed
    with socket.create_server(("127.0.0.1", 0)) as sock, (folder / "log").open("wb") as log:
        port, number = sock.getsockname()[1], sock.fileno()
        command = [sys.executable, "-m", "uvicorn", "app:app", "--fd", str(number), *options]
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | env, stdout=log, stderr=log, pass_fds=[number]
        )
    backend = Backend(process, f"http://127.0.0.1:{port}")
    try:
        await until_ready(backend)
        yield backend
    finally:
        if process.poll() is None:
            await asyncio.to_thread(_end, process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(GUARD_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def until_ready(backend: Backend) -> None:
    """Wait until it answers."""
    begun = time.monotonic()
    async with httpx.AsyncClient(base_url=backend.url) as http:
        while True:
            assert backend.process.poll() is None, "it has ended"
            assert time.monotonic() < begun + GUARD_S
            try:
                if (await http.get("/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.05)


async def insist(http: httpx.AsyncClient, method: str, path: str, request: str, body: Any) -> httpx.Response:
    """Repeat the request, by its id, until it is answered."""
    begun = time.monotonic()
    while True:
        assert time.monotonic() < begun + GUARD_S
        try:
            answer = await http.request(method, path, json=body, headers={"Idempotency-Key": request})
        except httpx.TransportError:
            continue
        if answer.status_code != 503:
            return answer


class Event(NamedTuple):
    """A server-sent event, as a browser sees it."""

    name: str
    data: Any
    id: str
    """The last id that came."""


class EventReader:
    """Reads events line by line, by the rules of the HTML standard. One without data only gives an id."""

    def __init__(self, last: str = "") -> None:
        self._last = last
        self._name, self._data = "message", ""

    def event(self, line: str) -> Event | None:
        """The event that ends with the line."""
        field, _, value = line.partition(": ")
        if field == "id":
            self._last = value
        elif field == "event":
            self._name = value
        elif field == "data":
            assert not self._data, "a second line of data"
            self._data = value
        elif line == "":
            found = Event(self._name, json.loads(self._data) if self._data else None, self._last)
            self._name, self._data = "message", ""
            return found
        else:
            assert line == ":" or line.startswith("retry: "), line
        return None


def events_in(lines: Iterable[str], last: str = "") -> Iterator[Event]:
    """The events of these lines."""
    reader = EventReader(last)
    return (event for line in lines if (event := reader.event(line)))


@asynccontextmanager
async def streaming(http: httpx.AsyncClient, path: str, last: str) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of a stream, from behind that one on."""
    headers = {"Last-Event-ID": last} if last else {}
    async with http.stream("GET", path, headers=headers, timeout=GUARD_S) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        reader = EventReader(last)
        yield (event async for line in answer.aiter_lines() if (event := reader.event(line)))
