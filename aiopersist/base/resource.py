"""The life of resources: they are awaited or entered, closed once, and owned by a client.

- `Opening` is the result of an opening call: `await` it, or enter it with `async with`. It enters no task
  group and no cancel scope, so one task may open a resource and another may close it.
- `Root` is a resource that no other resource closes: a client.
- `Scope` is the life of a handle. It refuses calls from another loop, thread or process, and calls after the
  end. When it closes, it ends the waiting calls as `asyncio.timeout` does: it cancels them, and uncancels.
"""

import asyncio
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from copy import copy
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary, ref

from aiopersist.base.errors import Error, InvalidUsage, UsageKind
from aiopersist.base.runtime import OwnProcess, Runtime
from aiopersist.base.supervisor import Supervisor


class Closeable(Protocol):
    async def aclose(self) -> None: ...


R = TypeVar("R", bound=Closeable)
T = TypeVar("T")
E = TypeVar("E", bound=Error)
Job = Coroutine[Any, Any, Any]


class Resource(ABC):
    """A resource that an opening call returns. `async with` closes it at the end."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release the resource; idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _close_behind(self, error)


async def _close_behind(resource: Closeable, error: BaseException | None) -> None:
    """Close a resource at the end of a block, which `error` may have ended. An error of the closing becomes a
    note of `error`, or is raised if there is none."""
    try:
        await resource.aclose()
    except Error as failed:
        if error is None:
            raise
        error.add_note(f"and then, as it was closed: {failed}")


_closings: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive


class Root(Resource):
    """A resource that no other resource closes. It warns if it is dropped without `aclose`."""

    _tasks: "Supervisor | None" = None
    """Its tasks, once it is open. After their end there is nothing to close."""
    _closing: asyncio.Task[None] | None = None

    async def _close_once(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `close`, the first time, and wait for its end. It continues if the caller is cancelled."""
        if self._closing is None:
            self._tasks = None
            self._closing = asyncio.create_task(close(), name=f"close a {type(self).__name__}")
            _closings.add(self._closing)
            self._closing.add_done_callback(_closings.discard)
        await asyncio.shield(self._closing)

    def __del__(self) -> None:
        if self._tasks is not None and not self._tasks.closed and self._tasks.process.is_here:
            text = f"a {type(self).__name__} was never closed: enter it with `async with`, or await aclose()"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=2)


class Opening(Coroutine[Any, Any, R], Generic[R]):
    """`r = await opening`, or `async with opening as r`, which closes `r` at the end. If the opening itself
    is used like `r`, the error says what to write. Like a coroutine, it warns if it is never awaited, and a
    task can be made of it. `call` is the user's call, for messages."""

    def __init__(self, open: Callable[[], Coroutine[Any, Any, R]], call: str) -> None:
        self._open = open
        self._call = call
        self._begun = False
        self._steps: Coroutine[Any, Any, R] | None = None
        """The coroutine of a task that was made of it."""
        self._resource: R | None = None

    def __await__(self) -> Generator[Any, Any, R]:
        self._begun = True
        return self._open().__await__()

    def send(self, value: Any) -> Any:
        """As a coroutine does."""
        return self._coroutine().send(value)

    def throw(self, *error: Any) -> Any:
        """As a coroutine does."""
        return self._coroutine().throw(*error)

    def close(self) -> None:
        """As a coroutine does: it will not be awaited."""
        self._begun = True
        if self._steps is not None:
            self._steps.close()

    def _coroutine(self) -> Coroutine[Any, Any, R]:
        self._begun = True
        self._steps = self._steps or self._open()
        return self._steps

    async def __aenter__(self) -> R:
        self._resource = await self
        return self._resource

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._resource is not None:
            await _close_behind(self._resource, error)

    def __repr__(self) -> str:
        return f"<Opening of {self._call}>"

    def __del__(self) -> None:
        if not self._begun:
            warnings.warn(self._advice("was never awaited"), RuntimeWarning, source=self, stacklevel=2)

    def _advice(self, what: str) -> str:
        call = self._call
        return f"{call} {what}: write `await {call}`, or `async with {call} as ...:`, which also closes it"

    if not TYPE_CHECKING:  # so that a type checker reports their use

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(self._advice(f"was not awaited, so it has no {name!r} yet"))

        def __enter__(self) -> None:
            raise TypeError(self._advice("is opened asynchronously"))

        def __exit__(self, *error: object) -> None:
            pass

        def __aiter__(self) -> None:
            raise TypeError(self._advice("was not awaited, so nothing comes of it yet"))


