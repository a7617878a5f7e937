"""An event loop whose clock passes only while everything waits, and then at once; no thread runs. A game in
it takes no longer than its own work, and repeats by its seed, but for the order of sets.
"""

import asyncio
import random
import selectors
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar
from unittest.mock import patch

import anyio.to_thread

from aiopersist.base.runtime import Runtime
from aiopersist.storage.memory import _namespaces
from aiopersist.testing.simulation.loop import import_library

T = TypeVar("T")

TURN_S = 1e-6  # of the clock, for each turn of the loop
EPOCH_S = 1.7e9
WORK_S = 0.002  # what goes to a thread takes at most so long
GAME_S = 600.0  # a game that is not over by then never ends; nor one of more turns
TURNS_MAX = 1_000_000


class _Skipping(selectors.DefaultSelector):
    """Waits for no time: the clock of its loop passes instead."""

    passed_s = 0.0
    turns = 0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if timeout is None and not ready:
            raise AssertionError("everything waits, for nothing that will happen")
        self.turns += 1
        if self.turns > TURNS_MAX:
            raise AssertionError("the game never ends")
        self.passed_s += TURN_S + (0.0 if ready else timeout or 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the header. How long work takes that would go to a thread is drawn from `dice`."""

    def __init__(self, dice: random.Random) -> None:
        self._skipping = _Skipping()
        self._dice = dice
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.passed_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        return self.create_task(self.worked(func, *args))

    async def worked(self, func: Callable[..., T], *args: Any, **options: Any) -> T:
        """What a thread would do."""
        await asyncio.sleep(self._dice.choice([0, self._dice.uniform(0, WORK_S)]))
        return func(*args)


@contextmanager
def _instead_of_the_system(loop: VirtualLoop, dice: random.Random) -> Iterator[None]:
    """Clocks, ids and dice of the library are those of the loop."""
    there = set(_namespaces)
    try:
        with (
            patch.multiple(
                Runtime,
                wall=lambda _: EPOCH_S + loop.time(),
                monotonic=lambda _: loop.time(),
                uuid=lambda _: uuid.UUID(int=dice.getrandbits(128), version=4),
                token=lambda _: f"{dice.getrandbits(128):032x}",
                uniform=lambda _, low, high: dice.uniform(low, high),
            ),
            patch.object(anyio.to_thread, "run_sync", loop.worked),
        ):
            yield
    finally:
        for name in _namespaces.keys() - there:  # they would be kept for ever
            del _namespaces[name]


def played(seed: int, game: Callable[[], Awaitable[T]]) -> T:
    """The result of a game, in a loop of its own. A failure names the seed."""
    dice = random.Random(f"virtual {seed}")

    async def main() -> T:
        async with asyncio.timeout(GAME_S):
            return await game()

    def loop() -> VirtualLoop:
        return made

    import_library()
    made = VirtualLoop(dice)
    try:
        with _instead_of_the_system(made, dice), asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(main())
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


def in_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The async test, played: its leases and waits are as long as they say on every machine."""

    @wraps(test)
    def play(*args: Any, **kwargs: Any) -> None:
        played(0, partial(test, *args, **kwargs))

    return play
