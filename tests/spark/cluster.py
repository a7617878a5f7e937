"""A standalone cluster on loopback, for faults that `local[2]` cannot have: lost executors, and
speculation. Its two workers have addresses of their own, since Spark puts no second attempt on the host of
the first. Drivers are processes of their own: `python -m tests.spark.cluster '{"job": ...}'`."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from aiopersist.testing.servers import free_port
from tests.spark.faults import FORMAT, tasks_but, until, with_its_parent
from tests.spark.schemas import COLUMNS

ROOT = Path(__file__).parents[2]
HOSTS = ["127.0.0.1", "127.0.0.2"]
SHARD, SINK = "shard", "sink"
LEASE_S = "20"
WAIT_S = 120.0
SETTINGS: dict[str, Any] = {
    "inline_writes_single_max_bytes": 0,
    "blob_target_size": 4000,
    "row_group_bytes": 2000,
}
CONFIG = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.default.parallelism": "2",
    "spark.executorEnv.PYTHONPATH": str(ROOT),
    "spark.executorEnv.AIOPERSIST_WRITER_LEASE_S": LEASE_S,
    "spark.executorEnv.AIOPERSIST_INLINE_WRITES_SINGLE_MAX_BYTES": "0",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # both executors, before anything runs
    "spark.cores.max": "2",
    "spark.task.maxFailures": "4",
}
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.minTaskRuntime": "100ms",
}


def some_rows(version: int, n: int = 600) -> list[tuple[int, str]]:
    return [(version * 1000 + i, f"row {i} of version {version}") for i in range(n)]


# --- the cluster --------------------------------------------------------------------------------------


class Cluster:
    """It runs. `log` is what its processes and drivers say."""

    def __init__(self, master: str, ui: int, workers: list[subprocess.Popen[bytes]], log: Path) -> None:
        self.master = master
        self.workers = workers
        self.log = log
        self._ui = ui

    def alive(self) -> int:
        """How many workers the master knows."""
        with suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ui}/json/", timeout=10) as answer:
                return int(json.load(answer)["aliveworkers"])
        return 0

    @contextmanager
    def driver(self, **told: Any) -> Iterator[subprocess.Popen[bytes]]:
        """A driver that runs a job of this module."""
        command = [sys.executable, "-m", "tests.spark.cluster", json.dumps({"master": self.master, **told})]
        with started(command, self.log) as process:
            yield process

    def run(self, **told: Any) -> None:
        """The same, to its end."""
        with self.driver(**told) as process:
            assert process.wait(240) == 0


@contextmanager
def started(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which ends for sure, with its children."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=os.environ | env,
            preexec_fn=with_its_parent,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A master and two workers, with a core each."""
    import pyspark

    home = Path(pyspark.__file__).parent
    spark_class, log = str(home / "bin" / "spark-class"), folder / "cluster.log"
    env = {"SPARK_HOME": str(home), "SPARK_LOCAL_DIRS": str(folder / "local"), "SPARK_DAEMON_MEMORY": "256m"}
    port, ui = free_port(), free_port()
    master = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        command = [spark_class, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1"]
        stack.enter_context(started([*command, "--port", str(port), "--webui-port", str(ui)], log, **env))
        workers = []
        for number, host in enumerate(HOSTS):
            command = [spark_class, "org.apache.spark.deploy.worker.Worker", "--host", host]
            command += ["--webui-port", "0", "--cores", "1", "--memory", "1g"]
            command += ["--work-dir", str(folder / f"work{number}"), master]
            workers.append(stack.enter_context(started(command, log, **env)))
        stack.callback(_end_executors, str(folder))
        cluster = Cluster(master, ui, workers, log)
        until(lambda: cluster.alive() == len(HOSTS), "a cluster")
        yield cluster


def _end_executors(folder: str) -> None:
    """They are in sessions of their own, and know the folder of their worker."""
    for stat in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(stat / "cwd").startswith(folder):
                os.kill(int(stat.name), signal.SIGKILL)


# --- what goes wrong in tasks --------------------------------------------------------------------------


class Fault:
    """Happens to the first task that reaches it, and to its next attempt. Travels by value."""

    def __init__(self, kind: str, folder: str) -> None:
        self.kind, self.folder = kind, folder

    def reached(self) -> None:
        """By a task that has done its work and not told yet."""
        from pyspark import TaskContext

        context = TaskContext.get()
        who = f"{context.stageId()} {context.partitionId()}"
        if not self.mark("victim"):
            if Path(self.folder, "victim").read_text() != who or not self.mark("second"):
                return
            if self.kind == "the second loses":
                self.wait("never")
            return
        Path(self.folder, "victim").write_text(who)
        if self.kind == "the first loses":
            self.wait("never")
        elif self.kind == "the second loses":
            self.wait("second")
        elif self.kind == "the executor dies":
            daemon = os.getppid()
            executor = int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])
            for pid in (executor, daemon, os.getpid()):
                os.kill(pid, signal.SIGKILL)
        elif self.kind == "the worker dies":  # which the test does
            Path(self.folder, "dying").write_text(str(os.getpid()))
            self.wait("never")

    def mark(self, name: str) -> bool:
        try:
            Path(self.folder, name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def wait(self, name: str) -> None:
        end = time.monotonic() + WAIT_S
        while not Path(self.folder, name).exists():
            if time.monotonic() > end:
                self.mark("in vain")
                raise RuntimeError(f"{name} did not happen")
            time.sleep(0.05)


def tasks_with(fault: Fault, *methods: str) -> Any:
    """`aiopersist.spark.tasks`, in which these meet the fault after their work, `read` after a batch."""
    from aiopersist.spark import tasks

    def whole(real: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = real(*args)
            fault.reached()
            return result

        return call

    def midway(real: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            for number, batch in enumerate(real(*args)):
                yield batch
                if not number:
                    fault.reached()

        return call

    wrapped = {name: (midway if name == "read" else whole)(getattr(tasks, name)) for name in methods}
    return tasks_but(**wrapped)


# --- a driver ------------------------------------------------------------------------------------------


def main() -> None:
    told = json.loads(sys.argv[1])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    import aiopersist as ap
    import aiopersist.spark.client
    import aiopersist.spark.replace
    from aiopersist.spark import connect
    from tests.spark.conftest import configured
    from tests.spark.faults import faulty

    builder = configured(SparkSession.builder.master(told["master"]))
    for name, value in {**CONFIG, **(SPECULATION if "loses" in told["fault"] else {})}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    fault, place, job = Fault(told["fault"], told["folder"]), told["place"], told["job"]
    sc = connect(spark, place, settings=ap.Settings(**SETTINGS))

    def frame(version: int) -> Any:
        return spark.createDataFrame(some_rows(version), COLUMNS).repartition(2)

    def whole(real: Any, *_: Any) -> Any:
        message = real()
        fault.reached()
        return message

    def midway(real: Any, *_: Any) -> Any:
        for number, batch in enumerate(real()):
            yield batch
            if not number:
                fault.reached()

    expected = some_rows(1)
    sc.write_df(frame(1), SHARD, keys=["id"])
    if job in ("write", "upsert"):
        method = "stage" if job == "write" else "retract"
        module = aiopersist.spark.client if job == "write" else aiopersist.spark.replace
        module.tasks = tasks_with(fault, method)  # type: ignore[attr-defined]
        sc.write_df(frame(2), SHARD)
        expected += some_rows(2)
        if job == "upsert":
            sc.write_df(frame(1), SHARD, mode="upsert")
    elif job == "compact":
        sc.write_df(frame(2), SHARD)
        expected += some_rows(2)
        aiopersist.spark.client.tasks = tasks_with(fault, "compact")  # type: ignore[attr-defined]
        assert sc.compact(SHARD, parallelism=2)
    elif job == "read":
        aiopersist.spark.client.tasks = tasks_with(fault, "read")  # type: ignore[attr-defined]
    elif job == "format":
        spark.dataSource.register(faulty({"writer.write": whole}))
        frame(2).write.format(FORMAT).mode("append").option("location", place).save(SHARD)
        expected += some_rows(2)
    elif job == "format read":
        spark.dataSource.register(faulty({"reader.read": midway}))
        read = spark.read.format(FORMAT).options(location=place, parallelism=2).load(SHARD)
        assert sorted(map(tuple, read.collect())) == expected
    elif job == "stream":
        spark.dataSource.register(faulty({"streamWriter.write": whole}))
        source = spark.readStream.format(FORMAT).options(location=place, parallelism=2).load(SHARD)
        sink = source.writeStream.format(FORMAT).options(location=place, path=SINK, keys="id")
        sink = sink.option("checkpointLocation", f"{told['folder']}/checkpoint")
        sink.trigger(availableNow=True).start().awaitTermination()
        assert sorted(map(tuple, sc.snapshot_df(SINK).collect())) == expected
    found = sorted(map(tuple, sc.snapshot_df(SHARD, parallelism=2).collect()))
    assert found == expected
    assert Path(told["folder"], "victim").exists()
    sc.close()
    spark.stop()
    Path(told["folder"], "done").touch()


if __name__ == "__main__":
    main()
