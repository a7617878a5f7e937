"""Fixtures for tests of applications, in every run of pytest where aiopersist is installed.

Everybody's runs import this module. So it lies outside of the package, and imports nothing of it before a
test asks for a fixture.

Fixtures that wait are run by whoever runs the test: pytest-asyncio, whose strict mode takes only those that
its own decorator made, each for one scope of loops; or anyio's plugin, which takes plain ones. So each of
ours is made several times, and a fixture that does not wait picks the one that fits the test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

try:
    import pytest_asyncio
except ImportError:
    pytest_asyncio = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import aiopersist as ap
    from aiopersist.testing.application import FaultyClient, MovedClock

LOOP_SCOPES = ("function", "class", "module", "package", "session")
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
    from aiopersist.runtime import SYSTEM

    return SYSTEM


def _client(settings: ap.Settings, runtime: Any) -> AbstractAsyncContextManager[ap.Client]:
    import aiopersist as ap

    return ap.open("mem://", settings=settings, runtime=runtime)


def _faults(settings: ap.Settings, runtime: Any) -> AbstractAsyncContextManager[FaultyClient]:
    from aiopersist.testing.application import open_faulty

    return open_faulty(settings, runtime)


def _name(what: str, request: pytest.FixtureRequest) -> str:
    """The fixture of `what` for whoever runs the test."""
    mark = request.node.get_closest_marker("asyncio")
    if mark is None and "anyio_backend" in request.fixturenames:
        backend = request.getfixturevalue("anyio_backend")
        if "asyncio" not in (backend, backend[0]):
            pytest.skip("aiopersist runs on asyncio only: let the fixture anyio_backend return 'asyncio'")
        return f"_aiopersist_{what}_of_anyio"
    if pytest_asyncio is None or not request.config.pluginmanager.has_plugin("asyncio"):
        pytest.fail(
            f"aiopersist_{what} needs a test that pytest-asyncio or anyio runs: install pytest-asyncio, or "
            "mark the test with pytest.mark.anyio; a test that does not wait may take aiopersist_location",
            pytrace=False,
        )
    asked = mark.kwargs if mark is not None else {}
    scope = asked.get("loop_scope") or asked.get("scope")
    return f"_aiopersist_{what}_of_{scope or request.config.getini('asyncio_default_test_loop_scope')}"


def _fixture(
    name: str, opened: Callable[..., AbstractAsyncContextManager[Any]], made: Callable[..., Any], **how: Any
) -> None:
    async def fixture(aiopersist_settings: ap.Settings, _aiopersist_runtime: Any) -> AsyncIterator[Any]:
        async with opened(aiopersist_settings, _aiopersist_runtime) as value:
            yield value

    globals()[name] = made(name=name, **how)(fixture)


for _what, _opened in (("client", _client), ("faults", _faults)):
    _fixture(f"_aiopersist_{_what}_of_anyio", _opened, pytest.fixture)
    if pytest_asyncio is not None:
        for _scope in LOOP_SCOPES:
            _fixture(f"_aiopersist_{_what}_of_{_scope}", _opened, pytest_asyncio.fixture, loop_scope=_scope)
