"""Programs that run side by side, each a process of its own."""

import subprocess
import sys
import time
from collections.abc import Sequence


def together(script: str, arguments: Sequence[str], processes: int) -> float:
    """How many seconds the work of so many processes takes, all at once. The script prints `ready`, reads a
    line, works, and prints `done`: neither its start nor its end counts."""
    command = [sys.executable, "-c", script, *arguments]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    began = time.perf_counter()
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "done\n"
    took_s = time.perf_counter() - began
    for process in started:
        process.communicate()
        assert process.returncode == 0
    return took_s
