"""Bugs that are planted in the library, and how many worlds it takes to find each (`search.py`).

A plant replaces a function that the library calls; it fails where that is not there any more. `BUGS` names
all, with the programs in whose worlds the bug can show, and the worlds that it took."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


class Bug(NamedTuple):
    """One planted bug."""

    area: str
    plant: Plant
    roles: str
    """A world without one of these programs cannot show it, and is not played."""
    first: int = 0
    """The first seed whose world may show it."""

    @property
    def name(self) -> str:
        return self.plant.__name__.replace("_", " ")
