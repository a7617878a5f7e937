"""Goal: `aiopersist maintain` maintains a whole location, reports its work and its failures, and ends when
it is told to, without leaving claims: it runs as a command, on real stores."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import pytest
from typer.testing import CliRunner

import aiopersist as ap
from aiopersist.cli.app import app
from aiopersist.state.compaction import plan
from aiopersist.testing.servers import free_port
from tests.cli.result import Result
from tests.support.internals import shards_of, stack_of
from tests.support.schemas import SCHEMA
from tests.support.shards import BLOBS

COMMAND = [sys.executable, "-c", "from aiopersist.cli import main; main()", "maintain"]
PROMPTLY_S = 45.0  # from a signal to the end: a guard; closing a client may take 5 s itself
TIMES = 10  # batches of a shard: enough to be compacted in some steps


def run(*arguments: object, **env: str) -> Result:
    ended = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=os.environ | env, timeout=120
    )
    return Result(ended.returncode, ended.stdout, ended.stderr)


async def maintain(*arguments: object, **env: str) -> Result:
    return await asyncio.to_thread(run, *arguments, **env)


def here(*arguments: object, **env: str) -> Result:
    """The same in this process; its signals are those of the main thread, so no loop may be running."""
    done = CliRunner().invoke(app, ["maintain", *map(str, arguments)], env=env)
    return Result(done.exit_code, done.stdout, done.stderr)


def one_line(result: Result) -> str:
    """The only complaint."""
    assert result.err.count("\n") == 1, result.err
    assert result.err.startswith("aiopersist: ")
    return result.err


def stores(folder: Path) -> list[str]:
    """Options for the location in this folder, without fsync, which is not what is tested here."""
    return ["--blob", f"file://{folder}/blob?fsync=off", "--consensus", f"sqlite://{folder}/state.db"]


def opened(folder: Path) -> Any:
    _, blob, _, consensus = stores(folder)
    return ap.open(blob=blob, consensus=consensus, settings=BLOBS, maintenance=False)


async def grown(client: Any, name: str, times: int = TIMES) -> None:
    """A shard of so many batches, each a blob."""
    async with client.writer(name, SCHEMA) as w:
        for _ in range(times):
            at = w.upper.time
            await w.compare_and_append([(f"{at:03}", at, at, 1)], at, at + 1)


async def made(folder: Path) -> None:
    """An empty location."""
    async with ap.open(folder):
        pass


async def owing(folder: Path, *names: str) -> None:
    """A location whose shards of these names want to be compacted and collected."""
    async with opened(folder) as client:
        for name in names:
            await grown(client, name)


async def state_of(client: Any, name: str) -> Any:
    return await shards_of(client).at(await client.shard_id(name)).open()


async def is_tended(client: Any, name: str) -> bool:
    """Whether nothing is left to do, and everything is there."""
    state = await state_of(client, name)
    async with client.reader(name, SCHEMA) as r, r.snapshot() as s:
        assert len(await s.rows()) == s.as_of + 1
    nobody = not state.claims and not state.writers
    return nobody and plan(state, 2, state.at) is None and bool(state.rollups)


async def lose_a_blob(folder: Path, name: str) -> str:
    """One that the newest version names; the shard's id."""
    async with opened(folder) as client:
        state = await state_of(client, name)
        keys = [part.key for batch in state.batches.values() for part in batch.parts]
        await stack_of(client).blob.delete([keys[0]])
        return str(state.shard)


async def leak(folder: Path) -> None:
    """A blob whose writer died before it was named, long ago."""
    async with opened(folder) as client:
        shard = shards_of(client).at(await client.shard_id("a"))
        await stack_of(client).blob.set(
            f"{shard.id}/w{stack_of(client).runtime.uuid()}/leaked.parquet", b"x" * 1000
        )
        assert len((await client.admin.sweep_leaked_blobs()).keys) == 1


# --- one round ----------------------------------------------------------------------------------------


