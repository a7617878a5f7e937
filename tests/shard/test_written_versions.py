"""Goal: a version that no process could read, or that breaks an invariant, is never written, under `python
-O` too; and once a version is won its caller never hears that it failed."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import aiopersist as ap
from aiopersist.base.settings import SECONDS_MAX
from aiopersist.indexed.listen import RecordFeed
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.log import consensus_key
from aiopersist.shard.shard import Shard
from aiopersist.state.command import Commit, Context
from aiopersist.state.command import commit as committed
from aiopersist.state.diff import Changes, diff_of, encode_diff
from aiopersist.state.invariants import check_version
from aiopersist.state.model import NULL_LEASE_S, LeasedReader, State
from tests.support.schemas import SCHEMA
from tests.support.shards import BLOBS

SECONDS = [name for name in ap.Settings.model_fields if name.endswith("_s")]


def shard_of(handle: Any) -> Shard:
    shard: Shard = handle._shard
    return shard


# --- what JSON cannot say --------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 2 * SECONDS_MAX])
@pytest.mark.parametrize("name", SECONDS)
def test_a_setting_of_seconds_is_finite(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        ap.Settings(**{name: value})
    monkeypatch.setenv(f"AIOPERSIST_{name.upper()}", str(value))
    with pytest.raises(ValidationError, match=f"AIOPERSIST_{name.upper()}"):
        ap.Settings()


@pytest.mark.parametrize("lease_s", [math.inf, math.nan, 2 * SECONDS_MAX, 0])
async def test_a_lease_for_others_is_finite(quiet_mem: ap.Client, lease_s: float) -> None:
    with pytest.raises(ValueError, match="lease_s"):
        await quiet_mem.register_writer("shard", SCHEMA, lease_s)


@dataclass(frozen=True)
class Says:
    """A command that makes these changes, unchecked."""

    changes: Callable[[State], dict[str, Any]]

    def __call__(self, state: State | None, context: Context) -> Commit:
        assert state is not None
        return committed(state, context, **self.changes(state))


def an_endless_lease(state: State) -> dict[str, Any]:
    (writer,) = state.writers
    return {"writers": {writer: state.writers[writer].replace(lease_s=math.inf)}}


def no_moment(state: State) -> dict[str, Any]:
    (writer,) = state.writers
    return {"writers": {writer: state.writers[writer].replace(heartbeat=math.nan)}}


def a_bound_that_is_null(state: State) -> dict[str, Any]:
    ((ordinal, batch),) = state.batches.items()
    parts = tuple(
        part.replace(stats={"key": {"min": None, "max": math.inf, "nulls": 0}}) for part in batch.parts
    )
    return {"batches": {ordinal: batch.replace(parts=parts)}}


def a_tuple_that_is_a_list(state: State) -> dict[str, Any]:
    return {"schemas": {7: {"codecs": ("a", "b")}}}


@pytest.mark.parametrize(
    "changes", [an_endless_lease, no_moment, a_bound_that_is_null, a_tuple_that_is_a_list]
)
async def test_what_the_bytes_do_not_say_is_not_written(quiet_mem: ap.Client, changes: Any) -> None:
    async with quiet_mem.writer("s", SCHEMA) as w:
        await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
        before, slot = shard_of(w).state, Slot()
        with pytest.raises(ap.Corruption, match="read"):
            await commit(shard_of(w).register, Says(changes), slot)
        assert not slot.busy
        assert await shard_of(w).open() == before
        await w.compare_and_append([("b", 1, 1, 1)], 1, 2)  # and nothing is in the way of others


async def test_a_shard_with_an_endless_lease_of_an_earlier_version_is_readable(location: Any) -> None:
    """Goal: null, as an infinite lease was once written, is read as a long one that ends."""
    async with ap.open(blob=location.blob, consensus=location.consensus, maintenance=False) as quiet_mem:
        async with quiet_mem.writer("s", SCHEMA) as w:
            await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
            shard = shard_of(w)
            record = LeasedReader(since=ap.Antichain(), seqno_hold=0, heartbeat=0.0, lease_s=1.0)
            changes = Changes(readers={"r1": record.replace(lease_s=math.inf)})
            data = encode_diff(diff_of(changes, shard.state, commit="c", at=0.0))
            assert b'"lease_s":null' in data
            key, seqno = consensus_key(shard.id), shard.state.seqno
            assert await quiet_mem._stack.consensus.compare_and_set(key, seqno, data)
    async with ap.open(blob=location.blob, consensus=location.consensus, maintenance=False) as other:
        assert (await other.inspect("s")).readers["r1"].lease_s == NULL_LEASE_S
        async with other.reader("s", SCHEMA) as r, r.snapshot() as s:
            assert await s.rows() == [("a", 1, 1)]
        assert (await other.inspect("s")).readers == {}  # its time is over, and a commit ended it
        await other.force_gc("s")
    async with ap.open(blob=location.blob, consensus=location.consensus, maintenance=False) as third:
        assert (await third.fsck("s")).ok


# --- invariants ------------------------------------------------------------------------------------


async def test_a_version_that_breaks_an_invariant_is_refused(quiet_mem: ap.Client) -> None:
    """Goal: by a raise; an `assert` would be gone in an optimised interpreter."""
    async with quiet_mem.writer("s", SCHEMA) as w:
        await w.compare_and_append([("a", 1, 0, 1)], 0, 5)
        state = shard_of(w).state
        (batch,) = state.batches.values()
        at = state.seqno + 1
        bad: list[dict[str, Any]] = [
            {"upper": ap.Antichain(3)},
            {"upper": ap.Antichain(9)},
            {"batches": {at: batch, at + 1: batch}},
        ]
        for changes in bad:
            diff = diff_of(Changes(**changes), state, commit="c", at=0.0)
            with pytest.raises(AssertionError, match="must not be written"):
                check_version(diff, state, state.replace(seqno=at, **changes))


QUIET = """
import aiopersist as ap
import pytest_asyncio

