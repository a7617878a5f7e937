"""Goal: beside everything that goes wrong with real servers, nothing is lost or doubled, and no outcome stays
unknown. `docs/reliability.md` has the figures of an hour."""

import json
import os

import pytest

from aiopersist.testing.servers import versitygw_path
from tests.endurance.notes import KINDS
from tests.endurance.run import play

SECONDS = float(os.environ.get("AIOPERSIST_TEST_ENDURANCE_S", "600"))


@pytest.mark.long
@pytest.mark.blocks_loop
@pytest.mark.timeout(2 * SECONDS + 900)
async def test_four_processes_under_all_faults() -> None:
    if versitygw_path() is None:
        pytest.skip("versitygw is not on this machine")
    figures = await play(SECONDS, seed=1)
    print(json.dumps(figures, indent=1))
    assert figures["good"]
    assert all(figures["operations"][kind] for kind in KINDS)
    assert len(figures["forks"]) == 4
    assert figures["faults"]["kill a process"]
