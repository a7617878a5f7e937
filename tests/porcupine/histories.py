"""Histories of the games, as a file for a judge from outside: `main.go`, a small program around Porcupine.

`AIOPERSIST_TEST_HISTORIES=FILE` makes each game on tables append its history: an operation per line, as
`main.go` describes it. It has calls, moments and what was told, but no commit times and no versions. So reads
that may be of earlier are left out. At the end each key is read once more."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.table.history import Key, Op, Run
from tests.table.versions import Updates, Versions

FOLDER = Path(__file__).parent
HISTORIES, REQUIRED = "AIOPERSIST_TEST_HISTORIES", "AIOPERSIST_TEST_REQUIRE_PORCUPINE"
EARLIER = ("stale", "as_of", "at_instant")
_numbers = count()


def write_down(name: str, ops: Sequence[Op], updates: Updates) -> None:
    """Append the history to the file that is asked for, at once."""
    if path := os.environ.get(HISTORIES):
        unique = f"{name} ({os.getpid()}.{next(_numbers)})"
        text = "".join(f"{line}\n" for line in lines(unique, ops, updates))
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, text.encode())
        os.close(file)


def lines(name: str, ops: Sequence[Op], updates: Updates) -> Iterator[str]:
    """Of a history. `updates` give what is there at its end."""
    versions = Versions(updates)
    runs = [run for op in ops for run in op.runs]
    keys = {key for changes in versions.at.values() for key in changes}
    keys |= {key for run in runs for key in (*run.reads, *run.writes)}
    keys |= {(read.table, key) for run in runs for read in run.ranges for key in read.entries}
    end = 1 + max((_ns(at) for op in ops for at in (op.began, op.ended) if at < float("inf")), default=0)
    for op in ops:
        if op.kind in EARLIER or op.did_nothing or not (op.answered or op.may_write):
            continue
        until = _ns(op.ended) if op.answered else end if op.settled else None
        yield _line(name, op.name, _ns(op.began), until, [_run(run, keys) for run in op.runs])
    for at, key in enumerate(sorted(keys), 1):
        last = {"reads": {_text(key): versions.val(key, float("inf"))}, "writes": {}}
        yield _line(name, f"the end of {_text(key)}", end + 2 * at, end + 2 * at + 1, [last])


def _ns(at: float) -> int:
    return round(at * 1e9)


def _text(key: Key) -> str:
    return f"{key[0]}/{key[1]}"


def _run(run: Run, keys: Iterable[Key]) -> dict[str, Any]:
    """Its ranges read each of `keys` that is in them."""
    reads = dict(run.reads)
    for table, start, stop, entries in run.ranges:
        for key in keys:
            if key[0] == table and (start is None or start <= key[1]) and (stop is None or key[1] < stop):
                reads[key] = entries.get(key[1])
    sides: dict[str, Mapping[Key, Any]] = {"reads": reads, "writes": run.writes}
    return {side: {_text(key): val for key, val in vals.items()} for side, vals in sides.items()}


def _line(history: str, name: str, call: int, until: int | None, runs: Sequence[Any]) -> str:
    return json.dumps({"history": history, "name": name, "call": call, "return": until, "runs": runs})


# --- the judge ----------------------------------------------------------------------------------------


def built(folder: Path) -> Path:
    """The program, built in `folder`. Where that cannot be, the test is skipped."""
    if (go := shutil.which("go")) is None:
        _skip("there is no Go")
    else:
        command = [go, "build", "-buildvcs=false", "-o", f"{folder}/judge", "."]
        ran = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
        if ran.returncode:
            _skip(ran.stderr)
    return folder / "judge"


def _skip(reason: str) -> None:
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1, and Porcupine is not built: {reason}")
    pytest.skip(f"Porcupine is not built, no history is judged from outside: {reason}")


def refused(judge: Path, file: Path) -> dict[str, str]:
    """By name, the histories of the file that it does not take for right (refused, or undecided), and why."""
    ran = subprocess.run([judge, file], capture_output=True, text=True)
    assert ran.returncode in (0, 1), ran.stderr
    *faults, summary = ran.stdout.splitlines()
    print(summary)
    assert bool(faults) == bool(ran.returncode), ran.stdout
    return {name: why for name, _, why in (fault.partition(": ") for fault in faults)}
