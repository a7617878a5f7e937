"""An event loop in which no time passes and no thread runs: clock, ids, delays and the order of tasks come
from a seed."""

import asyncio
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from aiopersist.base.runtime import Runtime
from aiopersist.shard.stack import Stack
from aiopersist.testing.faults import Faults
from tests.indexed.line import Line


class SeededRuntime(Runtime):
    """Clock, ids and delays from a seed; short sleeps are turns of the loop, long ones end by a jump."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"dice {seed}")
        self.at_s = 1e6
        self._asleep: list[tuple[float, asyncio.Future[None]]] = []

    def wall(self) -> float:
        return self.at_s

    def monotonic(self) -> float:
        return self.at_s

    def uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self.rng.getrandbits(128), version=4)

    def token(self) -> str:
        return f"{self.rng.getrandbits(128):032x}"

    def process(self) -> str:
        return "seeded:1"

    def uniform(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    async def sleep(self, seconds: float) -> None:
        if seconds < 17:
            self.at_s += seconds / 100
            await spin(1 + (self.rng.randrange(6) if seconds else 0))
            self.at_s += seconds / 100
            return
        future = asyncio.get_running_loop().create_future()
        self._asleep.append((self.at_s + seconds, future))
        await future

    def jump(self, seconds: float) -> None:
        self.at_s += seconds
        woken = [future for at, future in self._asleep if at <= self.at_s and not future.done()]
        self._asleep = [(at, future) for at, future in self._asleep if at > self.at_s]
        for future in woken:
            future.set_result(None)


class Wire(Line):
    """A line to the stores on which requests take their time, by turns of the loop."""

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        super().__init__(faults)
        self.rng = rng

    async def call(self, op: str, act: Callable[[], Any]) -> Any:
        await spin(self.rng.choice((0, 0, 1, 3)))
        if op == "watch":  # it may wait for ever: not for one that lands late, too
            return await act()
        result = await super().call(op, act)
        await spin(self.rng.choice((0, 0, 1, 3)))
        await self.wait()
        return result


async def spin(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


@contextmanager
def no_threads(rng: random.Random) -> Iterator[None]:
    async def compute(self: Stack, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        await spin(rng.randrange(3))
        return work(*args, **kwargs)

    with patch.object(Stack, "compute", compute):
        yield
