"""Fixtures for tests of applications, in every run of pytest where aiopersist is installed.

Everybody's runs import this module. So it lies outside of the package, imports pytest alone, which is there,
and nothing in it may fail before a test asks for a fixture: whatever versions of other plugins are there.

Fixtures that wait are run by whoever runs the test: pytest-asyncio, whose strict mode takes only those that
its own decorator made, each for one scope of loops; or anyio's plugin, which takes plain ones. So each of
ours is made several times, and a fixture that does not wait picks the one that fits the test. Those for
pytest-asyncio are made as a run begins, since it looks for them while tests are collected; those for anyio
when a test asks: older versions of pytest-asyncio would take them for theirs.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import aiopersist as ap
    from aiopersist.testing.application import FaultyClient, MovedClock

PYTEST_ASYNCIO = ("asyncio", "pytest_asyncio.plugin", "pytest_asyncio")  # found by itself; by `-p`
ASYNCIO_MIN = (0, 26)  # the first version whose settings tell the loop of a test
LOOP_SCOPES = ("function", "class", "module", "package", "session")
ASYNCIO, ANYIO = "pytest_aiopersist_asyncio", "pytest_aiopersist_anyio"  # our fixtures for each, as plugins
GIVE_UP_S = 1.0  # a store that is out fails a call then, where the library's own default is never


@pytest.fixture
def aiopersist_settings() -> ap.Settings:
    """The settings of the clients below: define a fixture of this name to change them."""
    import aiopersist as ap

    return ap.Settings(retry_timeout_s=GIVE_UP_S)


@pytest.fixture
def aiopersist_clock() -> MovedClock:
    """A clock that the test moves, `aiopersist_clock.move(seconds)`. The clients below then have it."""
    from aiopersist.testing.application import MovedClock

    return MovedClock()


@pytest.fixture
def aiopersist_location(tmp_path: Path) -> Path:
    """An empty directory for `ap.open`, the application, or the command line."""
    directory = tmp_path / "aiopersist"
    directory.mkdir()
    return directory


@pytest.fixture
def aiopersist_client(request: pytest.FixtureRequest) -> ap.Client:
    """A client of a fresh location in memory, which is closed after the test."""
    client: ap.Client = request.getfixturevalue(_name("client", request))
    return client


@pytest.fixture
def aiopersist_faults(request: pytest.FixtureRequest) -> FaultyClient:
    """A client whose stores refuse, lose answers and delay as they are told: `aiopersist_faults.client`, and
    `.blob` and `.consensus`, which are told."""
    faulty: FaultyClient = request.getfixturevalue(_name("faults", request))
    return faulty


@pytest.fixture
def _aiopersist_runtime(request: pytest.FixtureRequest) -> Any:
    """The clock of the test, if it has one."""
    if "aiopersist_clock" in request.fixturenames:
        return request.getfixturevalue("aiopersist_clock")
    from aiopersist.base.runtime import SYSTEM

    return SYSTEM


def _client(settings: ap.Settings, runtime: Any) -> AbstractAsyncContextManager[ap.Client]:
    import aiopersist as ap

    return ap.open("mem://", settings=settings, runtime=runtime)


def _faults(settings: ap.Settings, runtime: Any) -> AbstractAsyncContextManager[FaultyClient]:
    from aiopersist.testing.application import open_faulty

    return open_faulty(settings, runtime)


def _name(what: str, request: pytest.FixtureRequest) -> str:
    """The fixture of `what` for whoever runs the test."""
    config = request.config
    mark = request.node.get_closest_marker("asyncio")
    if mark is None and "anyio_backend" in request.fixturenames:
        backend = request.getfixturevalue("anyio_backend")
        if "asyncio" not in (backend, backend[0]):
            pytest.skip("aiopersist runs on asyncio only: let the fixture anyio_backend return 'asyncio'")
        if not config.pluginmanager.has_plugin(ANYIO):
            config.pluginmanager.register(_fixtures(ANYIO, {"anyio": pytest.fixture}), ANYIO)
        return f"_aiopersist_{what}_of_anyio"
    if not config.pluginmanager.has_plugin(ASYNCIO):
        pytest.fail(f"aiopersist_{what} needs {_missing(config)}", pytrace=False)
    asked = mark.kwargs if mark is not None else {}
    scope = asked.get("loop_scope") or asked.get("scope")
    return f"_aiopersist_{what}_of_{scope or config.getini('asyncio_default_test_loop_scope')}"


def _missing(config: pytest.Config) -> str:
    """What a test lacks that nobody runs who is known here."""
    rest = "mark the test with pytest.mark.anyio; a test that does not wait may take aiopersist_location"
    if _plugin(config) is None:
        return f"a test that pytest-asyncio or anyio runs: install pytest-asyncio, or {rest}"
    least, found = ".".join(map(str, ASYNCIO_MIN)), getattr(sys.modules["pytest_asyncio"], "__version__", "?")
    return f"pytest-asyncio {least} or newer, here is {found}: upgrade it, or {rest}"


def _plugin(config: pytest.Config) -> Any:
    """The plugin of pytest-asyncio; `None` if it is not loaded."""
    found = filter(None, map(config.pluginmanager.get_plugin, PYTEST_ASYNCIO))
    return next(found, None)


def _version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version; none of what is no version."""
    numbers = text.split(".")[:2]
    return tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else ()


def pytest_configure(config: pytest.Config) -> None:
    """Make the fixtures for pytest-asyncio, if it is loaded, and new enough. It is imported by then."""
    plugin = _plugin(config)
    version = getattr(sys.modules.get("pytest_asyncio"), "__version__", "")
    if plugin is not None and _version(version) >= ASYNCIO_MIN:
        made = {scope: partial(plugin.fixture, loop_scope=scope) for scope in LOOP_SCOPES}
        config.pluginmanager.register(_fixtures(ASYNCIO, made), ASYNCIO)


def _fixtures(name: str, made: Mapping[str, Callable[..., Any]]) -> ModuleType:
    """A plugin with fixtures of a client and of faults, made by each of `made` under its name."""
    module = ModuleType(name)
    for what, opened in (("client", _client), ("faults", _faults)):
        for end, fixture in made.items():
            full = f"_aiopersist_{what}_of_{end}"
            setattr(module, full, fixture(name=full)(_opening(opened)))
    return module


def _opening(opened: Callable[..., AbstractAsyncContextManager[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def fixture(aiopersist_settings: ap.Settings, _aiopersist_runtime: Any) -> AsyncIterator[Any]:
        async with opened(aiopersist_settings, _aiopersist_runtime) as value:
            yield value

    return fixture
