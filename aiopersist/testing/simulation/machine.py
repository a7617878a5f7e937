"""A machine: a clock of its own, lines to the stores, and memory that a crash ends at once.

A crash runs no `finally` and no `except`: whatever the machine was doing does not go on. What it had sent
to a store may still happen.
"""

import asyncio
import random  # noqa: TID251  # everything here comes from a seed
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiopersist.base.errors import Error, Indeterminate, StorageUnavailable
from aiopersist.base.resource import Opening
from aiopersist.base.runtime import Runtime
from aiopersist.base.settings import Settings
from aiopersist.client.client import Client
from aiopersist.client.open import open as open_client
from aiopersist.stash.memory import StashTables
from aiopersist.stash.open import DEFAULT_NAME, Mode, StashLocation, opened
from aiopersist.stash.stash import MemoryStash, Stash
from aiopersist.storage.blob import Blob
from aiopersist.storage.memory import MemoryConsensus
from aiopersist.testing.simulation.loop import Life
from aiopersist.testing.simulation.network import (
    BLOB,
    CONSENSUS,
    Network,
    SimulatedBlob,
    SimulatedConsensus,
    Wire,
)
from aiopersist.testing.simulation.stash import SimulatedStashStore

T = TypeVar("T")

EPOCH_S = 1.7e9  # when every world begins
RESTART_S = 1.0  # until a supervised machine is up again


class Crashed(Exception):
    """The machine crashed before its work was done."""


class SimulatedRuntime(Runtime):
    """Clocks and dice of a machine: its clock is `offset_s` ahead, and `drift` seconds more each second."""

    def __init__(self, dice: random.Random, name: str, offset_s: float = 0.0, drift: float = 0.0) -> None:
        self.offset_s = offset_s
        self._dice = dice
        self._name = name
        self._rate = 1 + drift

    def wall(self) -> float:
        return EPOCH_S + self.offset_s + self.monotonic()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time() * self._rate

    def uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self._dice.getrandbits(128), version=4)

    def token(self) -> str:
        return f"{self._dice.getrandbits(128):032x}"

    def process(self) -> str:
        return self._name

    def uniform(self, low: float, high: float) -> float:
        return self._dice.uniform(low, high)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._rate)  # noqa: TID251  # of the virtual clock


@dataclass(frozen=True)
class Surroundings:
    """What all machines of a world share."""

    network: Network
    blob: Blob
    consensus: MemoryConsensus
    outside: Callable[..., Any]
    """Calls on behalf of no machine."""
    ended: list[Life] = field(default_factory=list)
    """Lives that a crash ended."""


class Machine:
    """See the header. `World.machine` makes one."""

    def __init__(self, around: Surroundings, name: str, dice: random.Random, distance: float = 1.0) -> None:
        self.name = name
        self.distance = distance
        """How many times as long as usual its requests take."""
        self.runtime = SimulatedRuntime(dice, name, dice.uniform(-30, 30), dice.uniform(-1e-4, 1e-4))
        """Its clocks, ids and dice: give it to what asks for the time."""
        self._around = around
        self._dice = dice
        self._running: dict[asyncio.Future[Any], None] = {}
        self._begin()

    def _begin(self) -> None:
        self._life = Life()
        self._line = Wire(self._around.network, self.name, self._around.outside, self.runtime, self.distance)

    def open(
        self, *, settings: Settings | None = None, maintenance: bool = True, readonly: bool = False
    ) -> Opening[Client]:
        """A client of the world's location, on this machine. Open and use it in work given to `start`."""
        return open_client(
            blob=SimulatedBlob(self._around.blob, self._line),
            consensus=SimulatedConsensus(self._around.consensus, self._line),
            settings=settings or Settings(),
            maintenance=maintenance,
            readonly=readonly,
            runtime=self.runtime,
        )

    def stash(
        self, name: str = DEFAULT_NAME, *, exclusive: bool = True, settings: Settings | None = None
    ) -> Opening[Stash]:
        """The stash of that name in the world, opened by this machine; as `client.stash()`, which needs the
        URL of a database."""
        tables = self._around.consensus.attached(f"stash {name}", StashTables)
        line, runtime, servers = self._line, self.runtime, self._around.consensus._runtime
        location = StashLocation(MemoryStash, lambda _: SimulatedStashStore(tables, line, servers))

        async def open_stash() -> Stash:
            stash = await opened(location, Mode(exclusive), settings or Settings(), runtime)
            stash._tasks = stash._session.supervisor
            return stash

        return Opening(open_stash, "machine.stash(...)")

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Begin work on this machine. The future has its result, or `Crashed`; to cancel it has no effect."""
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._running[ended] = None
        context = copy_context()
        context.run(Life.of.set, self._life)
        task = asyncio.get_running_loop().create_task(work, context=context)

        def tell(done: "asyncio.Task[T]") -> None:
            self._running.pop(ended, None)
            if ended.done():
                return
            if done.cancelled():
                ended.cancel()
            elif (error := done.exception()) is not None:
                ended.set_exception(error)
            else:
                ended.set_result(done.result())

        task.add_done_callback(tell, context=context)
        return ended

    def crash(self) -> None:
        """End everything that runs on it, now. Work that is started later starts it anew."""
        self._around.network.counts["crashed"] += 1
        self._around.network.note(self.name, "crashes")
        self._life.is_over = True
        self._around.ended.append(self._life)
        running, self._running = self._running, {}
        for ended in running:
            if not ended.done():
                ended.set_exception(Crashed(f"{self.name} crashed"))
                ended.exception()  # nobody has to ask
        self._begin()

    def cut_off(self, seconds: float, stores: Iterable[str] = (BLOB, CONSENSUS)) -> None:
        """No request of this machine gets through to these stores for so long, and no answer comes."""
        self._around.network.counts["cut off"] += 1
        for store in stores:
            self._line.cut_off_until[store] = asyncio.get_running_loop().time() + seconds

    async def supervise(
        self,
        application: Callable[[Client], Awaitable[T]],
        *,
        settings: Settings | None = None,
        crashes_max: int = 3,
        within_s: float = 0.1,
    ) -> T:
        """The result of `application(client)`. The machine crashes up to `crashes_max` times, each time up to
        `within_s` after its start, and starts again, with a new client; it also starts again after an
        `Indeterminate` or `StorageUnavailable` that the application lets through. Other errors are raised."""
        crashes_left = crashes_max
        loop = asyncio.get_running_loop()

        async def life() -> T:
            async with self.open(settings=settings) as client:
                return await application(client)

        while True:
            running = self.start(life())
            ends_s = self._dice.uniform(0, within_s)
            crashes = self._dice.random() < self._around.network.weather.crashes and crashes_left > 0
            crash = loop.call_later(ends_s, self.crash) if crashes else None
            try:
                return await running
            except (Crashed, StorageUnavailable, Indeterminate) as error:
                crashes_left -= isinstance(error, Crashed)
                if isinstance(error, Error):
                    self.crash()  # a process that ended: its client is closed already
                await asyncio.sleep(self._dice.uniform(0, RESTART_S))  # noqa: TID251  # of the virtual clock
            finally:
                if crash is not None:
                    crash.cancel()
