"""What happens to the servers and to the ways there while the processes work, one thing after the other."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from aiopersist.testing.proxy import TcpProxy, completes_command
from tests.endurance.servers import Place

COMPLETES = {"postgres": completes_command, "s3": bool}


class Window(NamedTuple):
    """When a fault was there."""

    kind: str
    began: float
    ended: float


class Faults:
    """Makes one fault after the other, with pauses."""

    def __init__(
        self,
        place: Place,
        proxies: dict[str, TcpProxy],
        processes: Callable[[], Sequence[int]],
        dice: random.Random,
        scale: float,
    ) -> None:
        self.place = place
        self.proxies = proxies
        self.processes = processes
        self.dice = dice
        self.scale = scale
        """Of how long faults last."""
        self.counts: Counter[str] = Counter()
        self.windows: list[Window] = []
        kinds = [self.cut, self.lose_answers, self.lose_answers, self.hold, self.hold_and_cut, self.partition]
        self.kinds: list[tuple[Callable[[str], Awaitable[None]], int]] = [(kind, 4) for kind in kinds]
        self.kinds += [(self.slow, 3), (self.restart, 2), (self.crash, 2), (self.stand_still, 3)]
        if all(disk.is_small for disk in place.disks.values()):
            self.kinds.append((self.full_disk, 2))
        if place.clock.steps:
            self.kinds.append((self.clock_step, 3))

    async def play(self) -> None:
        makes, weights = zip(*self.kinds, strict=True)
        while True:
            await asyncio.sleep(self.dice.uniform(0.5, 12.0) * self.scale)
            (make,) = self.dice.choices(makes, weights)
            store, began = self.dice.choice(["postgres", "s3"]), time.monotonic()
            await make(store)
            of = "" if make in (self.clock_step, self.stand_still) else f" {store}"
            kind = f"{make.__name__}{of}"
            self.counts[kind] += 1
            self.windows.append(Window(kind, began, time.monotonic()))

    async def heal(self) -> None:
        """Everything works again; after `play` was cancelled."""
        for disk in self.place.disks.values():
            disk.empty()
        for proxy in self.proxies.values():
            proxy.delay_s = 0.0
            proxy.accept()
            proxy.release_requests()
            proxy.release_answers()
        for process in self.processes():
            os.kill(process, signal.SIGCONT)
        await asyncio.gather(*(server.start() for server in self.place.servers.values()))

    async def _some(self, most_s: float) -> None:
        await asyncio.sleep(self.dice.uniform(0.05, most_s * self.scale))

    async def cut(self, store: str) -> None:
        self.proxies[store].cut()

    async def lose_answers(self, store: str) -> None:
        lost = self.proxies[store].swallow_answers_then_cut(COMPLETES[store])
        await asyncio.wait([lost], timeout=2.0)
        lost.cancel()

    async def hold(self, store: str) -> None:
        proxy = self.proxies[store]
        proxy.hold_answers()
        await self._some(4.0)
        if self.dice.random() < 0.5:
            proxy.cut()
        proxy.release_answers()

    async def hold_and_cut(self, store: str) -> None:
        """Requests arrive when nobody waits for them any more."""
        proxy = self.proxies[store]
        proxy.hold_requests()
        await self._some(1.0)
        proxy.cut_clients()
        await self._some(1.0)
        proxy.release_requests()

    async def partition(self, store: str) -> None:
        proxy = self.proxies[store]
        proxy.refuse()
        proxy.cut()
        await self._some(6.0)
        proxy.accept()

    async def slow(self, store: str) -> None:
        self.proxies[store].delay_s = self.dice.uniform(0.01, 0.2)
        await self._some(6.0)
        self.proxies[store].delay_s = 0.0

    async def restart(self, store: str) -> None:
        await self._down(store, "stop")

    async def crash(self, store: str) -> None:
        await self._down(store, "crash")

    async def _down(self, store: str, how: str) -> None:
        server = self.place.servers[store]
        await server.end(how)
        await self._some(3.0)
        await server.start()

    async def full_disk(self, store: str) -> None:
        disk = self.place.disks[store]
        await asyncio.to_thread(disk.fill)
        await self._some(5.0)
        disk.empty()
        await self.place.servers[store].start()  # Postgres ends where it cannot write its log

    async def clock_step(self, store: str) -> None:
        """Of the machine of Postgres, which says when leases end: some are lost at a step forward."""
        self.place.clock.step(self.dice.choice([-30.0, -5.0, -0.5, 0.5, 5.0, 30.0, 120.0, -120.0]))

    async def stand_still(self, store: str) -> None:
        """A process."""
        if processes := self.processes():
            process = self.dice.choice(processes)
            os.kill(process, signal.SIGSTOP)
            await self._some(8.0)
            try:
                os.kill(process, signal.SIGCONT)
            except ProcessLookupError:
                return
