"""Which location a command works on."""

from typing import NamedTuple


class LocationOptions(NamedTuple):
    """A location; without any of the three, the location that the environment names."""

    location: str | None
    blob: str | None
    consensus: str | None
