"""The road of most writes: put, update, transact, with `once=` too, and get, beside the same by hand, in
turns; by one caller and by many, in one process and in several. Per second, processor time, and how long
calls take.

By hand is SQLite with WAL and synchronous=FULL on a thread, or asyncpg with serializable transactions; ids
are rows of a table with a primary key."""

import json
import statistics
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benches.conftest import report
from benches.road import KINDS, contender, keys_of

SECONDS, ROUNDS = 3.0, 5
KEYS = 20
CASTS = [(1, 1), (1, 16), (2, 1), (2, 16), (4, 16)]


class Told(NamedTuple):
    """What one round of one contender did."""

    per_s: float
    cpu_ms: float
    """Of one call."""
    p50_ms: float
    p99_ms: float
    most_ms: float


def played(who: str, kind: str, processes: int, tasks: int, seconds: float, place: tuple[str, str]) -> Told:
    """Run it in so many processes at once."""
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benches.road",
                who,
                kind,
                str(tasks),
                str(seconds),
                str(KEYS),
                str(seed),
                *place,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(processes)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    found = [json.loads(process.communicate()[0]) for process in started]
    assert all(process.returncode == 0 for process in started)
    took_ms = sorted(1000 * took_s for one in found for took_s in one["took_s"])
    cpu_s = sum(one["cpu_s"] for one in found)
    return Told(
        len(took_ms) / seconds,
        1000 * cpu_s / len(took_ms),
        statistics.median(took_ms),
        took_ms[len(took_ms) * 99 // 100],
        took_ms[-1],
    )


async def made(place: tuple[str, str]) -> None:
    for who in ("ours", "hand"):
        one = contender(who, place[1])
        await one.open(*place)
        await one.make(keys_of(KEYS))
        await one.aclose()


@pytest.mark.parametrize(("processes", "tasks"), CASTS, ids=lambda n: str(n))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_road(
    store: str,
    kind: str,
    processes: int,
    tasks: int,
    request: Any,
    run: Any,
    enabled: bool,
    benchmark: Any,
    capsys: Any,
    tmp_path: Path,
) -> None:
    if not enabled and (processes, tasks) != (1, 16):
        pytest.skip("as a test, one cast is enough")
    seconds, rounds = (SECONDS, ROUNDS) if enabled else (0.1, 1)
    consensus = f"sqlite://{tmp_path / 'state.db'}"
    if store == "postgres":
        consensus = request.getfixturevalue("postgres_server").url(f"b_{uuid.uuid4().hex[:12]}")
    place = f"file://{tmp_path / 'blob'}", consensus
    run(made(place))
    told: dict[str, list[Told]] = {"hand": [], "ours": []}

    def turn() -> None:
        for who, found in told.items():
            found.append(played(who, kind, processes, tasks, seconds, place))

    benchmark.pedantic(turn, rounds=rounds)
    hand, ours = (Told(*map(statistics.median, zip(*found, strict=True))) for found in told.values())
    report(
        capsys,
        f"{store}, {kind}, {processes} x {tasks}",
        per_s=f"by hand {hand.per_s:,.0f}, ours {ours.per_s:,.0f}: {ours.per_s / hand.per_s:.2f}x",
        cpu_ms=f"by hand {hand.cpu_ms:.2f}, ours {ours.cpu_ms:.2f}: {ours.cpu_ms / hand.cpu_ms:.1f}x",
        p50_p99_most_ms=f"{ours.p50_ms:.1f}, {ours.p99_ms:.1f}, {ours.most_ms:.0f}",
        by_hand_p50_p99_most_ms=f"{hand.p50_ms:.1f}, {hand.p99_ms:.1f}, {hand.most_ms:.0f}",
    )
