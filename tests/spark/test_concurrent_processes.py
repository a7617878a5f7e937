"""Goal: DataFrames agree with the model at their time, however often and late they are evaluated, while
other processes append, forget history, compact and collect garbage; and a read whose lease ran out fails
and says so."""

import time
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.errors import LeaseExpired, SinceViolation
from tests.spark.faults import FORMAT, audit, until
from tests.spark.other_processes import SCHEMA, TINY, append, changes_at, model, running, tend
from tests.spark.plain_client import at, rows_of, upper
from tests.support.internals import shards_of

ROUNDS = 3


@pytest.fixture
def started(place: str, name: str) -> None:
    """Some history."""

    async def begin(client: ap.Client) -> None:
        for _ in range(60):
            await append(client, name)

    at(place, begin, **TINY)


def time_of(found: list[Any]) -> int:
    """Of contents: the newest value says it."""
    return max(val for _, val in found)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("started")
@pytest.mark.long
def test_reads_beside_others(spark: Any, sc: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: contents and changes, by the engine and the format: each is of one time, and stays so."""
    folder = tmp_path / "others"
    folder.mkdir()
    kept: list[tuple[Any, list[Any]]] = []

    def format_df(*_: Any) -> Any:
        return spark.read.format(FORMAT).options(location=place, lease_s=600, parallelism=3).load(name)

    with running(place, name, folder) as others:
        for _ in range(ROUNDS):
            for make in (sc.snapshot_df, format_df):
                df = make(name)
                found = rows_of(df)
                assert found == model(time_of(found))
                kept.append((df, found))
            as_of = upper(place, name).time - 1
            try:
                kept.append((sc.snapshot_df(name, as_of), model(as_of)))
                kept.append(
                    (sc.changes_df(name, as_of, as_of + 2), sorted(changes_at(as_of) + changes_at(as_of + 1)))
                )
            except SinceViolation:  # they were quicker
                pass
            before = others.rounds()
            until(
                lambda before=before: all(n > before[work] + 2 for work, n in others.rounds().items()),
                "another round of the others",
            )
        assert len(kept) > 2 * ROUNDS
        for df, expected in kept:
            assert rows_of(df) == expected
    for df, expected in kept:
        assert rows_of(df) == expected
    sc.close()
    audit(place, name, model(upper(place, name).time - 1))


async def readers(client: Any, name: str) -> set[str]:
    """The live leases, except that of this look."""
    async with client.writer(name, SCHEMA):  # a commit
        pass
    return set((await shards_of(client).existing(name)).state.readers)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("started")
@pytest.mark.long
def test_a_lease_without_its_planner(spark: Any, place: str, name: str) -> None:
    """Goal: the process that planned is gone, and tasks alone renew its short lease: reads go on well beyond
    it."""
    lease_s = 15.0
    options = {"location": place, "lease_s": lease_s, "parallelism": 2}
    before = at(place, readers, name, **TINY)
    df = spark.read.format(FORMAT).options(**options).load(name)
    expected = rows_of(df)
    assert expected == model(59)
    mine = at(place, readers, name, **TINY) - before
    assert len(mine) >= 1
    at(place, append, name, **TINY)
    at(place, tend, name, **TINY)
    end = time.monotonic() + 1.5 * lease_s
    while time.monotonic() < end:
        assert rows_of(df) == expected
        at(place, readers, name, **TINY)  # a commit, which would end what is overdue
    assert at(place, readers, name, **TINY) & mine


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("started")
@pytest.mark.long
def test_a_lease_that_ran_out(spark: Any, place: str, name: str) -> None:
    """Goal: no task has read for the length of the lease, and the planned parts are gone: the read fails, and
    says why."""
    before = at(place, readers, name, **TINY)
    df = spark.read.format(FORMAT).options(location=place, lease_s=2.0, parallelism=1).load(name)
    df._jdf.queryExecution().executedPlan().execute().getNumPartitions()  # planned
    until(lambda: not at(place, readers, name, **TINY) - before, "the end of the lease")
    at(place, append, name, **TINY)
    at(place, tend, name, **TINY)
    with pytest.raises(Exception, match=LeaseExpired.__name__):
        rows_of(df)