async def test_one_round_does_what_is_due(tmp_path: Path) -> None:
    """Goal: it says what it did, and then all is compact, collected and swept; another one finds nothing."""
    await owing(tmp_path, "a", "b")
    await leak(tmp_path)
    first = await maintain("--location", tmp_path, "--once")
    assert (first.status, first.err) == (0, "")
    said = re.fullmatch(
        r"2 of 2 shards changed: (\d+) compactions, 2 collections of (\d+) parts and (\d+) versions\n"
        r"swept 1 leaked blob of 1,000 B\n",
        first.out,
    )
    assert said is not None, first.out
    assert all(int(number) > 0 for number in said.groups())
    async with opened(tmp_path) as client:
        assert await is_tended(client, "a")
        assert await is_tended(client, "b")
        usage = await client.admin.usage()
        assert usage.total == usage.current
        assert (await client.admin.sweep_leaked_blobs()).keys == ()
    again = await maintain("--once", AIOPERSIST_LOCATION=str(tmp_path))
    assert again == (0, "", "")


def test_nothing_to_do(tmp_path: Path) -> None:
    """Goal: an empty location is no error, and nothing is said about it."""
    asyncio.run(made(tmp_path / "new"))
    assert here("--location", tmp_path / "new", "--once") == (0, "", "")


def test_a_shard_that_cannot_be_tended(tmp_path: Path) -> None:
    """Goal: it is named, with the reason, the status is 1, and the others were maintained."""
    asyncio.run(owing(tmp_path, "a", "lost", "z"))
    shard_id = asyncio.run(lose_a_blob(tmp_path, "lost"))
    result = here(*stores(tmp_path), "--once")
    assert result.status == 1
    assert f"\n{shard_id} could not be maintained: Corruption: " in result.out
    assert "1 of 3 shards could not be maintained" in result.err
    asyncio.run(all_but_the_lost(tmp_path))


async def all_but_the_lost(tmp_path: Path) -> None:
    async with opened(tmp_path) as client:
        assert await is_tended(client, "a")
        assert await is_tended(client, "z")
        state = await state_of(client, "lost")
        assert (state.claims, state.writers) == ({}, {})


# --- what it cannot begin with ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(["--blob", "mem://"], "need each other", id="only one store"),
        pytest.param(
            ["--location", "x", "--blob", "mem://", "--consensus", "mem://"],
            "cannot be combined",
            id="two locations",
        ),
        pytest.param(["--blob", "nonsense://x", "--consensus", "mem://"], "nonsense", id="an unknown scheme"),
        pytest.param([], "location", id="no location"),
    ],
)
def test_wrong_options(options: list[str], said: str) -> None:
    """Goal: status 2 and one line that says why, before anything is done."""
    result = here(*options, "--once")
    assert (result.status, result.out) == (2, "")
    assert said in one_line(result)


def test_a_mistyped_location(tmp_path: Path) -> None:
    """Goal: status 2 and one line at once, and nothing is made, be it a path, a file, or two stores of which
    one is there."""
    asyncio.run(made(tmp_path / "production"))
    (tmp_path / "file").write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    blob, consensus = f"file://{tmp_path}/production/blob", f"sqlite://{tmp_path}/production/state.db"
    for options, said in [
        (["--location", tmp_path / "prodution"], "prodution: check the path"),
        (["--location", tmp_path / "file"], "file is not a directory"),
        (["--blob", f"file://{tmp_path}/blbo", "--consensus", consensus], "blobs are not in the blob store"),
        (["--blob", blob, "--consensus", f"sqlite://{tmp_path}/production/sate.db"], "there is no such file"),
        (["--location", "mem://"], "there is no location yet"),
    ]:
        result = here(*options, "--once", AIOPERSIST_OPEN_TIMEOUT_S="1000")
        assert (result.status, result.out) == (2, "")
        assert said in one_line(result)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unreachable_store(tmp_path: Path) -> None:
    """Goal: status 2 after the time that opening may take, though the loop is without end."""
    consensus = f"postgres://nobody@127.0.0.1:{free_port()}/nothing"
    options = ["--blob", f"file://{tmp_path}/b", "--consensus", consensus]
    result = here(*options, AIOPERSIST_OPEN_TIMEOUT_S="0.5")
    assert result.status == 2
    one_line(result)


# --- the loop -----------------------------------------------------------------------------------------


