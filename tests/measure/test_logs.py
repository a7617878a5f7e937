"""Goal: an operator reads in the log what is wrong, by levels and fields; and never a secret."""

import ast
import asyncio
import logging
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.failures import named
from aiopersist.measure.instruments import DURATIONS, INSTRUMENTS
from aiopersist.measure.view import MetricsView
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.watch import TaskWatch, Watch
from aiopersist.storage.wrapper import Request, WrappedBlob, WrappedConsensus
from aiopersist.testing.faults import Faults, FaultyConsensus, Outcome
from tests.support.shards import until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/monitoring.md").read_text(encoding="utf-8")
SCHEMA = ap.Schema(key=str, val=int)
SECRET = "hunter2"
BEYOND = ("cli", "demo", "web", "fastapi", "testing")  # they speak to who started them


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What is logged after seconds is logged at once."""
    monkeypatch.setattr("aiopersist.storage.layers.LOG_AFTER_S", 0.01)
    monkeypatch.setattr("aiopersist.storage.stall.LOG_AFTER_S", 0.01)
    caplog.set_level(logging.DEBUG, "aiopersist")


async def test_an_outage_is_told_from_its_begin_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    faults, name = Faults(), uuid.uuid4().hex
    consensus = FaultyConsensus(MemoryConsensus(name), faults)
    settings = ap.Settings(writer_lease_s=0.2)
    async with ap.open(blob=MemoryBlob(name), consensus=consensus, settings=settings) as client:
        async with client.writer("orders", SCHEMA) as w:
            faults.rates = {Outcome.REFUSED: 1.0}
            writing = asyncio.ensure_future(w.write([("k", 1)]))
            await until(lambda: [r for r in records(caplog) if "op" in fields(r)])
            assert client.metrics().stalls > 0
            faults.heal()
            await writing
            await until(lambda: any(r.levelno == logging.INFO for r in records(caplog)))
    failing, *_ = [r for r in records(caplog) if "op" in fields(r)]
    assert failing.levelno == logging.WARNING
    assert failing.name == "aiopersist.storage"
    assert fields(failing)["error"] == "StorageUnavailable"
    assert fields(failing)["seconds"] > 0
    over = [r for r in records(caplog) if r.levelno == logging.INFO]
    assert {r.name for r in over} == {"aiopersist.storage"}
    assert all(fields(r)["seconds"] >= 0 and "op" in fields(r) for r in over)


async def test_a_lost_lease_and_work_that_failed_name_the_shard(caplog: pytest.LogCaptureFixture) -> None:
    faults, name = Faults(), uuid.uuid4().hex
    consensus = FaultyConsensus(MemoryConsensus(name), faults)
    settings = ap.Settings(writer_lease_s=0.2, retry_timeout_s=0)
    async with ap.open(blob=MemoryBlob(name), consensus=consensus, settings=settings) as client:
        async with client.writer("it's", SCHEMA):
            faults.fail_next("compare_and_set", Outcome.REFUSED)
            await until(lambda: [r for r in records(caplog) if r.name == "aiopersist.background"])
            await client.admin.drop("it's")
            await until(lambda: [r for r in records(caplog) if r.name == "aiopersist.leases"])
    failed, *_ = [r for r in records(caplog) if r.name == "aiopersist.background"]
    assert failed.levelno == logging.WARNING
    assert fields(failed)["error"] == "StorageUnavailable"
    assert "heartbeat" in fields(failed)["work"]
    lost, *_ = [r for r in records(caplog) if r.name == "aiopersist.leases"]
    assert (lost.levelno, fields(lost)["shard"]) == (logging.WARNING, "it's")


async def test_maintenance_is_told_to_who_asks_for_it(caplog: pytest.LogCaptureFixture) -> None:
    async with ap.open("mem://", maintenance=False) as client, client.writer("orders", SCHEMA) as w:
        await w.write([("k", 1)])
        await w.write([("k", 2)])
        await client.admin.force_compaction("orders")
    (done,) = [r for r in records(caplog) if r.name == "aiopersist.maintenance"]
    assert done.levelno == logging.DEBUG
    assert {"op": "compaction", "shard": "orders"}.items() <= fields(done).items()


class Leaking(WrappedConsensus):
    """A store of an application, whose errors tell its password."""

    leaks = False

    def _request(self, op: str, request: Request[Any], sent: int = 0) -> Any:
        if self.leaks:
            raise RuntimeError(f"cannot connect with password {SECRET}")
        return request()


class LeakingBlob(WrappedBlob):
    leaks = False

    def _request(self, op: str, request: Request[Any], sent: int = 0) -> Any:
        if self.leaks:
            raise RuntimeError(f"denied: secret_access_key={SECRET}")
        return request()


async def test_the_text_of_a_foreign_error_is_in_no_record(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: whatever a store of an application raises, its text, which may hold a secret, is not logged."""
    name = uuid.uuid4().hex
    blob, consensus = LeakingBlob(MemoryBlob(name)), Leaking(MemoryConsensus(name))
    settings = ap.Settings(
        writer_lease_s=0.2, watch_timeout_s=0.02, compaction_idle_s=0.02, retry_timeout_s=0.05,
        inline_writes_single_max_bytes=0,
    )  # fmt: skip
    async with ap.open(blob=blob, consensus=consensus, settings=settings) as client:
        async with client.writer("s", SCHEMA) as w, client.reader("s", SCHEMA) as reader:
            for n in range(20):
                await w.write([("k", n)])
            waiting = asyncio.ensure_future(reader.snapshot(1000).__aenter__())
            blob.leaks = consensus.leaks = True
            with pytest.raises(ap.Error):
                await w.write([("k", 1)])
            await until(lambda: len({(r.name, fields(r).get("work")) for r in records(caplog)}) >= 4)
            blob.leaks = consensus.leaks = False
            waiting.cancel()
            await asyncio.wait([waiting])
    assert records(caplog)
    formatter = logging.Formatter("%(message)s")
    for record in records(caplog):
        assert SECRET not in formatter.format(record), record
        assert SECRET not in repr(fields(record))


