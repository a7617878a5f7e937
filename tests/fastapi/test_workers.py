"""Goal: the backend of the page, under uvicorn with four workers, loses and doubles nothing while a worker is
killed and clients repeat what they got no answer for; a stream that is interrupted has each change once; a
server with open streams ends when it is told to."""

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

import aiopersist as ap
from tests.fastapi.backend import GUARD_S, Backend, Event, insist, streaming, uvicorn_serves, write_app

ITEMS = [f"item-{number}" for number in range(8)]
BEGIN = 1000
LAST = "the last one"
CONNECTIONS, TRANSFERS = 8, 240
STORES = ["files+sqlite", "s3+postgres"]
ON_SERVERS = pytest.mark.parametrize(
    "env", ["s3+postgres", pytest.param("files+sqlite", marks=pytest.mark.long)], indirect=True
)


@pytest.fixture(params=STORES)
def env(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    if request.param == "files+sqlite":
        return {"AIOPERSIST_LOCATION": str(tmp_path / "data")}
    urls = request.getfixturevalue("best_s3_url"), request.getfixturevalue("postgres_url")
    return dict(zip(["AIOPERSIST_BLOB", "AIOPERSIST_CONSENSUS"], urls, strict=True))


class Watcher:
    """Follows the changes, over many connections."""

    def __init__(self, backend: Backend, dice: random.Random) -> None:
        self.events: list[Event] = []
        self.connections = 0
        self.begun = asyncio.Event()
        """Whether it has an id to come back with."""
        self._backend = backend
        self._dice = dice

    async def run(self) -> None:
        """Until it has the last one; each connection is broken behind some events."""
        last = ""
        async with httpx.AsyncClient(base_url=self._backend.url) as http:
            while not self.events or self.events[-1].data["key"] != LAST:
                try:
                    async with streaming(http, "/stock-changes", last) as events:
                        self.connections += 1
                        patience = self._dice.randrange(1, 60)
                        async for event in events:
                            last = event.id
                            self.begun.set()
                            if event.data is None:
                                continue
                            self.events.append(event)
                            patience -= 1
                            if not patience or event.data["key"] == LAST:
                                break
                except httpx.TransportError:
                    await asyncio.sleep(0.01)


class Clients:
    """They move counts between items, as drawn."""

    def __init__(self, backend: Backend, seed: int) -> None:
        self._backend = backend
        dice = random.Random(seed)
        self.wanted = [
            (f"t{number}", *dice.sample(ITEMS, 2), dice.randrange(1, 5), dice.random())
            for number in range(TRANSFERS)
        ]
        self.done = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._connection(number) for number in range(CONNECTIONS)))

    async def _connection(self, number: int) -> None:
        async with httpx.AsyncClient(base_url=self._backend.url, timeout=GUARD_S) as http:
            for request, source, target, count, chance in self.wanted[number::CONNECTIONS]:
                body = {"source": source, "target": target, "count": count}
                for _ in range(2 if chance < 0.3 else 1):  # some are sent twice, answered or not
                    answer = await insist(http, "POST", "/transfers", request, body)
                    assert answer.status_code == 201, answer.text
                self.done += 1

    def expected(self) -> dict[str, int]:
        net = Counter(dict.fromkeys(ITEMS, BEGIN))
        for _, source, target, count, _ in self.wanted:
            net[source] -= count
            net[target] += count
        return {**net, LAST: 0}


async def killed_in_the_middle(backend: Backend, clients: Clients) -> int:
    """Kill a worker when a third of the transfers were answered."""
    while clients.done < TRANSFERS // 3:
        await asyncio.sleep(0.002)
    worker = min(backend.workers())
    os.kill(worker, signal.SIGKILL)
    return worker


@ON_SERVERS
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="workers are found in /proc")
async def test_four_workers_of_which_one_is_killed(env: dict[str, str], tmp_path: Path) -> None:
    write_app(tmp_path)
    async with uvicorn_serves(tmp_path, 4, env) as backend:
        clients, watcher = Clients(backend, 1), Watcher(backend, random.Random(2))
        watching = asyncio.create_task(watcher.run())
        async with asyncio.timeout(GUARD_S):
            await watcher.begun.wait()
        async with httpx.AsyncClient(base_url=backend.url, timeout=GUARD_S) as http:
            for item in ITEMS:
                answer = await insist(http, "PUT", f"/stock/{item}", f"begin {item}", {"count": BEGIN})
                assert answer.status_code == 200
            worker, _ = await asyncio.gather(killed_in_the_middle(backend, clients), clients.run())
            answer = await insist(http, "PUT", f"/stock/{LAST}", "end", {"count": 0})
            async with asyncio.timeout(GUARD_S):
                await watching
            stock = {key: item["count"] for key, item in (await http.get("/stock")).json().items()}
        assert stock == clients.expected()
        await journal_is_exact(env, clients)
        each_change_came_once(watcher.events, clients)
        assert watcher.connections > 5
        async with asyncio.timeout(GUARD_S):  # another one is there in its place
            while len(workers := backend.workers()) < 4:
                await asyncio.sleep(0.05)
        assert worker not in workers


async def journal_is_exact(env: dict[str, str], clients: Clients) -> None:
    places = {name.removeprefix("AIOPERSIST_").lower(): value for name, value in env.items()}
    given: Any = {"location": None, **places}
    async with ap.open(given.pop("location"), **given, maintenance=False) as client:
        async with client.reader("transfers") as reader, reader.snapshot() as snapshot:
            rows = (await snapshot.to_arrow()).to_pylist()
    found = {row["key"]: (row["val"]["source"], row["val"]["target"], row["val"]["count"]) for row in rows}
    assert len(found) == len(rows)
    assert found == {request: (s, t, count) for request, s, t, count, _ in clients.wanted}


def each_change_came_once(events: list[Event], clients: Clients) -> None:
    """The changes of each item are a chain from nothing to its last count. Those of one commit are one."""
    counts: dict[str, int | None] = dict.fromkeys([*ITEMS, LAST])
    for event in events:
        assert event.name in ("contents", "change")
        change = event.data
        old, new = (change[side] and change[side]["count"] for side in ("old", "new"))
        assert old == counts[change["key"]], change
        counts[change["key"]] = new
    assert counts == clients.expected()
    assert len({event.id for event in events}) == len(events)
    times = [event.data["time"] for event in events]
    assert times == sorted(times)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_server_with_open_streams_ends_when_it_is_told_to(workers: int, tmp_path: Path) -> None:
    write_app(tmp_path)
    env = {"AIOPERSIST_LOCATION": str(tmp_path / "data")}
    async with uvicorn_serves(tmp_path, workers, env) as backend:
        async with httpx.AsyncClient(base_url=backend.url) as http:
            async with streaming(http, "/stock-changes", "") as events:
                assert (await anext(events)).data is None
                assert await asyncio.to_thread(backend.ended) in (0, -signal.SIGTERM)
                assert [event async for event in events] == []
    assert "Traceback" not in (tmp_path / "log").read_text()
