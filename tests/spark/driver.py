"""A driver process that tests kill: `python -m tests.spark.driver '{"job": ...}'`, in the project's folder.

`kill` names a moment, and `at` how often it passes before the whole driver is gone at once: its JVM, its
Python process, and the worker or hook that has reached the moment."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiopersist as ap
from aiopersist.spark import connect
from aiopersist.spark.write import WriteJob
from tests.spark.conftest import configured
from tests.spark.faults import FORMAT, faulty, with_its_parent
from tests.spark.schemas import COLUMNS

ROOT = Path(__file__).parents[2]
SOURCE, SINK, APP = "source", "sink", "app"
LEASE_S = 20.0  # until a worker has started and renews it
ENGINE_LEASE_S = 8.0  # the driver itself renews it
KILLED = -signal.SIGKILL


def some_rows(version: int, n: int = 2000) -> list[tuple[int, str]]:
    """What a write of that version has: enough to be no inline parts."""
    return [(version * 100_000 + i, f"row {i} of version {version}") for i in range(n)]


# --- for its parent --------------------------------------------------------------------------------


def run(log: Path, **told: Any) -> int:
    """Run a driver to its end; how that was."""
    with log.open("ab") as out:
        command = [sys.executable, "-m", "tests.spark.driver", json.dumps(told)]
        done = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=with_its_parent,
        )
        try:
            return done.wait(240)
        finally:
            if done.poll() is None:
                os.killpg(done.pid, signal.SIGKILL)


# --- the driver itself --------------------------------------------------------------------------------


class Killer:
    """Travels to workers, by value."""

    def __init__(self, moment: str | None, at: int, folder: str, pids: list[int]) -> None:
        self.moment, self.at, self.folder, self.pids = moment, at, folder, pids

    def passes(self, moment: str) -> None:
        """Here it may end."""
        if moment != self.moment:
            return
        with open(f"{self.folder}/{moment}", "a") as file:
            file.write(".")
            often = file.tell()
        if often == self.at:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, name: str) -> Callable[..., Any]:
        """A hook that may be killed before or after it does its work."""

        def hook(real: Any, *_: Any) -> Any:
            self.passes(f"{name} begins")
            result = real()
            self.passes(f"{name} ends")
            return result

        return hook

    def midway(self, name: str) -> Callable[..., Any]:
        """One that yields."""

        def hook(real: Any, *_: Any) -> Any:
            for batch in real():
                yield batch
                self.passes(name)

        return hook


def format_hooks(killer: Killer) -> type:
    read = ("initialOffset", "prepareForTriggerAvailableNow", "latestOffset", "partitions", "commit")
    names = [f"streamReader.{hook}" for hook in read]
    names += ["streamWriter.__getstate__", "streamWriter.write", "streamWriter.commit"]
    names += ["writer.write", "writer.commit"]
    return faulty(
        {name: killer.around(name) for name in names} | {"streamReader.read": killer.midway("read")}
    )


def patch_engine(killer: Killer) -> None:
    real = WriteJob.commit

    async def commit(job: WriteJob, staged: Any) -> int:
        killer.passes("job.commit begins")
        result = await real(job, staged)
        killer.passes("job.commit ends")
        return result

    WriteJob.commit = commit  # type: ignore[method-assign]


def write(spark: Any, told: dict[str, Any]) -> None:
    """Versions of an application, each as one transaction."""
    for version in told["versions"]:
        df = spark.createDataFrame(some_rows(version), COLUMNS).repartition(2)
        if told["job"] == "engine":
            sc = connect(spark, told["place"], settings=ap.Settings(writer_lease_s=ENGINE_LEASE_S))
            sc.write_df(df, SINK, keys=["id"], txn=(APP, version))
            continue
        options = {"location": told["place"], "keys": "id", "txnAppId": APP, "txnVersion": version}
        df.write.format(FORMAT).mode("append").options(**options, lease_s=LEASE_S).save(SINK)


def stream(spark: Any, told: dict[str, Any], killer: Killer) -> None:
    """From one shard to the other, a time per batch, until all that is there is done."""
    options = {"location": told["place"], "expand": "false", "hold_name": "stream", "max_rows_per_trigger": 1}
    source = spark.readStream.format(FORMAT).options(**options).load(SOURCE)
    if told["job"] == "stream":
        sink = source.writeStream.format(FORMAT).option("path", SINK)
        sink = sink.options(location=told["place"], keys="id", diff="_diff")
    else:
        sc = connect(spark, told["place"], settings=ap.Settings(writer_lease_s=LEASE_S))

        def each(df: Any, batch: int) -> None:
            killer.passes("batch begins")
            sc.write_df(df, SINK, keys=["id"], diff="_diff", txn=("query", batch))
            killer.passes("batch ends")

        sink = source.writeStream.foreachBatch(each)
    query = sink.option("checkpointLocation", told["checkpoint"]).trigger(availableNow=True).start()
    query.awaitTermination()


def main() -> None:
    told = json.loads(sys.argv[1])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["AIOPERSIST_WRITER_LEASE_S"] = str(LEASE_S)
    from pyspark.sql import SparkSession

    spark = configured(SparkSession.builder.master(told.get("master", "local[2,4]"))).getOrCreate()
    jvm = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
    killer = Killer(told.get("kill"), told.get("at", 1), told["folder"], [jvm, os.getpid()])
    patch_engine(killer)
    connect(spark, told["place"])
    spark.dataSource.register(format_hooks(killer))
    if told["job"] in ("engine", "format"):
        write(spark, told)
    else:
        stream(spark, told, killer)
    spark.stop()


if __name__ == "__main__":
    main()
