"""Goal: a streaming query reads every change once, in batches that end between times, and writes each of
its batches once, across restarts; a query that cannot be resumed says so, and skips nothing."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from tests.spark.faults import until
from tests.spark.plain_client import Row, at
from tests.spark.schemas import PLAIN
from tests.spark.streams_kit import (
    _registered,  # noqa: F401  # a fixture
    append,
    drained,
    history,
    move_since,
    rows,
    stream,
)

pytestmark = pytest.mark.timeout(300)


STARTS: dict[str, tuple[dict[str, Any], Counter[Row], list[set[int]]]] = {
    "snapshot": ({"startingTime": "snapshot"}, rows(history(4)), [{3}]),
    "earliest": ({"startingTime": "earliest"}, rows(history(4)), [{0, 1, 2, 3}]),
    "a time": ({"startingTime": 2}, rows(history(4)[2:], 2), [{2, 3}]),
    "rows": ({"startingTime": 0, "max_rows_per_trigger": 7}, rows(history(4)), [{0, 1}, {2, 3}]),
    "few rows": ({"startingTime": 0, "maxRowsPerTrigger": 1}, rows(history(4)), [{0}, {1}, {2}, {3}]),
    "few bytes": ({"startingTime": 0, "max_bytes_per_trigger": 1}, rows(history(4)), [{0}, {1}, {2}, {3}]),
    "latest": ({"startingTime": "latest"}, Counter(), []),
    "where": (
        {"startingTime": 1, "where": "val >= 2 or key in ('k0-0', 'late')"},
        rows(history(4)[2:], 2),
        [{2, 3}],
    ),
}


async def leases(client: ap.Client, name: str) -> list[str]:
    """After a commit, which ends what is overdue."""
    async with client.writer(name, PLAIN):
        pass
    return list((await client.admin.inspect(name)).readers)


def refused(df: Any, checkpoint: Path) -> None:
    """A restart whose history is gone."""
    from pyspark.errors import StreamingQueryException

    with pytest.raises(StreamingQueryException) as found:
        drained(df, checkpoint)
    for said in ("SinceViolation", "hold_name", "new checkpoint"):
        assert said in str(found.value)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown option": ({"as_of": 1}, "unknown option 'asof'"),
    "no start": ({"startingTime": "now"}, "neither a time nor one of"),
    "two limits": ({"max_rows_per_trigger": 1, "max_bytes_per_trigger": 1}, "not both"),
    "no limit": ({"max_rows_per_trigger": 0}, "at least 1"),
    "no condition": ({"where": "val >"}, "expected a column or a value"),
    "expand": ({"startingTime": 0, "expand": "x"}, "neither true nor false"),
}


@pytest.mark.parametrize(
    ("options", "wanted", "cuts"),
    [
        pytest.param(
            *case,
            id=n,
            marks=[] if n == "snapshot" else [pytest.mark.long],
        )
        for n, case in STARTS.items()
    ],
)
def test_available_now(
    spark: Any,
    place: str,
    name: str,
    tmp_path: Path,
    options: Any,
    wanted: Counter[Row],
    cuts: list[set[int]],
) -> None:
    """Goal: all that is there when the run begins, once, cut only between times; and a second run over the
    same checkpoint takes what came since."""
    append(place, name, history(4), 0)
    df = stream(spark, place, name, **options)
    found = drained(df, tmp_path / "c")
    if options["startingTime"] == "snapshot":  # contents, at the time that they are as of
        wanted = Counter((key, val, 3, 1) for key, val, _, _ in wanted)
    assert found.all == wanted
    assert found.times == cuts
    append(place, name, [[("late", 1, 1), ("k0-0", 0, -1)], []], 4)
    again = drained(df, tmp_path / "c")
    assert again.all == Counter([("late", 1, 4, 1), ("k0-0", 0, 4, -1)])
    assert drained(df, tmp_path / "c").all == Counter()


def test_a_large_append_is_cut_between_times(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: one append of many times is shared out over batches; none of its times is."""
    updates_ = [(f"k{n}", n, n // 5, 1) for n in range(100)]  # 5 at each of 20 times

    async def fill(client: ap.Client) -> None:
        async with client.writer(name, PLAIN) as writer:
            await writer.compare_and_append(updates_, 0, 20)

    at(place, fill)
    found = drained(stream(spark, place, name, startingTime=0, maxRowsPerTrigger=30), tmp_path / "c")
    assert found.all == Counter(updates_)
    assert 3 <= len(found.times) <= 6
    assert sum(map(len, found.times)) == 20, "a time is in two batches"


@pytest.mark.long
def test_a_finished_shard(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    append(place, name, history(2), 0, finish=True)
    df = stream(spark, place, name, startingTime=0)
    assert drained(df, tmp_path / "c").all == rows(history(2))
    assert drained(df, tmp_path / "c").all == Counter()


@pytest.mark.long
def test_an_empty_shard_and_expanded_rows(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: nothing, then the snapshot as rows without times, repeated, then new rows."""
    append(place, name, [], 0)
    df = stream(spark, place, name)
    assert df.columns == ["key", "val"]
    assert drained(df, tmp_path / "c").all == Counter()
    append(place, name, [[("a", 1, 2)], [("a", 1, -1)]], 0)
    assert drained(df, tmp_path / "c").all == Counter([("a", 1)])
    append(place, name, [[("b", 1, 2)]], 2)
    assert drained(df, tmp_path / "c").all == Counter([("b", 1), ("b", 1)])


def test_a_restart_with_a_named_hold(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: while the query is away others may compact: what it has not read is kept; once its lease has
    expired and since moved on, a restart fails, says what to do, and gives nothing."""
    append(place, name, history(3), 0)
    move_since(place, name, 0)
    df = stream(spark, place, name, startingTime=0, hold_name="nightly", lease_s=3600)
    assert drained(df, tmp_path / "c").all == rows(history(3))
    append(place, name, [[("x", 1, 1)], [("x", 1, -1)]], 3)
    move_since(place, name, 5)
    since = at(place, lambda client: client.admin.inspect(name)).since.time
    assert isinstance(since, int) and since <= 2, "the hold keeps what a restart needs"
    assert drained(df, tmp_path / "c").all == Counter([("x", 1, 3, 1), ("x", 1, 4, -1)])

    async def expire(client: ap.Client) -> None:
        async with client.reader(name, hold_name="nightly") as reader:
            await reader.release()

    append(place, name, [[("y", 1, 1)], [("y", 2, 1)]], 5)
    at(place, expire)
    move_since(place, name, 7)
    assert at(place, lambda client: client.admin.inspect(name)).since == ap.Antichain(7)
    refused(df, tmp_path / "c")


@pytest.mark.long
def test_a_hold_that_expires(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: the same when no run ends the hold, and the query was away for longer than its lease."""
    append(place, name, history(3), 0)
    move_since(place, name, 0)
    df = stream(spark, place, name, startingTime=0, hold_name="nightly", lease_s=3)
    assert drained(df, tmp_path / "c").all == rows(history(3))
    append(place, name, [[("x", 1, 1)], [("x", 1, -1)]], 3)
    until(lambda: "name:nightly" not in at(place, lambda client: leases(client, name)), "the end of the hold")
    move_since(place, name, 5)
    refused(df, tmp_path / "c")
    fresh = stream(spark, place, name)
    assert not drained(fresh, tmp_path / "new").all  # since is at the upper: nothing is readable yet
    append(place, name, [[]], 5)
    assert drained(fresh, tmp_path / "new").all == Counter((key, val) for key, val, _, _ in rows(history(3)))


@pytest.mark.long
@pytest.mark.parametrize(("options", "said"), BAD.values(), ids=BAD)
def test_streams_that_cannot_be(
    spark: Any, place: str, name: str, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    from pyspark.errors import PySparkException

    append(place, name, history(1), 0)
    with pytest.raises(PySparkException, match=said):
        drained(stream(spark, place, name, **options), tmp_path / "c")


def test_product_times_are_refused(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    at(place, lambda client: client.writer(name, ap.Schema(str, int, time=2)).__aenter__())
    with pytest.raises(PySparkException, match="product times"):
        drained(stream(spark, place, name), tmp_path / "c")
