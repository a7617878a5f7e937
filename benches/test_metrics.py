"""A small append with metrics on beside the same with metrics off.

Two clients of one kind of location take turns; each round appends several times, so that what it measures is
long beside the noise of the clock. What counts is the CPU time of the process, at the lower quartile: other
processes disturb it less than the time that passes."""

import itertools
import statistics
import uuid
from time import process_time
from typing import Any

import pytest

import aiopersist as ap
from benches import byhand
from benches.conftest import report

SCHEMA = ap.Schema(key=bytes, val=bytes)
APPENDS = 10  # in a round
RATIO_MAX = 1.02


@pytest.mark.parametrize("kind", ["mem", "files+sqlite"])
def test_metrics(kind: str, run: Any, rounds: Any, tmp_path: Any, capsys: Any) -> None:
    updates = byhand.rows(10, 0)
    clients: list[ap.Client] = []
    seconds: dict[str, list[float]] = {"off": [], "on": []}

    def appending(name: str, **settings: Any) -> Any:
        blob = consensus = f"mem://{uuid.uuid4().hex}"
        if kind != "mem":
            blob, consensus = f"file://{tmp_path / name}", f"sqlite://{tmp_path / name}.db"
        client = run(
            ap.open(blob=blob, consensus=consensus, settings=ap.Settings(**settings), maintenance=False)
        )
        clients.append(client)
        writer, times = run(client.writer("shard", SCHEMA)), itertools.count()

        async def append() -> None:
            began = process_time()
            for time in itertools.islice(times, APPENDS):
                await writer.compare_and_append([(k, v, time, d) for k, v, _, d in updates], time, time + 1)
            seconds[name].append(process_time() - began)

        return append

    contenders = {"off": appending("off", metrics=False), "on": appending("on")}
    rounds(contenders, 300, warmup=10)
    off, on = (statistics.quantiles(taken, n=4)[0] for taken in (seconds["off"], seconds["on"]))
    report(capsys, "CPU time of a quarter of the rounds", ratio=round(on / off, 4), goal=RATIO_MAX)
    assert clients[1].metrics().appends > 0 == clients[0].metrics().appends
    for client in clients:
        run(client.aclose())
