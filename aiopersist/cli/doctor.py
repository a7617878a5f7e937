"""`aiopersist doctor`: tests and measures a location, and reports unusual findings."""

import asyncio
import platform
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import NamedTuple

from rich.text import Text

from aiopersist.base.errors import Error, Unsupported
from aiopersist.base.runtime import SYSTEM
from aiopersist.cli.command import Invocation, Problems
from aiopersist.cli.shown import plain_table, safe
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus, Versioned
from aiopersist.storage.urls import open_stores, parse_location

TRIES = 20
RACES, RACERS = 20, 8
PUT_BYTES = 64 * 1024
LIBRARIES = ("pyarrow", "polars", "pydantic", "anyio", "asyncpg", "aiobotocore", "fastapi", "pyspark")
# Milliseconds. A server in the same data center answers in one to five, object stores in ten to fifty.
USUAL_MS = {"commit": (0.05, 50.0), "head": (0.0, 20.0), "put": (0.0, 200.0), "get": (0.0, 100.0)}
CLOCK_S = 1.0  # leases and wall times follow the store's clock; people compare it with their own
OK, UNUSUAL, FAILED = "ok", "unusual", "failed"
JSON_NAMES = ("what", "found", "verdict", "advice")


class Finding(NamedTuple):
    """The result of one check."""

    what: str
    result: str
    verdict: str = OK
    advice: str = ""


async def doctor(run: Invocation) -> None:
    """Test the location: reachability, rights, durability, clocks, versions, latencies."""
    findings = list(_versions())
    async with run.reading():
        pass  # checks that it exists, and that its two stores belong together
    findings.append(Finding("location", "both stores answer and belong together"))
    async with _stores(run) as (blob, consensus):
        findings += [finding async for finding in _of_stores(blob, consensus)]
    if run.as_json:
        run.document([dict(zip(JSON_NAMES, finding, strict=True)) for finding in findings])
    else:
        table = plain_table("", "", "", "")
        table.show_header = False
        styles = {OK: "green", UNUSUAL: "yellow", FAILED: "red"}
        for finding in findings:
            verdict = Text(finding.verdict, style=styles[finding.verdict])
            table.add_row(verdict, finding.what, safe(finding.result), safe(finding.advice))
        run.out.print(table)
    if failed := [finding.what for finding in findings if finding.verdict == FAILED]:
        raise Problems(f"failed: {', '.join(failed)}")


@asynccontextmanager
async def _stores(run: Invocation) -> AsyncIterator[tuple[Blob, Consensus]]:
    """Both stores without retries, so that each failure shows."""
    stores = open_stores(parse_location(*run.location), runtime=SYSTEM, readonly=False)
    try:
        yield stores.blob, stores.consensus
    finally:
        for store in stores.opened:
            await store.aclose()


def _versions() -> list[Finding]:
    python = Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    findings = [python, Finding("aiopersist", version("aiopersist"))]
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            findings.append(Finding(name, version(name)))
    return findings


async def _of_stores(blob: Blob, consensus: Consensus) -> AsyncIterator[Finding]:
    checks: dict[str, Callable[[], Awaitable[list[Finding]]]] = {
        "consensus": lambda: _facts("consensus", consensus.facts),
        "blob": lambda: _facts("blob", blob.facts),
        "clock": lambda: _clock(consensus),
        "commits": lambda: _commits(consensus),
        "races": lambda: _races(consensus),
        "blobs": lambda: _blobs(blob),
        "probe": lambda: _facts("blob", blob.probe),
    }
    for name, check in checks.items():
        try:
            for finding in await check():
                yield finding
        except Exception as error:  # stores fail in many ways; the failure is the finding
            text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
            yield Finding(name, text, FAILED, "without the right to write, open clients with readonly=True")


async def _facts(name: str, facts: Callable[[], Awaitable[dict[str, str]]]) -> list[Finding]:
    return [judged_fact(f"{name} {what}", value) for what, value in (await facts()).items()]


async def _clock(consensus: Consensus) -> list[Finding]:
    began = SYSTEM.wall()
    store_s = await consensus.clock()
    return [judged_clock(store_s - (began + SYSTEM.wall()) / 2)]


async def _commits(consensus: Consensus) -> list[Finding]:
    """Write versions of a new key, read them back, and remove the key."""
    key, seqno, data = f"doctor/{SYSTEM.uuid()}", None, b""
    commits, heads = list[float](), list[float]()
    try:
        for n in range(TRIES):
            data = b"%d" % n
            commits.append(await _timed(lambda: consensus.compare_and_set(key, seqno, data)))  # noqa: B023
            seqno = n
            heads.append(await _timed(lambda: consensus.head(key)))
        head = await consensus.head(key)
        refused = not await consensus.compare_and_set(key, None, b"")
    finally:
        if seqno is not None:
            with suppress(Unsupported):
                await consensus.remove(key, Versioned(seqno, data))
    compared = Finding("compare-and-set", "refuses an unexpected version")
    if not refused or head != Versioned(TRIES - 1, data):
        advice = "this store loses or overwrites commits: do not use it"
        compared = Finding("compare-and-set", f"the head is {head}", FAILED, advice)
    return [compared, judged_latency("commit", commits), judged_latency("head", heads)]


