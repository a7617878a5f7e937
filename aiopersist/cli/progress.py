"""Progress on standard error, only on a terminal."""

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from aiopersist.base.progress import Track

T = TypeVar("T")


class RateColumn(ProgressColumn):
    """The rate per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s")


@contextmanager
def bar(console: Console) -> Iterator[Progress]:
    """A progress bar that disappears at the end."""
    columns = (
        TextColumn("{task.description}", markup=False),  # it may name a shard
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


async def drawn(console: Console, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; draws its progress."""
    with bar(console) as progress:
        return await drawn_in(progress, work)


async def drawn_in(progress: Progress, work: Coroutine[Any, Any, T], label: str = "") -> T:
    """The result of `work`; draws its progress as one more bar."""
    if progress.disable:
        return await work
    track, task = Track(work), progress.add_task(label, total=None)
    try:
        async for done in track:
            text = " ".join(filter(None, (label, done.step)))
            progress.update(task, description=text, completed=done.done, total=done.total)
        return await track
    finally:
        track.cancel()
        progress.remove_task(task)
