"""Goal: the fixtures of the pytest plugin work in a project without our configuration, whoever runs its
tests; and a run that asks for none of them does not import the library."""

import asyncio
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest

from aiopersist.testing.application import MovedClock
from tests.examples import BLOCK

ROOT = Path(__file__).parents[2]

APPLICATION = """
import asyncio
from datetime import timedelta

import aiopersist as ap
import pytest
from aiopersist.testing.faults import Outcome
HEAD


@pytest.fixture
def aiopersist_settings():
    return ap.Settings(retry_timeout_s=0.05, reader_lease_s=60)


@ASYNC_FIXTURE
async def stock(aiopersist_client):
    table = aiopersist_client.table("stock", key=str, val=int)
    await table.put("tea", 3)
    return table


@pytest.mark.parametrize("again", [False, True])
async def test_a_client_is_fresh(aiopersist_client, again):
    assert await aiopersist_client.list_shards() == {}
    await aiopersist_client.table("t", str, int).put("k", 1)


async def test_another_fixture_may_use_the_client(stock, aiopersist_client):
    assert await stock.get("tea") == 3


async def test_a_location_is_a_directory(aiopersist_location):
    for n in range(2):
        async with ap.open(aiopersist_location) as client:
            table = client.table("t", str, int)
            assert await table.update("k", lambda old: (old or 0) + 1) == n + 1


def test_without_a_loop_there_is_a_location(aiopersist_location):
    assert list(aiopersist_location.iterdir()) == []


async def test_stores_fail_as_they_are_told(aiopersist_faults):
    faults, table = aiopersist_faults, aiopersist_faults.client.table("t", str, int)
    await table.put("k", 0)
    faults.consensus.fail_next("compare_and_set", Outcome.LOST)
    assert await table.update("k", lambda old: old + 1) == 1
    assert faults.consensus.injected == [("compare_and_set", Outcome.LOST)]
    faults.consensus.rates = {Outcome.REFUSED: 1.0}
    with pytest.raises(ap.StorageUnavailable):
        await table.put("k", 7)
    faults.consensus.rates, faults.consensus.latency_s = {}, (0.3, 0.3)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await table.put("k", 8)
    faults.consensus.latency_s = (0.0, 0.0)
    assert await table.get("k") in (1, 8)
    faults.consensus.rates = faults.blob.rates = {Outcome.DROPPED: 1.0}  # the client closes all the same


async def test_a_clock_is_moved(aiopersist_client, aiopersist_clock):
    prices = aiopersist_client.table("prices", str, int)
    await prices.put("tea", 3)
    yesterday = aiopersist_clock.now()
    aiopersist_clock.move(timedelta(hours=23))
    await prices.put("tea", 4)
    assert await prices.get("tea", as_of=yesterday) == 3
    aiopersist_clock.move(2 * 3600)
    await prices.put("tea", 5)
    await aiopersist_client.force_compaction("prices")
    with pytest.raises(ap.SinceViolation):
        await prices.get("tea", as_of=yesterday)


async def test_faults_have_the_clock_too(aiopersist_faults, aiopersist_clock):
    before = aiopersist_faults.client.clock()[0]
    aiopersist_clock.move(3600)
    assert 3600 <= aiopersist_faults.client.clock()[0] - before < 3660
"""

ANYIO = """

@pytest.fixture
def anyio_backend(): return 'asyncio'
"""
LOOPS = "asyncio_default_fixture_loop_scope = function"


class Runner(NamedTuple):
    """Who runs the tests: their mark, the head of their module, how it makes fixtures, the configuration."""

    mark: str
    head: str
    fixture: str
    options: str

    def module(self) -> str:
        """The tests for it."""
        tests = APPLICATION.replace("HEAD", self.head).replace("ASYNC_FIXTURE", self.fixture)
        return re.sub(r"^(?=async def test_)", self.mark, tests, flags=re.MULTILINE)


