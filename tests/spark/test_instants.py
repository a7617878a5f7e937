"""Goal: on a wall clock Spark takes instants for times, by options and by calls; what it writes comes now."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.spark import connect, register
from aiopersist.spark.options import Options, instant
from tests.spark.format_kit import reading
from tests.spark.plain_client import at, counted
from tests.spark.schemas import PLAIN


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2026-05-01T12:00:00+02:00", datetime(2026, 5, 1, 10, tzinfo=UTC)),
        (" 2026-05-01T10:00:00.000001Z ", datetime(2026, 5, 1, 10, 0, 0, 1, tzinfo=UTC)),
        ("2026-05-01", datetime(2026, 5, 1)),
        ("20260501", None),
        ("now", None),
        ("", None),
    ],
)
def test_timestamps(text: str, found: datetime | None) -> None:
    pytest.importorskip("pyspark")
    from aiopersist.spark.streams import _start_of

    assert instant(text) == found
    if found is not None:
        assert _start_of(Options({"startingTime": text})) == found
        assert Options({"asOf": text}).time("asof") == found


def test_a_wall_clock_in_spark(spark: Any, tmp_path: Any) -> None:
    """Goal: rows that Spark appends are not there before; the same by options, `snapshot_df` and
    `changes_df`."""
    place = str(tmp_path / "shards")

    async def make(client: ap.Client) -> int:
        async with client.writer("w", PLAIN, clock="wall") as writer:
            return await writer.write([("a", 1)])

    first = at(place, make)
    register(spark)
    before = datetime.now(UTC)
    with connect(spark, place) as sc:
        rows = spark.createDataFrame([("b", 2)], "key string, val long")
        time = sc.write_df(rows, "w")
        assert first < (before - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) <= time
        after = datetime.now(UTC)
        both, old = Counter([("a", 1), ("b", 2)]), Counter([("a", 1)])
        assert counted(sc.snapshot_df("w", before)) == old
        assert counted(sc.snapshot_df("w", after)) == both
        assert counted(sc.changes_df("w", before, after)) == Counter([("b", 2, time, 1)])
        with pytest.raises(ap.InvalidUsage, match="naive"):
            sc.snapshot_df("w", datetime(2026, 5, 1))
    assert counted(reading(spark, place, asOf=before.isoformat()).load("w")) == old
    changed = reading(spark, place, startingTime=before.isoformat(), endingTime=after.isoformat())
    assert counted(changed.load("w")) == Counter([("b", 2, time, 1)])
