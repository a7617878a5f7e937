"""A game of four processes (`worker.py`) on real stores. Some are killed at a random moment, and others go on
in their place, with the calls that these were not told of; proxies between them and the servers cut
connections, hold requests and answers back, and lose answers. `verdict.py` checks what they wrote down.
"""

import asyncio
import os
import pickle
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg

import aiopersist as ap
from aiopersist.testing.proxy import TcpProxy, completes_command
from aiopersist.testing.servers import PostgresServer, S3Server, postgres_server, s3_labels, s3_server
from tests.conftest import StoreUrls
from tests.table.history import Began, Event, Failed, Told, events_of
from tests.table.moves import Move, Player
from tests.table.verdict import verify
from tests.table.worker import Orders

ROOT = Path(__file__).parents[2]
PROCESSES = 4
POLL_S = 0.01
PROGRESS_BYTES, PROGRESS_S = 500, 3.0  # of what processes write down, between two troubles; a limit
# What libraries would start as they are imported; a process with threads is not to be forked.
NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}


@dataclass
class Way:
    """A proxy on the way to a server, and which of its answers are worth losing."""

    proxy: TcpProxy
    lost: Callable[[bytes], bool]

    async def trouble(self, dice: random.Random) -> None:
        """One of some kind, until it is over."""
        kind, proxy = dice.choice(["cut", "lose", "lose", "hold", "hold_and_cut", "refuse"]), self.proxy
        if kind == "cut":
            proxy.cut()
        elif kind == "lose":
            lost = proxy.swallow_answers_then_cut(self.lost)
            await asyncio.wait([lost], timeout=0.3)
            lost.cancel()
        elif kind == "hold":
            proxy.hold_answers()
            await asyncio.sleep(dice.uniform(0, 0.2))
            if dice.random() < 0.5:
                proxy.cut()
            proxy.release_answers()
        elif kind == "hold_and_cut":  # requests arrive when nobody waits for them any more
            proxy.hold_requests()
            await asyncio.sleep(dice.uniform(0, 0.1))
            proxy.cut_clients()
            proxy.release_requests()
        else:
            proxy.refuse()
            proxy.cut()
            await asyncio.sleep(dice.uniform(0, 0.2))
            proxy.accept()


@dataclass
class Stores:
    """Where the processes work: the way there, and around it."""

    direct: StoreUrls
    through: StoreUrls
    ways: Sequence[Way] = ()
    postgres: PostgresServer | None = None

    async def rest(self) -> None:
        """Until the servers do nothing any more of what was sent to them."""
        for way in self.ways:
            way.proxy.cut()
        if self.postgres is None:
            return
        connection = await asyncpg.connect(self.postgres.dsn())
        busy = "SELECT count(*) FROM pg_stat_activity WHERE state <> 'idle' AND pid <> pg_backend_pid()"
        async with asyncio.timeout(100):
            while await connection.fetchval(busy):
                await asyncio.sleep(POLL_S)
        await connection.close()


@asynccontextmanager
async def stores_at(
    folder: Path, schema: str, postgres: PostgresServer | None = None, s3: S3Server | None = None
) -> AsyncIterator[Stores]:
    """A file system and SQLite, or these servers behind proxies."""
    blob, consensus = f"file://{folder}/blob?fsync=off", f"sqlite://{folder}/state.db"
    stores = Stores(StoreUrls(blob, consensus), StoreUrls(blob, consensus), postgres=postgres)
    async with AsyncExitStack() as stack:
        ways = []
        if postgres is not None:
            proxy = await stack.enter_async_context(TcpProxy(postgres.host, postgres.port))
            ways.append(Way(proxy, completes_command))
            through = postgres.url(schema, host=proxy.host, port=proxy.port)
            stores.direct = stores.direct._replace(consensus=postgres.url(schema))
            stores.through = stores.through._replace(consensus=through)
        if s3 is not None:
            host, _, port = s3.endpoint.rpartition("/")[2].partition(":")
            proxy = await stack.enter_async_context(TcpProxy(host, int(port)))
            ways.append(Way(proxy, bool))
            through = s3.url(schema, endpoint=f"http://{proxy.host}:{proxy.port}")
            stores.direct = stores.direct._replace(blob=s3.url(schema))
            stores.through = stores.through._replace(blob=through)
        stores.ways = ways
        yield stores