RUNNERS = {
    "strict": Runner("@pytest.mark.asyncio\n", "import pytest_asyncio", "pytest_asyncio.fixture", LOOPS),
    "auto": Runner("", "", "pytest.fixture", f"asyncio_mode = auto\n{LOOPS}"),
    "one loop for a module": Runner(
        "@pytest.mark.asyncio(loop_scope='module')\n",
        "import pytest_asyncio",
        "pytest_asyncio.fixture(loop_scope='module')",
        LOOPS,
    ),
    "one loop for all": Runner(
        "",
        "",
        "pytest.fixture",
        "asyncio_mode = auto\nasyncio_default_fixture_loop_scope = session\n"
        "asyncio_default_test_loop_scope = session",
    ),
    "anyio": Runner("@pytest.mark.anyio\n", ANYIO, "pytest.fixture", LOOPS),
    "anyio alone": Runner("@pytest.mark.anyio\n", ANYIO, "pytest.fixture", "addopts = -p no:asyncio"),
}


SHORT = ("strict", "one loop for all", "anyio alone")
"""A loop for each test, one for all of them, and no `pytest_asyncio`."""


async def run(directory: Path, *options: str, loaded: bool = True) -> str:
    """What pytest prints in that project. `loaded`: with the plugins that are installed, and ours."""
    ours = ("-p", "pytest_aiopersist") if loaded else ()
    path = os.pathsep.join([str(directory), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    around = {**os.environ, "PYTHONPATH": path}
    if not loaded:
        around["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ours, *options]
    ran = await asyncio.to_thread(
        subprocess.run, command, cwd=directory, env=around, capture_output=True, text=True, timeout=120
    )
    return ran.stdout + ran.stderr


@pytest.mark.parametrize(
    "runner",
    [
        pytest.param(runner, id=name, marks=() if name in SHORT else pytest.mark.long)
        for name, runner in RUNNERS.items()
    ],
)
async def test_the_fixtures_work_whoever_runs_the_tests(tmp_path: Path, runner: Runner) -> None:
    (tmp_path / "test_application.py").write_text(runner.module())
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nfilterwarnings = error\n{runner.options}\n")
    shown = await run(tmp_path)
    assert re.search(r"^8 passed in ", shown, re.MULTILINE), shown[-3000:]


@pytest.mark.parametrize("runner", ["strict", pytest.param("anyio alone", marks=pytest.mark.long)])
async def test_the_tests_of_the_page_pass(tmp_path: Path, runner: str) -> None:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nfilterwarnings = error\n{RUNNERS[runner].options}\n")
    shop, tests = (tmp_path / "shop.py", tmp_path / "test_shop.py")
    blocks = BLOCK.findall((ROOT / "docs/howto/testing.md").read_text(encoding="utf-8"))
    shop.write_text(blocks[0])
    tests.write_text("\n".join(["from shop import *", *blocks[1:]]))
    if "anyio" in runner:
        text = tests.read_text().replace("pytest.mark.asyncio", "pytest.mark.anyio")
        tests.write_text(text.replace("pytest_asyncio.fixture", "pytest.fixture") + ANYIO)
    shown = await run(tmp_path)
    assert re.search(r"^6 passed in ", shown, re.MULTILINE), shown[-3000:]


async def test_who_cannot_run_a_client_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_application.py").write_text("def test_it(aiopersist_client): pass\n")
    shown = await run(tmp_path, "-p", "no:asyncio")
    assert "install pytest-asyncio, or mark the test with pytest.mark.anyio" in shown
    (tmp_path / "test_application.py").write_text(
        "import pytest\n\n@pytest.fixture\ndef anyio_backend(): return 'trio'\n\n"
        "@pytest.mark.anyio\nasync def test_it(aiopersist_client): pass\n"
    )
    shown = await run(tmp_path, "-rs")
    assert "aiopersist runs on asyncio only" in shown
    assert "1 skipped" in shown


OLD = """
import pytest

def fixture(fixture_function=None, *, scope='function', params=None, autouse=False, ids=None, name=None):
    return pytest.fixture(fixture_function, scope=scope, params=params, autouse=autouse, ids=ids, name=name)

def pytest_configure(config):
    config.addinivalue_line('markers', 'asyncio: run by this')
"""
"""What a plugin can do as it was before 0.24: there is no `loop_scope`."""


@pytest.mark.parametrize("version", ["0.23.8", pytest.param("", marks=pytest.mark.long)])
async def test_an_older_pytest_asyncio_is_told_of_at_use_alone(tmp_path: Path, version: str) -> None:
    """Goal: who has another version, and uses nothing of ours, runs his tests; who asks learns which he
    needs."""
    package, tests = tmp_path / "pytest_asyncio", tmp_path / "test_application.py"
    package.mkdir()
    (package / "plugin.py").write_text(OLD)
    told = f"__version__ = {version!r}\n" if version else ""
    (package / "__init__.py").write_text(f"{told}from .plugin import fixture\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    tests.write_text("def test_mine(aiopersist_location): assert aiopersist_location.is_dir()\n")
    shown = await run(tmp_path)
    assert "1 passed" in shown, shown
    tests.write_text("import pytest\n\n@pytest.mark.asyncio\ndef test_mine(aiopersist_client): pass\n")
    shown = await run(tmp_path)
    assert f"aiopersist_client needs pytest-asyncio 0.26 or newer, here is {version or '?'}" in shown, shown


async def test_a_run_without_pytest_asyncio_does_not_import_it(tmp_path: Path) -> None:
    """Goal: a plugin that everybody has costs nobody time: `pytest_asyncio` brings asyncio along."""
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it(): assert {'pytest_asyncio', 'asyncio'} & set(sys.modules) == set()\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    shown = await run(tmp_path, "-p", "pytest_aiopersist", loaded=False)
    assert "1 passed" in shown, shown


async def test_a_plugin_that_is_loaded_by_its_module_is_known(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nasyncio_mode = auto\n{LOOPS}\n")
    (tmp_path / "test_it.py").write_text("async def test_it(aiopersist_client): pass\n")
    shown = await run(tmp_path, "-p", "pytest_asyncio.plugin", "-p", "pytest_aiopersist", loaded=False)
    assert "1 passed" in shown, shown


async def test_a_run_that_asks_for_nothing_does_not_import_the_library(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_application.py").write_text(
        "import sys\n\ndef test_it(request):\n"
        "    assert request.config.pluginmanager.has_plugin('pytest_aiopersist')\n"
        "    assert [name for name in sys.modules if name.split('.')[0] == 'aiopersist'] == []\n"
        "    assert {'pyarrow', 'polars', 'pydantic'} & set(sys.modules) == set()\n"
    )
    assert "1 passed" in await run(tmp_path)


def test_pytest_finds_the_plugin_by_itself() -> None:
    """Goal: the name is that of the module, so that `-p` and the entry point are one plugin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"pytest_aiopersist": "pytest_aiopersist"}
    for part in ("wheel", "sdist"):
        (listed,) = project["tool"]["hatch"]["build"]["targets"][part].values()
        assert "pytest_aiopersist.py" in [name.strip("/") for name in listed]
    found = entry_points(group="pytest11", name="pytest_aiopersist")
    if not found:
        pytest.skip("installed in place before the plugin was there")
    assert {entry.value for entry in found} == {"pytest_aiopersist"}


async def test_a_moved_clock_wakes_who_sleeps_until_then() -> None:
    clock = MovedClock()
    short, long = (asyncio.create_task(clock.sleep(seconds)) for seconds in (100, 10_000))
    await asyncio.sleep(0.01)
    before = clock.wall(), clock.monotonic()
    clock.move(101)
    async with asyncio.timeout(30):
        await short
    assert min(clock.wall() - before[0], clock.monotonic() - before[1]) >= 101
    assert not long.done()
    long.cancel()
    with pytest.raises(ValueError, match="not by -1"):
        clock.move(-1)


async def test_a_clock_that_is_not_moved_goes_on() -> None:
    clock = MovedClock()
    before = clock.monotonic()
    async with asyncio.timeout(30):
        await clock.sleep(0.02)
    assert clock.monotonic() - before >= 0.02