class Deaf(WrappedConsensus):
    """A store of an application without hints: waiting for one raises."""

    async def watch(self, key: str) -> None:
        raise RuntimeError(f"cannot listen with password {SECRET}")

    def watch_together(self) -> Watch:
        return TaskWatch(self.watch)


class DeafTogether(Deaf):
    def watch_together(self) -> Watch:
        watch = super().watch_together()
        watch.moved = lambda: self.watch("")  # type: ignore[assignment, method-assign, return-value]
        return watch


@pytest.mark.parametrize("kind", [Deaf, DeafTogether])
async def test_a_store_without_hints_is_told_without_its_words(
    kind: type[Deaf], caplog: pytest.LogCaptureFixture
) -> None:
    consensus = kind(MemoryConsensus(uuid.uuid4().hex))
    settings = ap.Settings(watch_timeout_s=0.02)
    async with ap.open(blob="mem://", consensus=consensus, settings=settings) as client:
        async with client.writer("s", SCHEMA) as w:
            waiting = asyncio.ensure_future(w.wait_for_upper_past(5))
            await until(lambda: [r for r in records(caplog) if "hints" in r.getMessage()])
            waiting.cancel()
            await asyncio.wait([waiting])
    formatter = logging.Formatter("%(message)s")
    assert SECRET not in "".join(formatter.format(record) for record in records(caplog))


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name.startswith("aiopersist")]


PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in PLAIN}


# --- the calls and the page --------------------------------------------------------------------------


class Call:
    """One call of a logger in the library."""

    def __init__(self, path: Path, node: ast.Call, level: str, texts: list[str]) -> None:
        self.where = f"{path.relative_to(ROOT)}:{node.lineno}"
        self.level = level
        self.texts = texts
        self.has_fields = any(keyword.arg == "extra" for keyword in node.keywords)


def calls() -> Iterator[Call]:
    for path in sorted((ROOT / "aiopersist").rglob("*.py")):
        if path.relative_to(ROOT / "aiopersist").parts[0] in BEYOND:
            continue
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                texts = [n.value for n in ast.walk(function) if isinstance(n, ast.Constant)]
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
                        level = ast.unparse(node.func).removeprefix("log.")
                        given = node.args[0]
                        formats = [t for t in texts if isinstance(t, str) and "%" in t and " " in t]
                        own = [given.value] if isinstance(given, ast.Constant) else formats
                        yield Call(path, node, level, [str(text) for text in own])


def test_every_record_has_fields() -> None:
    found = list(calls())
    assert len(found) > 10
    assert [call.where for call in found if not call.has_fields] == []


LEVELS = {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR", "exception": "ERROR"}


def on_the_page() -> set[tuple[str, str]]:
    """The levels and messages in the table, without what varies."""
    rows = re.findall(r"^\| `([A-Z]+)` \| `([^`]+)`", PAGE, re.MULTILINE)
    return {(level, re.sub(r"[\s.:,]*\.\.\.", "…", text)) for level, text in rows}


def as_on_the_page(text: str) -> str:
    text = re.sub(r"%s%s|%(?:\.\d+)?[a-z]", "...", text)
    return re.sub(r"[\s.:,]*\.\.\.", "…", text)


def test_the_page_has_every_message_with_its_level() -> None:
    page = on_the_page()
    for call in calls():
        wanted = {(LEVELS[call.level], as_on_the_page(text)) for text in call.texts}
        assert wanted & page, (call.where, wanted)


def test_the_page_has_every_metric() -> None:
    names = [instrument.name for instrument in INSTRUMENTS] + [durations.name for durations in DURATIONS]
    assert [name for name in names if f"`{name}`" not in PAGE] == []
    untold = {"client", "enabled", "age_s", "requests", "cache"}
    assert [name for name in MetricsView.model_fields if name not in untold and f"`{name}" not in PAGE] == []


def test_every_logger_is_a_child() -> None:
    for path in sorted((ROOT / "aiopersist").rglob("*.py")):
        parts = path.relative_to(ROOT / "aiopersist").parts
        found = re.findall(r"^log = (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        for text in found if parts[0] not in ("cli", "demo") else ():
            child = re.fullmatch(r'logging\.getLogger\("aiopersist"\)\.getChild\("(\w+)"\)', text)
            assert child is not None, path
            assert f"`aiopersist.{child[1]}`" in PAGE


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("shard 'orders'", "orders"),
        ('shard "it\'s"', "it's"),
        ("shard s123", "s123"),
        (None, None),
        ("", None),
    ],
)
def test_the_name_of_a_shard_out_of_its_label(label: str | None, name: str | None) -> None:
    assert named(label) == name