class World:
    """See the header."""

    def __init__(self, seed: int, folder: Path, stores: Stores, *, tasks: int, moves: int) -> None:
        self.seed = seed
        self.dice = random.Random(seed)
        self.folder = folder
        self.stores = stores
        self.tasks = tasks
        self.moves = moves
        self.counts: Counter[str] = Counter()
        self.logs: list[Path] = []
        self.server: Any = None
        """It starts processes."""
        self._turn = asyncio.Lock()

    async def play(self, kills: int, cuts: int | None) -> Counter[str]:
        """Play it with so many kills. `cuts`: see `verify`."""
        events: list[Event] = []
        urls = self.stores.direct
        async with ap.open(blob=urls.blob, consensus=urls.consensus, maintenance=False) as client:
            await Player("setup", client, events.append).prepare()
        self.server = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.table.worker",
            cwd=ROOT,
            env=os.environ | NO_THREADS,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        victims = [self.dice.randrange(PROCESSES) for _ in range(kills)]
        troubles = [asyncio.create_task(self._trouble(way)) for way in self.stores.ways]
        lives = (self._live("wxyz"[number], victims.count(number)) for number in range(PROCESSES))
        try:
            await asyncio.gather(*lives)
        finally:
            await self.server.communicate()
        for trouble in troubles:
            trouble.cancel()
        await asyncio.gather(*troubles, return_exceptions=True)
        await self.stores.rest()
        for log in self.logs:
            events += events_of(log)
        async with ap.open(blob=urls.blob, consensus=urls.consensus, maintenance=False) as client:
            await verify(client, events, f"processes {self.seed}", cuts=cuts)
        self._count(events)
        return self.counts

    async def _trouble(self, way: Way) -> None:
        dice = random.Random(self.dice.random())
        while True:
            await asyncio.sleep(dice.uniform(0.05, 0.4))
            await self._progress()
            await way.trouble(dice)
            self.counts["troubles"] += 1

    async def _progress(self) -> None:
        """Until calls have made some: on a slow machine troubles are as rare as answers."""
        before, waited_s = self._written(), 0.0
        while self._written() < before + PROGRESS_BYTES and waited_s < PROGRESS_S:
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S

    def _written(self) -> int:
        return sum(log.stat().st_size for log in self.logs)

    async def _live(self, name: str, kills: int) -> None:
        """Processes, one after the other, of which so many are killed."""
        again: tuple[Move, ...] = ()
        for number in range(kills + 1):
            log = self.folder / f"{name}{number}.log"
            log.touch()
            self.logs.append(log)
            moves = self.moves if number == 0 else self.moves // 2
            orders = Orders(
                f"{name}{number}",
                *self.stores.through,
                log,
                self.seed,
                self.tasks,
                moves,
                again,
                faults=not self.stores.ways,
            )
            await self._run(orders, kill=number < kills)
            again = _untold(log) + tuple(move for move in again if move.name not in _answered(log))

    async def _run(self, orders: Orders, *, kill: bool) -> None:
        """One process, which is killed after some of what it writes down, unless it has ended."""
        file = orders.log.with_suffix(".orders")
        file.write_bytes(pickle.dumps(orders))
        process = await self._started(file)
        after = self.dice.randrange(1000, 200 * orders.tasks * orders.moves)
        while _lives(process):
            await asyncio.sleep(POLL_S)
            if kill and orders.log.stat().st_size > after:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                    self.counts["killed"] += 1
                kill = False
        failed = orders.log.with_suffix(".failed")
        assert not failed.exists(), failed.read_text()

    async def _started(self, orders: Path) -> int:
        """The id of a process with these orders."""
        async with self._turn:
            assert self.server.stdin is not None
            assert self.server.stdout is not None
            self.server.stdin.write(f"{orders}\n".encode())
            return int(await self.server.stdout.readline())

    def _count(self, events: Sequence[Event]) -> None:
        began = {event.op: event for event in events if isinstance(event, Began)}
        told = {event.op for event in events if isinstance(event, Told | Failed)}
        self.counts.update(began[op].move.kind for op in told)
        self.counts["untold"] = len(began) - len(told)
        self.counts["again"] = len([e for e in events if isinstance(e, Began)]) - len(began)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _answered(log: Path) -> set[str]:
    return {event.op for event in events_of(log) if isinstance(event, Told | Failed)}


def _untold(log: Path) -> tuple[Move, ...]:
    """The calls with an id of which a process was not told."""
    told = _answered(log)
    moves = {event.op: event.move for event in events_of(log) if isinstance(event, Began)}
    return tuple(move for name, move in moves.items() if move.once and name not in told)


async def play(
    seed: int, folder: Path, stores: Stores, *, kills: int, tasks: int = 4, moves: int = 10, cuts: Any = None
) -> Counter[str]:
    """One game; what happened in it. A failure names the seed."""
    began = time.monotonic()
    try:
        return await World(seed, folder, stores, tasks=tasks, moves=moves).play(kills, cuts)
    except BaseException as error:
        error.add_note(f"seed {seed}, after {time.monotonic() - began:.1f} s")
        raise


async def replay(seed: int) -> Counter[str]:
    """One game on each kind of store, on servers of its own."""
    counts: Counter[str] = Counter()
    with ExitStack() as servers, TemporaryDirectory() as folder:
        postgres = servers.enter_context(postgres_server())
        s3 = servers.enter_context(s3_server(s3_labels()[0]))
        for number, some in enumerate(({}, {"postgres": postgres}, {"postgres": postgres, "s3": s3})):
            place = Path(folder, str(number))
            place.mkdir()
            async with stores_at(place, f"t{number}", **some) as stores:
                counts += await play(seed, place, stores, kills=3, moves=30, cuts=50)
    return counts