async def _races(consensus: Consensus) -> list[Finding]:
    """Let several writers commit the same version at once, many times. At most one may win each time."""
    key = f"doctor/{SYSTEM.uuid()}"
    head: Versioned | None = None
    try:
        for n in range(RACES):
            before, data = n - 1 if n else None, [b"%d %d" % (n, number) for number in range(RACERS)]
            race = [partial(consensus.compare_and_set, key, before, each) for each in data]
            outcomes = await asyncio.gather(*(call() for call in race), return_exceptions=True)
            head = await consensus.head(key)
            winners = [each for each, outcome in zip(data, outcomes, strict=True) if outcome is True]
            if len(winners) > 1 or (winners and head != Versioned(n, winners[0])):
                result = f"{RACERS} writers committed the same version at once, and {len(winners)} won"
                return [Finding("race", result, FAILED, "this store loses commits: do not use it")]
            if failures := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
                raise failures[0]
    finally:
        if head is not None:
            with suppress(Unsupported):
                await consensus.remove(key, head)
    return [Finding("race", f"one of {RACERS} writers wins, {RACES} times")]


async def _blobs(blob: Blob) -> list[Finding]:
    """Write blobs under new keys, read them back, and delete them."""
    keys = [f"doctor/{SYSTEM.uuid()}" for _ in range(TRIES)]
    data = bytes(PUT_BYTES)
    puts, gets = list[float](), list[float]()
    try:
        for key in keys:
            puts.append(await _timed(lambda: blob.set(key, data)))  # noqa: B023
            gets.append(await _timed(lambda: blob.get(key)))  # noqa: B023
        listed = [key async for key, _ in blob.list("doctor/")]
        same = await blob.get(keys[0]) == data
    finally:
        await blob.delete(keys)
    consistent = Finding("blobs", "can be read and listed at once")
    if not same or {*keys} - {*listed}:
        consistent = Finding("blobs", "a written blob is missing", FAILED, "this store is not consistent")
    return [consistent, judged_latency("put", puts), judged_latency("get", gets)]


async def _timed(request: Callable[[], Awaitable[object]]) -> float:
    began = SYSTEM.monotonic()
    await request()
    return SYSTEM.monotonic() - began


def judged_latency(what: str, seconds: list[float]) -> Finding:
    """The median and the maximum of some requests, compared with usual ones."""
    middle, worst = median(seconds) * 1_000, max(seconds) * 1_000
    result = f"{middle:.2f} ms, at worst {worst:.2f} ms of {len(seconds)}"
    low, high = USUAL_MS[what]
    if middle < low:
        return Finding(what, result, UNUSUAL, "faster than a disk: commits may not survive a power failure")
    if middle > high:
        return Finding(
            what, result, UNUSUAL, f"slow: more than {high:.0f} ms; is the store far away or busy?"
        )
    return Finding(what, result)


def judged_clock(ahead_s: float) -> Finding:
    """How far the store's clock is ahead of this machine's."""
    where = "ahead of" if ahead_s >= 0 else "behind"
    result = f"the store's clock is {abs(ahead_s) * 1_000:.1f} ms {where} this one"
    if abs(ahead_s) > CLOCK_S:
        return Finding("clock", result, UNUSUAL, "leases and wall times follow the store's: synchronise both")
    return Finding("clock", result)


UNSAFE_FACTS = {
    ("consensus fsync", "off"): "a crash of the server loses commits, or its database: set fsync = on",
    ("consensus full_page_writes", "off"): "a power failure may tear pages: set full_page_writes = on",
    ("consensus synchronous_commit", "off"): "a crash of the server loses commits",
    ("consensus in_recovery", "true"): "this is a standby: only readonly clients can use it",
    ("blob fsync", "off"): "a power failure loses blobs that commits name: leave fsync=off to tests",
}


SQLITE_SOUND = (3, 51, 3)
SQLITE_OLD = "fine for aiopersist; if other programs write the file, too, rare damage is possible: use 3.51.3"


def judged_fact(what: str, value: str) -> Finding:
    """A fact of a store; unusual if it may lose data."""
    advice = UNSAFE_FACTS.get((what, value), "")
    name, _, number = value.partition(" ")
    if (what, name) == ("consensus store", "SQLite") and tuple(map(int, number.split("."))) < SQLITE_SOUND:
        advice = SQLITE_OLD
    if what == "blob conditional puts" and value == "no":
        return Finding(what, value, OK, "not needed: commits go to the consensus store")
    return Finding(what, value, UNUSUAL if advice else OK, advice)
