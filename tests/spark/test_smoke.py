"""Goal: written rows are read back, by the engine and by `format("aiopersist")`."""

from typing import Any


def test_there_and_back(spark: Any, sc: Any, place: str, name: str) -> None:
    rows = [(n, f"name {n % 7}", n / 2) for n in range(500)]
    df = spark.createDataFrame(rows, "id long, name string, x double").repartition(3)
    assert sc.write_df(df, name, keys=["id"]) == 0
    assert sorted(map(tuple, sc.snapshot_df(name).collect())) == rows
    read = spark.read.format("aiopersist").option("location", place).load(name)
    assert sorted(map(tuple, read.collect())) == rows
