"""Helpers that the tests of outcomes of appends share."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import aiopersist as ap
from tests.support import rigs
from tests.support.clock import AskedConsensus
from tests.support.rigs import Rig


def rig(**limits: Any) -> AbstractAsyncContextManager[Rig]:
    return rigs.rig(consensus=AskedConsensus, **limits)


async def by_compare(w: ap.WriteHandle[str, int]) -> None:
    await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
