"""Goal: the memory of a task depends on the settings, and not on the amount that it reads or writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import need_spark
from tests.support.shards import MIB

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

TARGET = 4 * MIB
READ_MEMORY = 32 * MIB
RUNS = 4
ROWS = 10_000  # of 96 bytes that nothing compresses: a batch

PROGRAM = f"""
import json, resource, sys
from functools import partial

import numpy as np
import pyarrow as pa
import aiopersist as ap
from aiopersist.spark import tasks
from aiopersist.spark.bridge import bridge
from aiopersist.spark.columns import Columns
from aiopersist.spark.location import SparkLocation
from aiopersist.spark.rows import Layout

what, location, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
settings = ap.Settings(
    blob_target_size={TARGET},
    row_group_bytes={MIB // 2},
    blob_cache_bytes=0,
    read_memory_bytes={READ_MEMORY},
    compaction_memory_bytes={READ_MEMORY},
)
place = SparkLocation.of(location, None, None, settings)
schema = ap.Schema(key=bytes, val=bytes)
frame = pa.schema([("key", pa.binary()), ("val", pa.binary())])
random = np.random.default_rng(1)


def column(data):
    offsets = np.arange({ROWS} + 1, dtype=np.int32) * data.shape[1]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data.tobytes())]
    return pa.Array.from_buffers(pa.binary(), {ROWS}, buffers)


def batches(n):
    # sorted by key, so that an append is one run, of any size
    for number in range(n):
        at = number * {ROWS}
        keys = np.arange(at, at + {ROWS}, dtype=">u8").view(np.uint8).reshape({ROWS}, 8)
        noise = random.integers(0, 256, ({ROWS}, 88), dtype=np.uint8)
        yield pa.record_batch([column(np.hstack([keys, noise[:, :8]])), column(noise[:, 8:])], frame.names)


def read(client, shard):
    return bridge().run(partial(client.workers.shared_read, shard))


def stage(client, shard, grant):
    return tasks.stage(place, grant, Layout(frame, schema), batches(count)).rows


def read_all(client, shard, grant):
    [piece] = bridge().run(read(client, shard).pieces, 1)
    return sum(batch.num_rows for batch in tasks.read(place, piece, Columns(schema)))


def retract(client, shard, grant):
    [piece] = bridge().run(read(client, shard).pieces, 1)
    return tasks.retract(place, grant, tasks.Retraction(piece)).rows


def compact(client, shard, grant):
    claimed = bridge().run(client.workers.shared_compaction, shard)
    [piece] = bridge().run(claimed.pieces, 1)
    assert bridge().run(claimed.apply, [tasks.compact(place, piece)])
    return sum(batch.len for batch in bridge().run(client.admin.inspect, shard).batches)


def fill(client, shard, n):
    writer = bridge().run(client.writer, shard, schema)
    for time in range({RUNS}):
        bridge().run(append, writer, n, time)
    return writer


async def append(writer, n, time):
    async with writer.builder(time) as builder:
        for batch in batches(n):
            times, diffs = (pa.repeat(pa.scalar(x, pa.int64()), {ROWS}) for x in (time, 1))
            columns = [*batch.columns, times, diffs]
            await builder.extend(pa.record_batch(columns, ["key", "val", "time", "diff"]))
        await writer.compare_and_append_batch([await builder.finish(time + 1)], time, time + 1)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


work = dict(stage=stage, read=read_all, retract=retract, compact=compact)[what]
client = bridge().acquire(place, maintenance=False)
"""

MEASURE = """
warm = fill(client, "warm", 1)
wanted, count = count, 1
work(client, "warm", bridge().call(warm.to_transmittable))
count = wanted
writer = bridge().run(client.writer, "shard", schema)
grant = bridge().call(writer.to_transmittable)
before = peak()
rows = work(client, "shard", grant)
print(json.dumps({"grown": peak() - before, "rows": rows}))
bridge().close_all()
"""

FILL = """
fill(client, "shard", count)
bridge().close_all()
"""


def run(program: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "POLARS_MAX_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def measured(what: str, place: Path, batches: int) -> dict[str, int]:
    """What a process of its own tells: by how much its peak has grown since everything was warm."""
    if what != "stage":
        run(FILL, what, place, batches // RUNS)
    found: dict[str, int] = json.loads(run(MEASURE, what, place, batches))
    return found


@pytest.mark.parametrize("what", ["stage", "read", "retract", "compact"])
def test_a_task_holds_no_more_of_more(what: str, tmp_path: Path) -> None:
    need_spark()
    small, large = measured(what, tmp_path / "small", 80), measured(what, tmp_path / "large", 240)
    assert (small["rows"], large["rows"]) == (80 * ROWS, 240 * ROWS)
    assert large["grown"] < 100 * MIB, (small, large)  # of 220 MiB that go through it
    assert large["grown"] < small["grown"] + 24 * MIB, (small, large)
