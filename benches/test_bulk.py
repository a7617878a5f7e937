"""Bulk beside the same by hand, and peers where they are installed (`pip install duckdb deltalake
"pyiceberg[sql-sqlite]"`): append, whole read, range, compaction. Each in a process of its own, warm, in
turns; time, processor time, and memory on top of the input."""

import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benches.bulk import WHATS
from benches.conftest import report

ROWS, ROUNDS = 2_000_000, 3
MIB = 2**20
PEERS = {
    "duckdb": ("read", "range"),
    "deltalake": ("append", "read", "compact"),
    "pyiceberg": ("append", "read"),
}
NEEDS = {"pyiceberg": ["sqlalchemy"]}  # its catalog


@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", WHATS)
def test_bulk(what: str, enabled: bool, benchmark: Any, capsys: Any, tmp_path: Path) -> None:
    contenders = ["by hand", "ours", *(who for who, does in PEERS.items() if what in does and _is_there(who))]
    told: dict[str, list[dict[str, Any]]] = {who: [] for who in contenders}
    rows, rounds = (ROWS, ROUNDS) if enabled else (20_000, 1)

    def turn() -> None:
        for who, found in told.items():
            folder = tmp_path / f"{who} {len(found)}"
            command = [sys.executable, "-m", "benches.bulk", who, what, str(folder), str(rows)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout))

    benchmark.pedantic(turn, rounds=rounds)
    median = {
        who: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for who, found in told.items()
    }
    hand = median["by hand"]
    texts = {}
    for who, one in median.items():
        ms, ratio = one["seconds"] * 1e3, one["seconds"] / hand["seconds"]
        more = f"cpu {one['cpu_s'] * 1e3:,.0f} ms, +{one['grew'] / MIB:,.0f} MiB"
        texts[who.replace(" ", "_")] = f"{ms:,.0f} ms ({ratio:.2f}x), {more}"
    report(capsys, f"{what} {rows} rows", **texts)


def _is_there(who: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in (who, *NEEDS.get(who, ())))
