"""Decoders that may end the process, as Arrow's readers of files may: they are fuzzed in a process of their
own, so that its end is a test that fails.

    python -m tests.fuzz.apart ndjson 0 60
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def fuzz_apart(kind: str, seeds: range, timeout_s: float) -> int:
    """How many mutations were decoded all the same."""
    return int(_run([kind, str(seeds.start), str(seeds.stop)], b"", timeout_s))


def attempt_apart(kind: str, data: bytes) -> bool:
    """Whether it was decoded."""
    return _run([kind], data, 60.0) == "True"


def _run(arguments: list[str], data: bytes, timeout_s: float) -> str:
    command = [sys.executable, "-m", "tests.fuzz.apart", *arguments]
    done = subprocess.run(command, cwd=ROOT, input=data, capture_output=True, timeout=timeout_s, check=False)
    lines = done.stdout.decode().splitlines() or ["nothing"]
    assert done.returncode == 0, f"{done.returncode} at {lines[-1]}\n{done.stderr.decode()[-4000:]}"
    return lines[-1]


def main() -> None:
    from tests.fuzz.test_fuzz import attempt, mutations

    kind, *seeds = sys.argv[1:]
    if not seeds:
        print(attempt(kind, sys.stdin.buffer.read()))
        return
    read = 0
    for data in mutations(kind, range(*map(int, seeds))):
        print(data[:1000], flush=True)  # the last one is the one at fault
        read += attempt(kind, data)
    print(read)


if __name__ == "__main__":
    main()
