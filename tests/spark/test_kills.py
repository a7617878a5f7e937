"""Goal: a driver that is killed at any moment, with its JVM, leaves a shard in which no update is lost or
doubled once the same work was repeated; its uploads are reclaimed when its writers' leases have run out."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from aiopersist.spark import connect
from tests.spark import driver
from tests.spark.driver import KILLED, SINK, SOURCE, some_rows
from tests.spark.faults import FORMAT, Rows, audit, contents, contents_now, opened

pytestmark = pytest.mark.timeout(600)

UPLOADED = {"engine": "job.commit begins", "format": "writer.commit begins"}
COMMITTED = {"engine": "job.commit ends", "format": "writer.commit ends"}
long = pytest.mark.long


@pytest.fixture
def log(tmp_path: Path) -> Any:
    """What drivers say, shown if the test fails."""
    path = tmp_path / "driver.log"
    yield path
    if path.exists():
        print(path.read_text(errors="replace")[-6000:])


@pytest.mark.parametrize(
    ("job", "committed"),
    [
        pytest.param("engine", False, marks=long),
        pytest.param("engine", True, marks=long),
        pytest.param("format", False, marks=long),
        pytest.param("format", True, marks=long),
    ],
)
def test_a_batch_job(spark: Any, place: str, tmp_path: Path, log: Path, job: str, committed: bool) -> None:
    """Goal: killed between upload and commit, nothing is there; after it, all of it; the same transaction
    again, by another driver, makes it exactly once in both cases."""
    moment = (COMMITTED if committed else UPLOADED)[job]
    told = {"job": job, "place": place, "folder": str(tmp_path), "versions": [1, 2]}
    assert driver.run(log, **told, kill=moment, at=2) == KILLED
    first, second = (Counter(some_rows(version)) for version in (1, 2))
    assert contents_now(place, SINK) == (first + second if committed else first)
    df = spark.createDataFrame(some_rows(2), driver.COLUMNS)
    for again in (df, df.repartition(3)):
        if job == "engine":
            with connect(spark, place) as sc:
                assert sc.write_df(again, SINK, txn=(driver.APP, 2)) == 1
        else:
            options = {"location": place, "txnAppId": driver.APP, "txnVersion": 2}
            again.write.format(FORMAT).mode("append").options(**options).save(SINK)
    swept = audit(place, SINK, (first + second).elements())
    assert swept > 0 or committed


# --- streams ------------------------------------------------------------------------------------------

STAGES = {
    "source": [
        ("streamReader.initialOffset ends", 1),
        ("streamReader.prepareForTriggerAvailableNow ends", 1),
        ("streamReader.latestOffset begins", 1),
        ("streamReader.partitions begins", 1),
        ("streamReader.partitions ends", 2),
        ("read", 1),
        ("streamReader.commit begins", 1),
        ("streamReader.commit ends", 1),
        ("streamReader.latestOffset ends", 3),
    ],
    "sink": [
        ("streamWriter.__getstate__ ends", 1),
        ("streamWriter.write begins", 1),
        ("streamWriter.write ends", 1),
        ("streamWriter.commit begins", 2),
        ("streamWriter.commit ends", 1),
        ("streamWriter.commit ends", 2),
    ],
    "foreach": [
        ("batch begins", 1),
        ("job.commit begins", 1),
        ("job.commit ends", 1),
        ("batch ends", 1),
        ("job.commit ends", 2),
        ("batch ends", 2),
    ],
}


class Source:
    """The shard that is streamed, and what is in it at each time."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.history: list[Rows] = [Counter()]

    def append(self, times: int) -> None:
        """Each time some rows come, and some go."""
        asyncio.run(self._append(times))

    async def _append(self, times: int) -> None:
        async with opened(self.place) as client:
            _, schema = await client.schema(SOURCE)
            async with client.writer(SOURCE, schema) as writer:
                for _ in range(times):
                    time, now = writer.upper.time, self.history[-1]
                    gone = sorted(now)[time % 3 :: 7][:5]
                    came = [(time * 1000 + i, f"of {time}") for i in range(20)]
                    updates = [({"id": i}, {"name": n}, time, 1) for i, n in came]
                    updates += [({"id": i}, {"name": n}, time, -1) for i, n in gone]
                    await writer.compare_and_append(updates, time, time + 1)
                    self.history.append(now + Counter(came) - Counter(gone))


@pytest.fixture
def source(spark: Any, place: str) -> Source:
    with connect(spark, place) as sc:
        sc.write_df(spark.createDataFrame([], driver.COLUMNS), SOURCE, keys=["id"])
    found = Source(place)
    found.history.append(Counter())
    found.append(3)
    return found


def batches(checkpoint: Path) -> list[Path]:
    """What Spark has committed."""
    return sorted((p for p in (checkpoint / "commits").glob("[0-9]*")), key=lambda p: int(p.name))


@long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("job", "part"), [("stream", "source"), ("stream", "sink"), ("foreach", "foreach")])
def test_a_query_killed_at_every_stage(
    source: Source, place: str, tmp_path: Path, log: Path, job: str, part: str
) -> None:
    """Goal: one query, killed at one stage after the other and restarted with its checkpoint, while the
    source goes on. The sink is at every moment what the source was at some time, never goes back, and
    ends as the source does."""
    checkpoint = tmp_path / "checkpoint"
    reached = 0
    for number, (stage, at) in enumerate(STAGES[part]):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        told = {"job": job, "place": place, "folder": str(folder), "checkpoint": str(checkpoint)}
        assert driver.run(log, **told, kill=stage, at=at) == KILLED, stage
        now = contents_now(place, SINK)
        assert now in source.history[reached:], stage
        reached = source.history.index(now, reached)
        source.append(2)
    assert driver.run(log, **told) == 0
    assert contents_now(place, SINK) == source.history[-1]
    audit(place, SINK, source.history[-1].elements())
    audit(place, SOURCE, source.history[-1].elements())


@long
@pytest.mark.parametrize("job", ["stream", "foreach"])
def test_a_lost_entry_of_the_commit_log(
    source: Source, place: str, tmp_path: Path, log: Path, job: str
) -> None:
    """Goal: what a kill after the sink's commit and before Spark's own leaves: the batch runs again with the
    same offsets and writes nothing, whatever the source did meanwhile."""
    checkpoint = tmp_path / "checkpoint"
    told = {"job": job, "place": place, "folder": str(tmp_path), "checkpoint": str(checkpoint)}
    for _ in range(2):
        assert driver.run(log, **told) == 0
        assert contents_now(place, SINK) == source.history[-1]
        last = batches(checkpoint)[-1]
        json.loads(last.read_text().splitlines()[-1])
        last.unlink()
        (checkpoint / "commits" / f".{last.name}.crc").unlink(missing_ok=True)
        source.append(2)
        maintenance(place)
    assert driver.run(log, **told) == 0
    assert contents_now(place, SINK) == source.history[-1]
    audit(place, SINK, source.history[-1].elements())


def maintenance(place: str) -> None:
    """What others do to the source while the query is away."""

    async def compact() -> None:
        async with opened(place) as client:
            await client.admin.force_compaction(SOURCE)
            await client.admin.force_gc(SOURCE)
            assert await contents(client, SOURCE)

    asyncio.run(compact())