class Loop:
    """The command as it runs beside the applications."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.process.poll() is None:  # the test failed
            self.process.kill()
            self.process.communicate()

    async def told(self, number: signal.Signals) -> Result:
        """What became of it after this signal."""
        began = time.monotonic()
        self.process.send_signal(number)
        out, err = await asyncio.to_thread(self.process.communicate)
        assert time.monotonic() - began < PROMPTLY_S
        return Result(self.process.returncode, out, err)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(50):
        while not await holds():
            await asyncio.sleep(0.01)


def test_json(tmp_path: Path) -> None:
    """Goal: what a round did, and a sweep, is a line for programs."""
    asyncio.run(owing(tmp_path, "a", "b"))
    asyncio.run(leak(tmp_path))
    result = here(*stores(tmp_path), "--once", "--json")
    assert (result.status, result.err) == (0, "")
    done, swept = map(json.loads, result.out.splitlines())
    assert (done["done"], done["shards"], done["failures"]) == ("round", 2, {})
    assert done["compactions"] > 0
    assert (swept["done"], swept["blobs"]) == ("sweep", 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
async def test_the_loop_ends_when_it_is_told_to(number: signal.Signals, tmp_path: Path) -> None:
    """Goal: it maintains what comes after it began, too, sweeps at first, and ends with status 0 at once."""
    await owing(tmp_path, "a")
    await leak(tmp_path)
    async with Loop(*stores(tmp_path), "--every-s", 0.05) as loop, opened(tmp_path) as client:
        await until(lambda: is_tended(client, "a"))
        await grown(client, "later")
        await until(lambda: is_tended(client, "later"))
        result = await loop.told(number)
        assert (result.status, result.err) == (0, "")
        assert result.out.endswith("ended\n")
        assert (await client.admin.sweep_leaked_blobs()).keys == ()
        assert await is_tended(client, "a")


async def lose_the_rollup(folder: Path, name: str) -> None:
    async with opened(folder) as client:
        await client.admin.force_gc(name)
        state = await state_of(client, name)
        await stack_of(client).blob.delete([rollup.key for rollup in state.rollups.values()])


async def test_the_loop_goes_on_beside_a_shard_that_is_damaged(tmp_path: Path) -> None:
    """Goal: neither a round nor a sweep that meets it ends the loop: others are maintained still."""
    await owing(tmp_path, "a", "lost")
    await lose_the_rollup(tmp_path, "lost")
    async with Loop(*stores(tmp_path), "--every-s", 0.05) as loop, opened(tmp_path) as client:
        await until(lambda: is_tended(client, "a"))
        await grown(client, "later")
        await until(lambda: is_tended(client, "later"))
        result = await loop.told(signal.SIGTERM)
        assert result.status == 0
        assert "a round failed: " in result.out


async def is_at_work(client: Any, names: list[str]) -> bool:
    """Whether any work is claimed. What was done since the last look is to be done again."""
    for name in names:
        state = await state_of(client, name)
        if state.claims:
            return True
        if plan(state, 2, state.at) is None:
            await grown(client, name)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param(["--once"], marks=pytest.mark.long), ["--every-s", "0.05"]])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_told_to_end_in_the_middle(mode: list[str], number: signal.Signals, tmp_path: Path) -> None:
    """Goal: in the middle of any work, its claims are given back, and no data is lost. A signal is how the
    loop ends; a single round it interrupts."""
    names = [f"s{number}" for number in range(6)]
    await owing(tmp_path, *names)
    pause_s = random.Random(f"{mode} {number}").uniform(0, 0.05)
    async with opened(tmp_path) as client:
        for _ in range(20):  # a single round may be over before it is told
            async with Loop(*stores(tmp_path), *mode) as loop:
                while not await is_at_work(client, names) and loop.process.poll() is None:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(pause_s)
                result = await loop.told(number)
            if "--once" not in mode or result.status:
                break
        expected = (130, "aiopersist: interrupted\n") if "--once" in mode else (0, "")
        assert (result.status, result.err) == expected
        await client.admin.sweep_leaked_blobs(dry_run=False)
        for name in names:
            state = await state_of(client, name)
            assert (state.claims, state.writers) == ({}, {})
            assert (await client.admin.fsck(name)).ok
