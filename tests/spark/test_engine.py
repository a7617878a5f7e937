"""Goal: from the driver, DataFrames of a shard agree with a plain list of updates, at every time, after
writes of every kind; each write is one commit or none; errors are the library's own; and a driver that is
asyncio itself is never blocked."""

import random
from collections import Counter
from typing import Any

import pyarrow.compute as pc
import pytest

import aiopersist as ap
from aiopersist.spark import connect
from aiopersist.testing.model import Model
from tests.spark.engine_kit import appended
from tests.spark.plain_client import Row, at, counted, upper
from tests.spark.schemas import PLAIN

TINY: dict[str, Any] = {
    "inline_writes_single_max_bytes": 0,
    "blob_target_size": 4000,
    "row_group_bytes": 500,
}


class Table:
    """What the rows of a shard are, by definition: times and diffs of `(id, name, x)`, of which `id` is the
    key."""

    def __init__(self) -> None:
        self.model = Model()

    @property
    def upper(self) -> int:
        return int(self.model.upper[0])

    def contents(self, as_of: int) -> Counter[Row]:
        return Counter({(key, *val): diff for key, val, diff in self.model.contents(as_of)})

    def changes(self, start: int, end: int) -> Counter[Row]:
        found = self.model.changes(lower=[start], upper=[end])
        return Counter({(key, *val, at, diff): 1 for (key, val, at), diff in found.items()})

    def write(self, rows: list[Row], mode: str) -> None:
        """Rows `(id, name, x, diff)` at the upper."""
        now = self.upper
        updates = [(row[0], row[1:3], now, row[3]) for row in rows]
        ids = {row[0] for row in rows}
        if mode != "append" and now:
            updates += [
                (key, val, now, -diff)
                for key, val, diff in self.model.contents(now - 1)
                if mode == "overwrite" or key in ids
            ]
        self.model.append(updates, [now], [now + 1])


@pytest.mark.timeout(300)
def test_a_history_of_writes_is_what_the_model_says(spark: Any, place: str, name: str) -> None:
    """Goal: appends, upserts and overwrites, with diffs and without, in parts and inline, compacted or not:
    at every time the contents and the changes are those of the model."""
    rng, table = random.Random(7), Table()
    columns = "id long, name string, x double"

    def row(n: int) -> Row:
        return n, rng.choice(["a", "b", None]), rng.choice([0.5, float("inf"), None])

    with connect(spark, place, settings=ap.Settings(**TINY), maintenance=False) as sc:
        modes = ["append", "append", "upsert", "diffs", "overwrite", "upsert", "upsert"]
        for step, mode in enumerate(modes):
            if mode == "upsert":
                rows = [(*row(n), 1) for n in rng.sample(range(90), 40)]
            elif mode == "diffs":
                old = list(table.contents(table.upper - 1).items())
                rows = [(*r, -n) for r, n in rng.sample(old, 20)] + [(*row(200 + n), 3) for n in range(5)]
            else:
                rows = [(*row(rng.randrange(60)), 1) for _ in range(80)]
            extra: dict[str, Any] = {"diff": "d"} if mode == "diffs" else {"mode": mode}
            given = [r if mode == "diffs" else r[:3] for r in rows]
            df = spark.createDataFrame(given, columns + (", d int" if mode == "diffs" else ""))
            wrote = sc.write_df(df.repartition(3), name, keys=["id"], **extra)
            assert wrote == step == table.upper
            table.write(rows, "append" if mode == "diffs" else mode)

        last = table.upper - 1
        for as_of in (0, 2, 3, 4, last):
            assert counted(sc.snapshot_df(name, as_of, parallelism=4)) == table.contents(as_of)
        sums = {(*r, n): 1 for r, n in table.contents(last).items()}
        assert counted(sc.snapshot_df(name, expand=False)) == sums
        assert counted(sc.changes_df(name, 0)) == table.changes(0, table.upper)
        assert counted(sc.changes_df(name, 2, 5)) == table.changes(2, 5)
        assert counted(sc.changes_df(name, 3, 3)) == Counter()

        few = sc.snapshot_df(name, columns=["x", "id"], where=pc.field("key", "id") < 20)
        assert few.columns == ["x", "id"]
        wanted = [(r[2], r[0]) for r in table.contents(last).elements() if r[0] < 20]
        assert counted(few) == Counter(wanted)
        assert sc.snapshot_df(name, columns=[]).count() == table.contents(last).total()

        before = at(place, lambda client: client.admin.fsck(name))
        assert before.ok, before.problems
        assert sc.compact(name, parallelism=3) is True
        assert sc.compact(name) is False
        assert counted(sc.snapshot_df(name)) == table.contents(last)
        assert counted(sc.changes_df(name, 0)) == table.changes(0, table.upper)  # since has not moved
        after = at(place, lambda client: client.admin.fsck(name))
        assert after.ok, after.problems
        assert sum(b.parts > 0 for b in at(place, lambda client: client.admin.inspect(name)).batches) == 1


