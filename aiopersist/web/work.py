"""Work that visitors may start with `write=True`: compaction, garbage collection, a check, retention,
tags. It runs as a task of the client; pages show the results."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import parse_qsl

from starlette.requests import Request

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.client.client import Client
from aiopersist.web.holds import retention_text
from aiopersist.web.words import counted, size_text

FORM_BYTES_MAX = 64 * 1024
REPORTS_KEPT = 8  # of a shard
PROBLEMS_SHOWN = 20
KEEP_UNITS: dict[str, timedelta | None] = {
    "times": None,
    "minutes": timedelta(minutes=1),
    "hours": timedelta(hours=1),
    "days": timedelta(days=1),
}


class WorkReport(NamedTuple):
    """A piece of work, and its result once it ended."""

    title: str
    began: float
    """In Unix seconds of this machine."""
    ended: float | None = None
    result: str = ""
    is_bad: bool = False


class WorkResult(NamedTuple):
    """The result of a piece of work, for people."""

    text: str
    is_bad: bool = False


Piece = Callable[[Client, str], Awaitable[WorkResult]]


async def _compact(client: Client, shard: str) -> WorkResult:
    await client.admin.force_compaction(shard)
    return WorkResult("All batches were merged into one.")


async def _gc(client: Client, shard: str) -> WorkResult:
    done = await client.admin.force_gc(shard)
    return WorkResult(f"Deleted {counted(done.parts, 'part')} and {counted(done.versions, 'version')}.")


async def _fsck(client: Client, shard: str) -> WorkResult:
    report = await client.admin.fsck(shard)
    read = f"read {counted(report.parts, 'part')} with {counted(report.updates, 'update')}"
    if report.ok:
        return WorkResult(f"All data is intact: {read}.")
    problems = "; ".join(report.problems[:PROBLEMS_SHOWN])
    return WorkResult(f"{counted(len(report.problems), 'problem')}, {read}: {problems}", is_bad=True)


PIECES: dict[str, tuple[str, Piece]] = {
    "compact": ("Compaction", _compact),
    "gc": ("Collection", _gc),
    "fsck": ("Check", _fsck),
}


def piece_of(form: Mapping[str, str]) -> tuple[str, Piece]:
    """The work that a form asks for; `InvalidUsage` names the wrong value."""
    action = form.get("action", "")
    if action == "retain":
        return _retention(form.get("keep", ""), form.get("unit", ""))
    if action == "tag":
        return _tag(form.get("tag", ""), form.get("days", ""))
    if action == "untag":
        return _untag(form.get("tag", ""))
    if action not in PIECES:
        text = f"action={shown(action)}: one of {', '.join(PIECES)}, retain, tag, untag"
        raise InvalidUsage(UsageKind.INVALID_MODE, text)
    return PIECES[action]


def _retention(keep: str, unit: str) -> tuple[str, Piece]:
    policy: int | timedelta | None = None
    if unit != "all":
        if unit not in KEEP_UNITS or not (keep.isascii() and keep.isdigit() and len(keep) <= 18):
            text = f"keep={shown(keep)} {shown(unit)}: a number of {', '.join(KEEP_UNITS)}, or all"
            raise InvalidUsage(UsageKind.INVALID_TIME, text)
        length = KEEP_UNITS[unit]
        try:
            policy = int(keep) if length is None else int(keep) * length
        except OverflowError as error:
            text = f"keep={keep} {unit} is longer than the clock counts"
            raise InvalidUsage(UsageKind.INVALID_TIME, text) from error

    async def retain(client: Client, shard: str) -> WorkResult:
        await client.admin.retain(shard, policy)
        return WorkResult(
            f"Maintenance keeps {retention_text((await client.admin.inspect(shard)).retention)}."
        )

    return "Retention", retain


def _tag(name: str, days: str) -> tuple[str, Piece]:
    """`days`: how long the tag lasts; empty: until it is dropped."""
    if days and not (days.isascii() and days.isdigit() and len(days) <= 5 and int(days)):
        raise InvalidUsage(UsageKind.INVALID_TIME, f"days={shown(days)}: a number of days, or nothing")
    expires = timedelta(days=int(days)) if days else None

    async def tag(client: Client, shard: str) -> WorkResult:
        added = await client.tag(shard, name, expires=expires)
        parts = f"{counted(added.parts, 'part')} of {size_text(added.blob_bytes)}"
        return WorkResult(f"{name!r} keeps the newest contents, {parts}.")

    return "Tag", tag


def _untag(name: str) -> tuple[str, Piece]:
    async def untag(client: Client, shard: str) -> WorkResult:
        await client.untag(shard, name)
        return WorkResult(f"{name!r} is dropped.")

    return "Drop of a tag", untag


class Works:
    """Running work, and the last reports, by shard. One per client."""

    def __init__(self) -> None:
        self._done: dict[str, deque[WorkReport]] = {}
        self._running: dict[str, tuple[asyncio.Task[None], WorkReport]] = {}

    def of(self, shard: str) -> list[WorkReport]:
        """The work on a shard, newest first."""
        running = self._running.get(shard)
        done = list(self._done.get(shard, ()))[::-1]
        return done if running is None else [running[1], *done]

    def begin(self, client: Client, shard: str, title: str, piece: Piece) -> None:
        """Start a piece of work; `InvalidUsage` while another one runs on the shard."""
        if shard in self._running:
            text = f"{self._running[shard][1].title} of this shard is running: wait for its end"
            raise InvalidUsage(UsageKind.INVALID_MODE, text)
        work = WorkReport(title, client._stack.runtime.wall())
        task = client._stack.supervisor.background(self._run(client, shard, work, piece), title)
        self._running[shard] = task, work
        task.add_done_callback(lambda task: self._running.pop(shard, None))

    async def _run(self, client: Client, shard: str, work: WorkReport, piece: Piece) -> None:
        try:
            outcome = await piece(client, shard)
        except Exception as error:  # the page shows it
            outcome = WorkResult(f"{type(error).__name__}: {error}", is_bad=True)
        done = work._replace(ended=client._stack.runtime.wall(), result=outcome.text, is_bad=outcome.is_bad)
        self._done.setdefault(shard, deque(maxlen=REPORTS_KEPT)).append(done)


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; `InvalidUsage` for one that is too large."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > FORM_BYTES_MAX:
            raise InvalidUsage(UsageKind.INVALID_MODE, f"a form of more than {FORM_BYTES_MAX:,} bytes")
    return dict(parse_qsl(data.decode("utf-8", "replace"), keep_blank_values=True))