class Scope:
    """The life of a handle. `with scope.call():` is around every public call that waits."""

    def __init__(
        self,
        what: str,
        parent: "Scope | None" = None,
        shard_id: str | None = None,
        label_of: Callable[[str], str | None] | None = None,
    ) -> None:
        self.what = what
        self.shard_id = shard_id
        """Errors of calls within the scope are about this shard, unless they have another id."""
        self.label_of: Callable[[str], str | None] = label_of or (parent.label_of if parent else _no_label)
        """The label of a shard by its id."""
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._process = OwnProcess(what)
        self._calls: dict[_Call, None] = {}  # no set, whose order differs from run to run
        self._children: dict[Scope, None] = {}
        self.on_close: Callable[[], None] = lambda: None
        """Called once, at the end of the scope."""
        self._parent = parent
        if parent is not None:
            parent.check()
            parent._children[self] = None

    def check(self) -> None:
        """Raise `InvalidUsage` unless a call may begin, now and in this loop."""
        if self.closed or not self._process.is_here or asyncio._get_running_loop() is not self._loop:
            self.check_open()
            self.check_place()

    def check_open(self) -> None:
        """The first half of `check`."""
        if self.closed:
            raise self.closed_error(f"{self.what} is closed")

    def closed_error(self, message: str) -> InvalidUsage:
        """The error of a call that comes after the end."""
        return self.sign(InvalidUsage(UsageKind.CLOSED, message))

    def sign(self, error: E) -> E:
        """`error` itself, now with the label of its shard."""
        error.shard_id = error.shard_id or self.shard_id
        if error.shard_id is not None and error.label is None:
            error.label = self.label_of(error.shard_id)
        return error

    def check_place(self) -> None:
        """Raise `InvalidUsage` in another process, thread or event loop than that of the opening."""
        if not self._process.is_here:
            raise self.sign(self._process.refusal())
        if asyncio._get_running_loop() is not self._loop:
            text = f"{self.what} belongs to another event loop"
            raise self.sign(InvalidUsage(UsageKind.WRONG_LOOP, text))

    def call(self) -> "_Call":
        return _Call(self)

    def close(self) -> bool:
        """End the scope and those within; `False` if it was closed. Waiting calls end with `CLOSED`."""
        if self.closed:
            return False
        self.check_place()
        self.closed = True
        for child in list(self._children):
            child.close()
        for call in list(self._calls):
            call.interrupt()
        if self._parent is not None:
            self._parent._children.pop(self, None)
        self.on_close()
        return True


def _no_label(shard_id: str) -> None:
    """The `label_of` of a scope without shards."""


class _Call:
    """One call in flight."""

    __slots__ = ("_cancelling", "_interrupted", "_scope", "_task")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._interrupted = False

    def __enter__(self) -> None:
        self._scope.check()
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self._cancelling = task.cancelling()
        self._scope._calls[self] = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope._calls.pop(self, None)
        if isinstance(error, Error) and (own := self._scope.sign(own_error(error))) is not error:
            raise own from error
        mine = self._interrupted and self._task.uncancel() <= self._cancelling
        if mine and isinstance(error, asyncio.CancelledError):
            text = f"{self._scope.what} was closed during the call: what it writes may have happened"
            raise self._scope.closed_error(text) from None

    def interrupt(self) -> None:
        if self._task is not asyncio.current_task():
            self._interrupted = True
            self._task.cancel()


_FirstCall = tuple[ref[asyncio.Task[Any]], str | None, str | None]
_first_calls: WeakKeyDictionary[Error, _FirstCall] = WeakKeyDictionary()
"""The task of the first call with the error, and the shard id and label before that."""


def own_error(error: E) -> E:
    """The error for the call of this task: a copy, if another task's call got it before. Calls share
    requests, commits and openings, but each may change its error, for example add a note."""
    me, first = asyncio.current_task(), _first_calls.get(error)
    if first is not None and first[0]() is not me:
        error = copy(error)
        error.__notes__ = [*getattr(error, "__notes__", ())]
        _, error.shard_id, error.label = first
    if me is not None and error not in _first_calls:
        _first_calls[error] = ref(me), error.shard_id, error.label
    return error


async def shared(task: "asyncio.Task[T]") -> T:
    """The result of a task that other calls also await."""
    try:
        return task.result() if task.done() else await asyncio.shield(task)
    except Error as error:
        raise own_error(error) from error.__cause__


class Handle(Closeable, Protocol):
    """A resource that a client opens, and closes at its own end at the latest."""

    @property
    def _scope(self) -> Scope: ...


async def run_bounded(at_once: int, jobs: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of `jobs` in their order, at most `at_once` in flight. If a job fails, the others are
    cancelled, and its error is raised unwrapped."""
    results: dict[int, T] = {}
    todo = iter(enumerate(jobs))

    async def work() -> None:
        for number, job in todo:
            results[number] = await job()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(jobs))):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    if len(results) < len(jobs):  # a job was cancelled, which a task group ignores
        raise asyncio.CancelledError
    return [results[number] for number in range(len(jobs))]


async def in_order(
    jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]], ahead: int, supervisor: Supervisor
) -> AsyncGenerator[T, None]:
    """The results of `jobs` in their order, at most `ahead` of them in flight or not consumed."""
    if len(jobs) == 1:
        yield await jobs[0]()
        return
    todo = iter(jobs)
    tasks: deque[asyncio.Task[T]] = deque()
    try:
        while True:
            for job in islice(todo, ahead - len(tasks)):
                tasks.append(supervisor.spawn(job(), "one of several jobs", abandon=True))
            if not tasks:
                return
            result = await tasks[0]
            tasks.popleft()
            yield result
    finally:
        for task in tasks:
            task.cancel()


async def for_each(items: Sequence[T], work: Callable[[T], object], at_once: int, runtime: Runtime) -> None:
    """`work(item)` for all items, `at_once` in a turn of the loop, so that other tasks get turns. After a
    cancellation it does all remaining items at once."""
    begun = 0
    try:
        while begun < len(items):
            if begun:
                await runtime.sleep(0)
            for item in items[begun : begun + at_once]:
                begun += 1
                work(item)
    finally:
        for item in items[begun:]:
            work(item)