def test_product_times(spark: Any, sc: Any, place: str, name: str) -> None:
    """Goal: a snapshot at any product time; what needs int times says so, and nothing is written."""
    model, schema = Model([(0, 0)]), ap.Schema(str, int, time=2)
    updates = [("a", 1, (0, 0), 1), ("a", 1, (1, 0), 1), ("b", 2, (0, 2), 2), ("a", 1, (3, 1), -1)]
    model.append(updates, [(0, 0)], [(4, 4)])
    appended(place, name, schema, (updates, (0, 0), (4, 4)))
    for as_of in ((0, 0), (0, 3), (1, 0), (3, 3)):
        wanted = [row[:2] for row in model.contents(as_of) for _ in range(row[2])]
        assert counted(sc.snapshot_df(name, as_of)) == Counter(wanted)
    df = spark.createDataFrame([("c", 3)], "key string, val long")
    for call in (
        lambda: sc.snapshot_df(name),
        lambda: sc.snapshot_df(name, 3),
        lambda: sc.changes_df(name, 0),
        lambda: sc.write_df(df, name),
    ):
        with pytest.raises(ap.InvalidUsage) as found:
            call()
        assert found.value.kind in (ap.UsageKind.INVALID_TIME, ap.UsageKind.INVALID_COLUMN)
    assert upper(place, name) == ap.Antichain((4, 4))
    assert sc.compact(name) is True or sc.compact(name) is False
    assert counted(sc.snapshot_df(name, (3, 3))) == Counter({("a", 1): 1, ("b", 2): 2})


def test_a_hot_key_is_shared_out(spark: Any, place: str, name: str) -> None:
    """Goal: most rows have one key, and yet no task reads most of them; small settings reach the workers."""
    with connect(spark, place, settings=ap.Settings(**TINY)) as sc:
        rows = [("hot", n) for n in range(6000)] + [(f"cold {n}", n) for n in range(300)]
        df = spark.createDataFrame(rows, "key string, val long")
        sc.write_df(df.repartition(2), name, keys=["key"])
        parts = sum(b.parts for b in at(place, lambda client: client.admin.inspect(name)).batches)
        assert parts > 10  # by the settings of this client, in the workers
        found = sc.snapshot_df(name, parallelism=8)
        assert 4 <= found.rdd.getNumPartitions() <= 16
        shares = found.rdd.mapPartitions(lambda part: [list(map(tuple, part))]).collect()
        assert sorted(row for share in shares for row in share) == sorted(rows)
        assert max(len(share) for share in shares) < len(rows) / 3


def test_settings_of_the_environment(
    spark: Any, place: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOPERSIST_LOCATION", place)
    with connect(spark) as sc:
        assert place not in repr(sc)
        appended(place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
        with pytest.raises(ap.UnknownShard):
            sc.snapshot_df("other")
