"""The event loop of a world: time passes only while everything waits, and then at once; no thread runs.

Ready callbacks run in an order that the seed gives, so any order of the steps of tasks can happen. Tasks
and futures hash by their number, not by their address, so that sets of them have one order in all runs.
A callback of a *life* that ended is put aside when its turn comes, and never runs: its memory is gone.
"""

import asyncio
import gc
import pkgutil
import random  # noqa: TID251  # everything here comes from a seed
import selectors
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import anyio.to_thread

T = TypeVar("T")

TURN_S = 1e-6  # of the clock, for each turn of the loop
WORK_S = 0.002  # what goes to a thread takes at most so long
COLLECT_TURNS = 5_000  # from one collection of garbage to the next
TURNS_MAX = 2_000_000  # a world that is not over by then never ends


class Life:
    """A machine from its start to its crash. `Life.of` tells whose a callback is."""

    of: ContextVar["Life | None"] = ContextVar("life", default=None)

    def __init__(self) -> None:
        self.is_over = False
        self.frozen: list[asyncio.Handle] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}


class Stuck(AssertionError):
    """Everything waits, for nothing that will happen; or the world never ends."""


class _Numbered:
    """Hashes by a number that its loop gives."""

    _number = -1

    def __hash__(self) -> int:
        if self._number < 0:
            self._number = self.get_loop().next_number()  # type: ignore[attr-defined]
        return self._number


class _Future(_Numbered, asyncio.Future[Any]):
    pass


class _Task(_Numbered, asyncio.Task[Any]):
    life: Life | None = None


class _Ready(list[Any]):
    """Callbacks that may run. The next one is drawn, and the last one takes its place."""

    def __init__(self, dice: random.Random, nothing: asyncio.Handle) -> None:
        super().__init__()
        self._draw = dice.random
        self._nothing = nothing

    def popleft(self) -> Any:
        while self:
            handle = self.pop()
            if (others := len(self)) and (at := int(self._draw() * (others + 1))) < others:
                handle, self[at] = self[at], handle
            life = handle._context.get(Life.of)
            if life is None or not life.is_over:
                return handle
            life.frozen.append(handle)
        return self._nothing


class _Skipping(selectors.SelectSelector):
    """Waits for no time: the clock of its loop passes instead."""

    passed_s = 0.0
    turns = 0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Stuck("everything waits, for nothing that will happen")
        self.turns += 1
        if self.turns > TURNS_MAX:
            raise Stuck(f"the world does not end within {TURNS_MAX} turns")
        if self.turns % COLLECT_TURNS == 0:
            gc.collect()
        self.passed_s += TURN_S + max(timeout, 0.0)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """See the header."""

    def __init__(self, dice: random.Random) -> None:
        self._skipping = _Skipping()
        self._dice = dice
        self._numbers = 0
        super().__init__(self._skipping)
        self._ready: Any = _Ready(dice, asyncio.Handle(lambda: None, (), self))
        self.set_task_factory(_task)  # type: ignore[arg-type]
        self.unhandled: list[BaseException] = []
        """Errors that nobody was told, except those of lives that ended."""
        self.set_exception_handler(_note_unhandled)  # type: ignore[arg-type]

    @property
    def turns(self) -> int:
        """How often the loop went round."""
        return self._skipping.turns

    def begin_anew(self) -> None:
        """Count turns from 0."""
        self._skipping.turns = 0

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def time(self) -> float:
        return self._skipping.passed_s

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def _write_to_self(self) -> None:
        """There is no other thread that would have to wake it."""

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        return self.create_task(self.worked(func, *args))

    async def worked(self, func: Callable[..., T], *args: Any, **options: Any) -> T:
        """What a thread would do."""
        if self._dice.random() < 0.5:
            await asyncio.sleep(self._dice.uniform(0, WORK_S))  # noqa: TID251  # of the virtual clock
        return func(*args)


def _note_unhandled(loop: SimulatedLoop, context: dict[str, Any]) -> None:
    life = getattr(context.get("task", context.get("future")), "life", None)
    error = context.get("exception")
    if error is not None and not (life is not None and life.is_over):
        error.add_note(f"nobody was told: {context['message']}")
        loop.unhandled.append(error)


def _task(
    loop: SimulatedLoop, coro: Any, context: Context | None = None, **options: Any
) -> asyncio.Task[Any]:
    task = _Task(coro, loop=loop, context=context, **options)
    life = Life.of.get() if context is None else context.get(Life.of)
    if life is not None:
        task.life = life
        life.tasks[task] = None
        task.add_done_callback(lambda done: life.tasks.pop(done, None))
    return task


NEVER_IMPORTED = ("cli", "demo", "fastapi", "spark", "testing", "web")  # by the calls of a client


@cache  # to look for modules takes longer than to play a small world
def import_library() -> None:
    """Import all that calls import on demand: earlier imports must not change the order of steps."""
    for package in pkgutil.iter_modules(sys.modules["aiopersist"].__path__, "aiopersist."):
        if package.ispkg and package.name.rpartition(".")[2] not in NEVER_IMPORTED:
            for module in pkgutil.walk_packages(import_module(package.name).__path__, f"{package.name}."):
                with suppress(ImportError):  # of an extra that is not installed
                    import_module(module.name)


@contextmanager
def threads_inline(loop: SimulatedLoop) -> Iterator[None]:
    """Run in this loop what it sends to a thread of anyio."""
    real = anyio.to_thread.run_sync

    async def run_sync(func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        here = asyncio.get_running_loop()
        return await (loop.worked(func, *args) if here is loop else real(func, *args, **options))

    anyio.to_thread.run_sync = run_sync  # type: ignore[assignment]
    try:
        yield
    finally:
        anyio.to_thread.run_sync = real
