"""Servers and locations for every test, and three rules: no test hangs (`timeout` in pyproject.toml),
none blocks the event loop, and every run says which S3 servers it was about."""

import gc
import importlib
import inspect
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

import aiopersist as ap
from aiopersist.testing import azure, servers
from aiopersist.testing.proxy import TcpProxy
from tests.support.loop_watch import LoopWatch

# Shared, noisy cores: how long one example takes says nothing.
settings.register_profile(
    "default", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("default"), max_examples=20)

# Another Python changes little: fewer examples, and one S3 server.
QUICK = os.environ.get("AIOPERSIST_TEST_QUICK") == "1"
settings.load_profile("quick" if QUICK else "default")
S3_LABELS = servers.s3_labels()[: 1 if QUICK else None]


def _long(*kinds: str) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.long) for kind in kinds]


# `CASES` plays kinds evenly spread over this order.
LOCATIONS = ["mem", "files+sqlite", "s3+postgres", *_long("files+postgres", "bucket", "azure")]
ELSEWHERE = ["mem", *_long("files+sqlite", "files+postgres", "s3+postgres", "bucket", "azure")]

HEAVY = "pandas polars pyarrow.parquet pyarrow.compute asyncpg aiobotocore.session obstore fastapi httpx"

CASES = 1 if QUICK else int(os.environ.get("AIOPERSIST_TEST_CASES", "0"))
"""Of each test function that has more, so many run; 0: all."""

_s3_used: Counter[str] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each function some of its cases, evenly spread."""
    if not CASES:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {
        id(some[number * len(some) // CASES] if len(some) > CASES else item)
        for some in cases.values()
        for number, item in enumerate(some[:CASES])
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


class StoreUrls(NamedTuple):
    """`ap.open(blob=..., consensus=...)`; a test may unpack it."""

    blob: str
    consensus: str


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[servers.PostgresServer]:
    """The run's own Postgres, started when a test first needs it."""
    with servers.postgres_server() as server:
        yield server


@pytest.fixture
def postgres_schema() -> str:
    """The name of a schema of this test alone; the library makes it."""
    return f"t_{uuid.uuid4().hex[:16]}"


@pytest.fixture
def postgres_url(postgres_server: servers.PostgresServer, postgres_schema: str) -> str:
    """A consensus URL of an empty place in the real Postgres."""
    return postgres_server.url(postgres_schema)


@pytest.fixture
async def admin(postgres_server: servers.PostgresServer, postgres_schema: str) -> AsyncIterator[Any]:
    """A connection behind the library's back, in its schema."""
    import asyncpg  # few tests need it

    settings = {"search_path": postgres_schema}
    connection = await asyncpg.connect(postgres_server.dsn(), server_settings=settings)
    yield connection
    await connection.close()


class PostgresProxy(NamedTuple):
    """`url` leads through `proxy`, `direct_url` around it to the same place."""

    proxy: TcpProxy
    url: str
    direct_url: str


@pytest.fixture
async def postgres_proxy(
    postgres_server: servers.PostgresServer, postgres_schema: str
) -> AsyncIterator[PostgresProxy]:
    """A TCP proxy in front of the real Postgres."""
    async with TcpProxy(postgres_server.host, postgres_server.port) as proxy:
        url = postgres_server.url(postgres_schema, host=proxy.host, port=proxy.port)
        yield PostgresProxy(proxy, url, postgres_server.url(postgres_schema))


def _s3_param(label: str) -> Any:
    """A simulation is for the long run where a real server is."""
    simulated = not servers.is_real(label) and len(S3_LABELS) > 1
    return pytest.param(label, marks=pytest.mark.long) if simulated else label


@pytest.fixture(scope="session", params=map(_s3_param, S3_LABELS))
def s3_server(request: pytest.FixtureRequest, _s3_pool: dict[str, servers.S3Server]) -> servers.S3Server:
    """Each S3 server that is there."""
    return _s3_pool[request.param]


@pytest.fixture
def s3_url(s3_server: servers.S3Server) -> str:
    """A blob URL of an empty place in each S3 server that is there."""
    return _s3_place(s3_server)


@pytest.fixture
def best_s3_url(_s3_pool: dict[str, servers.S3Server]) -> str:
    """A blob URL of an empty place in the best S3 server that is there."""
    return _s3_place(_s3_pool[S3_LABELS[0]])


@pytest.fixture(scope="session")
def azure_server() -> Iterator[azure.AzureServer]:
    """The run's own azurite, started when a test first needs it."""
    if azure.azurite_path() is None and os.environ.get("AIOPERSIST_TEST_REQUIRE_AZURITE") != "1":
        pytest.skip("azurite is not on this machine")
    with azure.azure_server() as server:
        yield server


@pytest.fixture
def azure_url(azure_server: azure.AzureServer) -> str:
    """The URL of an empty place in Azure's protocol."""
    return azure_server.url(f"t-{uuid.uuid4().hex[:16]}")


@pytest.fixture(params=LOCATIONS)
def location(request: pytest.FixtureRequest, tmp_path: Path) -> StoreUrls:
    """An empty location of each kind. With S3 it is the best server that is there."""
    return _location(request, tmp_path)


@pytest.fixture(params=ELSEWHERE)
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> StoreUrls:
    """An empty location, in memory; in the long run one of each kind."""
    return _location(request, tmp_path)


