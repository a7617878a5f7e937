"""Goal: on a real cluster, attempts that lose a race of speculation, and lost executors, do no harm: no
update is lost or doubled, and their leftovers are reclaimed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark import cluster as clusters
from tests.spark.cluster import SHARD, SINK, Cluster, some_rows
from tests.spark.conftest import need_spark
from tests.spark.faults import audit, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ONE_WRITE = ("read", "format read", "stream")
LOSERS = ["the first loses", "the second loses"]
LOST = ["the executor dies", "the worker dies"]
CASES = [
    *((job, fault) for job in ("write", "format", "compact", "upsert", "read") for fault in LOSERS),
    *((job, fault) for job in ("write", "read") for fault in LOST),
    ("compact", LOST[0]),
    ("format", LOST[0]),
    ("format read", LOSERS[0]),
    ("format read", LOST[0]),
    ("stream", LOSERS[0]),
    ("stream", LOST[0]),
]


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For faults that it survives."""
    need_spark()
    with clusters.running(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def cluster(request: pytest.FixtureRequest, fault: str, tmp_path: Path) -> Iterator[Cluster]:
    if fault == LOST[1]:
        need_spark()
        (tmp_path / "cluster").mkdir()
        with clusters.running(tmp_path / "cluster") as found:
            yield found
    else:
        found = request.getfixturevalue("shared_cluster")
        yield found
    print(found.log.read_text(errors="replace")[-8000:])


@pytest.mark.parametrize(("job", "fault"), CASES)
def test_a_fault(cluster: Cluster, place: str, tmp_path: Path, job: str, fault: str) -> None:
    """Goal: see the header."""
    folder = tmp_path / "marks"
    folder.mkdir()
    told: dict[str, Any] = {"job": job, "fault": fault, "place": place, "folder": str(folder)}
    with cluster.driver(**told, settings={}) as driver:
        if fault == LOST[1]:
            until(lambda: (folder / "dying").exists() or driver.poll() is not None, "the victim")
            victim = int((folder / "dying").read_text())
            work = os.readlink(f"/proc/{victim}/cwd")
            number = next(n for n in range(2) if f"work{n}" in work)
            os.killpg(cluster.workers[number].pid, signal.SIGKILL)
        assert driver.wait(240) == 0
    assert (folder / "done").exists()
    assert not (folder / "in vain").exists()
    assert (folder / "second").exists() or fault not in LOSERS
    expected = some_rows(1) if job in ONE_WRITE else some_rows(1) + some_rows(2)
    swept = audit(place, SINK, expected) if job == "stream" else 0  # of the whole place
    swept += audit(place, SHARD, expected)
    assert swept > 0 or job in ("read", "format read")