@pytest_asyncio.fixture
async def quiet_mem():
    async with ap.open("mem://", maintenance=False) as client:
        yield client
"""


def test_an_optimised_interpreter_refuses_the_same(tmp_path: Path) -> None:
    """Goal: these tests pass with `python -O`, too. Without the plugins and servers that they do not need: an
    optimised interpreter compiles all that it imports, and finds nothing compiled."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    (tmp_path / "quiet.py").write_text(QUIET)
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    apart = ["-c", str(tmp_path / "pytest.ini"), "--noconftest", "-p", "pytest_asyncio.plugin", "-p", "quiet"]
    chosen = ["--import-mode=importlib", "-k", "invariant or bytes_do_not_say or a_listener"]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": paths}
    found = subprocess.run([*command, *apart, *chosen], capture_output=True, text=True, check=False, env=env)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert re.search(r"^7 passed, ", found.stdout, re.MULTILINE), found.stdout[-3000:]


# --- after a commit was won ------------------------------------------------------------------------


class Listener(Exception):
    """What a listener of versions raises."""


def fails(*args: Any, **kwargs: Any) -> Any:
    raise Listener


@pytest.mark.parametrize("callback", ["on_news", "on_commit"])
async def test_a_listener_that_fails_fails_no_commit(callback: str) -> None:
    """Goal: the append that happened is told as one, and its blob is there."""
    async with ap.open("mem://", settings=BLOBS, maintenance=False) as quiet_mem:
        async with quiet_mem.writer("s", SCHEMA) as w:
            setattr(shard_of(w).register, callback, fails)
            await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
            assert await w.write([("b", 1)]) == 1
            await quiet_mem.compare_and_append_many([ap.Append(w, [("c", 1, 2, 1)], 2, 3)])
            assert quiet_mem._stack.supervisor.failures.count >= 3
            async with quiet_mem.reader("s", SCHEMA) as r, r.snapshot() as s:
                assert await s.rows() == [("a", 1, 1), ("b", 1, 1), ("c", 1, 1)]
            assert (await quiet_mem.fsck("s")).ok


async def test_a_feed_that_fails_fails_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the writer of a stream hears that its write is durable; the listener, that it missed it."""
    async with ap.open("mem://", settings=BLOBS) as quiet_mem, quiet_mem.indexed("x", background=False) as ix:
        stream = await ix.register("s", str, int)
        snapshot, events = await ix.listen(stream)
        with monkeypatch.context() as patch:
            patch.setattr(RecordFeed, "publish", fails)
            seqno = await ix.write([(stream, [("a", 1, 0, 1)])])
        with pytest.raises(ap.LeaseExpired):
            await anext(aiter(events))
        await events.aclose()
        await snapshot.aclose()
        assert seqno == 1
        async with await ix.snapshot(stream) as now:
            assert await now.rows() == [("a", 1, 0, 1)]