def _location(request: pytest.FixtureRequest, tmp_path: Path) -> StoreUrls:
    kind = request.param
    if kind == "mem":
        url = f"mem://{uuid.uuid4().hex}"
        return StoreUrls(url, url)
    if kind in ("bucket", "azure"):
        from tests.support.location import both_in_a_bucket  # this file is also used apart from the others

        place = request.getfixturevalue("best_s3_url" if kind == "bucket" else "azure_url")
        return StoreUrls(*both_in_a_bucket(place, request.node))
    blob = request.getfixturevalue("best_s3_url") if "s3" in kind else f"file://{tmp_path / 'blob'}"
    if "sqlite" in kind:
        return StoreUrls(blob, f"sqlite://{tmp_path / 'state.db'}")
    return StoreUrls(blob, request.getfixturevalue("postgres_url"))


@pytest.fixture
async def quiet(elsewhere: StoreUrls) -> AsyncIterator[ap.Client]:
    async with ap.open(blob=elsewhere.blob, consensus=elsewhere.consensus, maintenance=False) as client:
        yield client


@pytest.fixture
async def quiet_mem() -> AsyncIterator[ap.Client]:
    async with ap.open("mem://", maintenance=False) as client:
        yield client


@pytest.fixture
async def place() -> AsyncIterator[Any]:
    """A location in memory whose clients are like processes of their own."""
    from tests.support.processes import place_in_memory  # this file is also used apart from the others

    async with place_in_memory(watch_timeout_s=0.02) as place:
        yield place


@pytest.fixture(scope="module")
def started_postgres(postgres_server: servers.PostgresServer) -> servers.PostgresServer:
    """Postgres, started before any loop is watched."""
    return postgres_server


@pytest.fixture
async def mem() -> AsyncIterator[ap.Client]:
    async with ap.open("mem://") as client:
        yield client


@pytest.fixture
async def client(location: Any) -> AsyncIterator[ap.Client]:
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        yield client


@pytest.fixture
def disk() -> Iterator[Any]:
    """A disk that fails when it is told to."""
    from tests.support.failing_disk import FailingDisk  # this file is also used apart from the others

    with FailingDisk.get().installed() as disk:
        yield disk


class _S3Pool(dict[str, servers.S3Server]):
    """Servers by label, each started when it is first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._running = servers.ExitStack()

    def __missing__(self, label: str) -> servers.S3Server:
        self[label] = self._running.enter_context(servers.s3_server(label))
        return self[label]

    def close(self) -> None:
        self._running.close()


@pytest.fixture(scope="session")
def _s3_pool() -> Iterator[dict[str, servers.S3Server]]:
    pool = _S3Pool()
    yield pool
    pool.close()


def _s3_place(server: servers.S3Server) -> str:
    _s3_used[server.label] += 1
    return server.url(f"t-{uuid.uuid4().hex[:16]}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
async def _watched_loop() -> AsyncIterator[LoopWatch]:
    async with LoopWatch() as watch:
        yield watch


@pytest.fixture(autouse=True)
def _nothing_blocks_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails an async test in which the loop stood still. A test that has to block it says so:
    `@pytest.mark.blocks_loop`."""
    function = getattr(request, "function", None)
    if not inspect.iscoroutinefunction(function) or request.node.get_closest_marker("blocks_loop"):
        yield
        return
    watch = request.getfixturevalue("_watched_loop")
    yield
    if watch.blocked_at is not None:
        pytest.fail(watch.told(), pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first test with a loop: the one that needs a heavy module would block it."""
    if not inspect.iscoroutinefunction(getattr(item, "obj", None)) or set(HEAVY.split()) <= set(sys.modules):
        return
    for name in HEAVY.split():
        importlib.import_module(name)
    importlib.import_module("polars").DataFrame({"a": [[1]]}).sort("a")  # its threads start with it
    keep_for_good()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    if "AIOPERSIST_TEST_PLANTED" in os.environ:
        importlib.import_module("tests.worlds.planted.search").plant_asked_for()
    keep_for_good()


def keep_for_good() -> None:
    """Tests and modules stay; to look through them for garbage takes a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # one of several processes: the first one sums up
        output["s3_used"] = dict(_s3_used)
        return
    demanded = os.environ.get("AIOPERSIST_TEST_REQUIRE_REAL_S3") == "1"
    if demanded and not any(servers.is_real(label) for label in _s3_used):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of several processes is done."""
    _s3_used.update(getattr(node, "workeroutput", {}).get("s3_used", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Last, so that it stands among the closing lines."""
    if not _s3_used:
        if os.environ.get("AIOPERSIST_TEST_REQUIRE_REAL_S3") == "1":
            terminalreporter.write_line(
                "S3: NO TEST RAN, but a real server was demanded", red=True, bold=True
            )
        return
    tested = ", ".join(f"{label} ({count} tests)" for label, count in sorted(_s3_used.items()))
    terminalreporter.write_line(f"S3 servers tested: {tested}", bold=True)
    if not any(servers.is_real(label) for label in _s3_used):
        terminalreporter.write_line(
            "!!! NO REAL S3 SERVER WAS TESTED, only a simulation. Put versitygw on the PATH "
            "(go install github.com/versity/versitygw/cmd/versitygw@latest), or set "
            "AIOPERSIST_TEST_S3_ENDPOINT. !!!",
            red=True,
            bold=True,
        )
