"""Goal: after any calls, by any opener and in any order, a stash agrees with a list of updates
(`stash_model.py`), on every backend: its results, its refusals, and that a refused call has changed nothing.
Openers come and go, take over, share, read or try; collections are consolidated at any moment, migrations
fail or succeed.

The moves are in `model_moves.py`, the calls in `model_calls.py`, their arguments in `model_draws.py` and
`model_values.py`, the checks in `model_judge.py`.

A failure names its game: the seed and the calls up to it."""

import os
import random
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiopersist.stash.session
from tests.stash.model_calls import KEY_READS, READS
from tests.stash.model_game import Game
from tests.stash.model_moves import play_to_the_end

BACKENDS = ["mem", "sqlite", "postgres"]
LONG_GAMES = int(os.environ.get("AIOPERSIST_TEST_STASH_GAMES", "100"))  # on each backend
LIVELY = (
    *("DiffOverflow", "InvalidUpdate", "InvalidUsage", "CodecMismatch", "StashError", "StaleLower"),
    *("NothingSealed", "fenced", "migrated", "migration failed", "compensated"),
    *(f"{what}, done" for what in (*READS, *KEY_READS, "open", "update_many", "seal", "compact", "append")),
    *(f"{what}, done" for what in ("consolidate_batch", "seal_batch", "compact_batch", "append held")),
    *(f"{what}, done" for what in ("upsert", "upsert_key", "delete", "insert_without_overwrite")),
)


@pytest.fixture(params=BACKENDS)
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Returns the URL of an empty stash of that backend at every call."""

    server = request.getfixturevalue("postgres_server") if request.param == "postgres" else None

    def url() -> str:
        name = uuid.uuid4().hex[:16]
        if server is not None:
            return server.url(f"t_{name}")  # type: ignore[no-any-return]
        return f"sqlite://{tmp_path / name}.db" if request.param == "sqlite" else f"mem://{name}"

    return url


async def play(seed: int, url: str, monkeypatch: pytest.MonkeyPatch, moves: int = 120) -> Counter[str]:
    few = random.Random(seed).choice([1, 2, 5, 256])
    monkeypatch.setattr(aiopersist.stash.session, "CONSOLIDATE_ROWS_MIN", few)
    game = Game(seed, url)
    try:
        await play_to_the_end(game, moves)
    except Exception as error:
        error.add_note(f"seed {seed}, on {url}")
        raise
    return game.counts


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
async def test_short_games(seed: int, urls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await play(seed, urls(), monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_long_games(urls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tox -e long`; `AIOPERSIST_TEST_STASH_GAMES` says how many."""
    counts: Counter[str] = Counter()
    for seed in range(1000, 1000 + LONG_GAMES):
        counts += await play(seed, urls(), monkeypatch, moves=200)
    missing = [what for what in LIVELY if not counts[what]]
    assert not missing or LONG_GAMES < 20, (missing, counts)
