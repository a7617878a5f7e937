"""Bugs of publications. Worlds have them from `PUBLISHED_FROM` on."""

from typing import Any

import pytest

from aiopersist.iceberg import publish
from tests.worlds.everything import PUBLISHED_FROM
from tests.worlds.planted import Bug


def a_publication_that_pins_nothing(patch: pytest.MonkeyPatch) -> None:
    """Its pins are dropped as soon as it is complete."""
    finished = publish._Publisher._finished

    async def unpinned(self: Any, *args: Any) -> Any:
        published = await finished(self, *args)
        await self.pins.release(await self.pins.held())
        return published

    patch.setattr(publish._Publisher, "_finished", unpinned)


BUGS = [Bug("publications", a_publication_that_pins_nothing, "publisher", PUBLISHED_FROM)]
