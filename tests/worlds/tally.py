"""Play many worlds, and tell what happened in them.

    python -m tests.worlds.tally FIRST SEEDS [FILE]

Each failure is told with its seed, and made smaller. FILE gets the figures, as JSON, after each hundred."""

import json
import logging
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from aiopersist.testing.simulation import Failure, search
from tests.worlds.covered import Covered, watched
from tests.worlds.everything import everything

EACH = 100


def tally(first: int, seeds: int, into: Path | None = None) -> dict[str, Any]:
    """The figures of these worlds."""
    counts: Counter[str] = Counter()
    failed: dict[int, str] = {}
    began = time.process_time()
    with watched() as covered:
        for number, seed in enumerate(range(first, first + seeds), 1):
            try:
                counts += search(everything, [seed])
            except Failure as failure:
                failed[seed] = str(failure)
                print(f"seed {seed}: {failure}", flush=True)
            if into is not None and (number % EACH == 0 or number == seeds):
                told = figures(first, number, counts, failed, covered, time.process_time() - began)
                into.write_text(json.dumps(told, indent=1), encoding="utf-8")
    return figures(first, seeds, counts, failed, covered, time.process_time() - began)


def figures(
    first: int,
    worlds: int,
    counts: Counter[str],
    failed: dict[int, str],
    covered: Covered,
    cpu_s: float,
) -> dict[str, Any]:
    return {
        "first": first,
        "worlds": worlds,
        "failed": failed,
        "cpu_s": round(cpu_s, 1),
        "hours": round(counts["seconds"] / 3600, 1),
        "counts": dict(sorted(counts.items())),
        "pairs": len(covered.outcomes),
        "outcomes": {f"{command}: {what}": n for (command, what), n in sorted(covered.outcomes.items())},
        "appends": dict(sorted(covered.appends.items())),
        "conditions that did not go both ways": covered.missing,
    }


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # what a busy world logs is no news
    into = Path(sys.argv[3]) if sys.argv[3:] else None
    print(json.dumps(tally(int(sys.argv[1]), int(sys.argv[2]), into), indent=1))
