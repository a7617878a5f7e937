"""The fixtures of every bench: an event loop, empty locations, and rounds in which contenders take turns.

Shared machines drift, so a figure is only compared with figures of the same run: each round runs
every contender once, and the medians over all rounds are held beside each other as ratios.
"""

import asyncio
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aiopersist.testing import servers

Work = Callable[[], Awaitable[object]]


class Place(NamedTuple):
    """Two stores' URLs."""

    blob: str
    consensus: str


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[servers.PostgresServer]:
    with servers.postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[servers.S3Server]:
    with servers.s3_server(servers.s3_labels()[0]) as server:
        yield server


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty location of the kind that the test is parametrised with, or of files and SQLite."""
    kind = getattr(request, "param", "files+sqlite")
    if kind == "mem":
        return Place(*[f"mem://{uuid.uuid4().hex}"] * 2)
    blob = f"file://{tmp_path / 'blob'}"
    if kind.startswith("s3"):
        blob = request.getfixturevalue("s3_server").url(f"b-{uuid.uuid4().hex[:12]}")
    if kind.endswith("sqlite"):
        return Place(blob, f"sqlite://{tmp_path / 'state.db'}")
    return Place(blob, request.getfixturevalue("postgres_server").url(f"b_{uuid.uuid4().hex[:12]}"))


@pytest.fixture
def run() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """Runs coroutines on one event loop for the whole test."""
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(_await(work))


@pytest.fixture
def enabled(request: pytest.FixtureRequest) -> bool:
    """Whether it is measured; as a test it is short."""
    return bool(request.config.getoption("benchmark_enable"))


async def _await(work: Awaitable[Any]) -> Any:
    return await work


@pytest.fixture
def rounds(benchmark: Any, run: Any, capsys: pytest.CaptureFixture[str], request: Any) -> Any:
    """`rounds(contenders, n)`: median seconds of each contender over `n` interleaved rounds, printed with
    their ratios to the first."""

    def measure(contenders: Mapping[str, Work], n: int, warmup: int = 3) -> dict[str, float]:
        seconds: dict[str, list[float]] = {name: [] for name in contenders}

        async def one_round() -> None:
            for name, work in contenders.items():
                began = time.perf_counter()
                await work()
                seconds[name].append(time.perf_counter() - began)

        benchmark.pedantic(lambda: run(one_round()), rounds=n, warmup_rounds=warmup)
        medians = {name: statistics.median(taken[-n:]) for name, taken in seconds.items()}
        first = next(iter(medians.values()))
        with capsys.disabled():
            print(f"\n{request.node.name}")
            for name, median in medians.items():
                print(f"  {name:<32} {median * 1e3:9.3f} ms   {median / first:6.2f} x")
        benchmark.extra_info.update({name: round(median * 1e6) for name, median in medians.items()})
        return medians

    return measure


def report(capsys: pytest.CaptureFixture[str], title: str, **figures: object) -> None:
    """Print figures that are not times of contenders."""
    with capsys.disabled():
        print(f"\n{title}")
        for name, value in figures.items():
            print(f"  {name:<32} {value}")
