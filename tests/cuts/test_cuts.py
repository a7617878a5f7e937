"""Goal: after any fault at any store call or wait of any call, no acknowledged data is lost, no refused data
is there, no call hangs, and everything goes on.

By default one trouble of some scenes, drawn from a seed; all of all in the long run."""

import asyncio
import gc
import random
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

import tests.cuts.scenes_above
import tests.cuts.scenes_maintenance
import tests.cuts.scenes_once
import tests.cuts.scenes_tables
import tests.cuts.scenes_tags  # noqa: F401  # each adds its own
from aiopersist.shard import commit
from tests.conftest import StoreUrls
from tests.cuts.faults import Cut, Fault, Met, troubled
from tests.cuts.scenes import SCENES
from tests.cuts.stage import MAY_RAISE, staged
from tests.support.location import in_a_bucket

TROUBLES: list[Fault | Cut] = [*Fault, *Cut]
HEALS = [
    Fault.REFUSED,
    Fault.DROPPED,
    Fault.LOST,
    Fault.LATE,
    Fault.RAISES,
    Fault.RAISES_LATE,
]
"""What is over when the call is made again."""
SEED = 7
SAMPLE = 12  # scenes
DRAWN_FROM = 5  # calls and waits, the first ones; some scenes have fewer


TABLE_SCENES = [name for name in SCENES if name.startswith(("table", "transact"))]


@pytest.fixture(autouse=True)
def batches_that_were_cut_off() -> Iterator[None]:
    """They warn when they are collected: here, not in a later test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def apart(urls: StoreUrls, number: int) -> StoreUrls | None:
    """An empty place beside this one; `None`: in memory."""
    if urls.blob.startswith("mem"):
        return None
    blob, _, options = urls.blob.partition("?")
    consensus = urls.consensus.replace("state.db", f"state{number}.db")
    if in_a_bucket(urls.consensus):
        consensus = consensus.replace("?", f"/{number}?")
    if consensus == urls.consensus:  # Postgres, whose URL ends with the schema
        consensus += f"_{number}"
    return StoreUrls(f"{blob}/{number}?{options}" if options else f"{blob}/{number}", consensus)


async def play(
    name: str,
    trouble: Fault | Cut,
    at: int,
    place: Path | None = None,
    urls: StoreUrls | None = None,
    *,
    patient: bool = False,
) -> Met:
    """The scene, with that trouble there; all is checked. Who is patient hears of nothing that heals."""
    try:
        async with staged(place, None if patient else 0.0, urls) as stage:
            stage.client = await stage.opened()
            call = await SCENES[name](stage)
            met = await troubled(stage.trouble, call(), trouble, at)
            if met.raised is not None:
                cut = trouble is Fault.CANCELLED or isinstance(trouble, Cut)
                may = (*MAY_RAISE, asyncio.CancelledError) if cut else () if patient else MAY_RAISE
                if not isinstance(met.raised, may):
                    raise met.raised
            await stage.verify()
            return met
    except BaseException as error:
        error.add_note(f"{name}: {trouble} at {at}")
        raise


@pytest.mark.parametrize("name", random.Random(SEED).sample(sorted(SCENES), SAMPLE))
async def test_a_sample(name: str) -> None:
    rng = random.Random(f"{SEED} {name}")
    await play(name, rng.choice(TROUBLES), rng.randint(1, DRAWN_FROM))


@pytest.mark.parametrize("name", TABLE_SCENES)
async def test_a_call_of_tables_is_cancelled(name: str) -> None:
    rng = random.Random(f"{SEED} {name}")
    await play(name, rng.choice([*Cut]), rng.randint(1, 2))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TABLE_SCENES)
async def test_calls_of_tables_are_cancelled_at_each_wait(name: str, location: StoreUrls) -> None:
    """Goal: on each store all of it happens, or nothing, and the client goes on."""
    if in_a_bucket(location.consensus) and name.startswith("transact"):
        pytest.skip("an object store commits to one shard at a time")
    number = 0
    for cut in Cut:
        for at in count(1):
            number += 1
            if not (await play(name, cut, at, urls=apart(location, number))).reached:
                break


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trouble", TROUBLES, ids=str)
@pytest.mark.parametrize("name", SCENES)
async def test_everywhere(name: str, trouble: Fault | Cut) -> None:
    for at in count(1):
        if not (await play(name, trouble, at)).reached:
            break


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trouble", TROUBLES, ids=str)
@pytest.mark.parametrize("name", SCENES)
async def test_everywhere_on_disk(name: str, trouble: Fault | Cut, tmp_path: Path) -> None:
    for at in count(1):
        if not (await play(name, trouble, at, tmp_path / str(at))).reached:
            break


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trouble", HEALS, ids=str)
@pytest.mark.parametrize("name", SCENES)
async def test_who_is_patient_hears_of_nothing(name: str, trouble: Fault) -> None:
    for at in count(1):
        if not (await play(name, trouble, at, patient=True)).reached:
            break


# --- controls: the stage notices what would be wrong --------------------------------------------------


async def test_a_wrong_outcome_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a caller that takes an append that happened for one that did not writes it twice."""

    async def looks_away(*args: object) -> bool:
        return False

    monkeypatch.setattr(commit, "_look", looks_away)
    with pytest.raises(AssertionError, match="Told"):
        for at in range(1, 9):
            await play("write", Fault.LOST, at)
