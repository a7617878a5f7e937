"""The location that a command works on, and errors in its options."""

import os
from pathlib import Path
from typing import NamedTuple

from aiopersist.storage.urls import parse_location

VARIABLES = ("AIOPERSIST_LOCATION", "AIOPERSIST_BLOB", "AIOPERSIST_CONSENSUS")
NONE_NAMED = (
    "no location: use --location DIR, or --blob URL and --consensus URL; or set AIOPERSIST_LOCATION, or "
    "AIOPERSIST_BLOB and AIOPERSIST_CONSENSUS"
)


class LocationOptions(NamedTuple):
    """The options of a location; without any of them, the environment names it."""

    location: str | None
    blob: str | None
    consensus: str | None

    @property
    def is_environment(self) -> bool:
        """Whether the environment names it."""
        return not any(option is not None for option in self)

    @property
    def folder(self) -> str | None:
        """The directory or URL in `--location` or its variable."""
        return os.environ.get(VARIABLES[0]) or None if self.is_environment else self.location

    @property
    def name(self) -> str:
        """Its name, without secrets."""
        return self.folder or repr(parse_location(*self))

    @property
    def is_missing(self) -> bool:
        """Whether it is a directory without a location."""
        return bool(self.folder) and "://" not in str(self.folder) and not _holds_one(str(self.folder))

    def refusal(self) -> str | None:
        """Why the options or the environment name no location."""
        if self.location is not None and (self.blob or self.consensus):
            return "--location cannot be combined with --blob and --consensus"
        if (self.blob is None) is not (self.consensus is None):
            return "--blob and --consensus need each other"
        return _refusal_of(*map(os.environ.get, VARIABLES)) if self.is_environment else None


def _refusal_of(location: str | None, blob: str | None, consensus: str | None) -> str | None:
    if not (location or blob or consensus):
        return NONE_NAMED
    if location and (blob or consensus):
        other = VARIABLES[1 if blob else 2]
        return f"AIOPERSIST_LOCATION and {other} are both set: unset one, or use --location DIR"
    if not location and not (blob and consensus):
        set_, missing = VARIABLES[1:] if blob else VARIABLES[:0:-1]
        return f"{set_} is set, but {missing} is not: they need each other"
    return None


def _holds_one(folder: str) -> bool:
    try:
        return (Path(folder) / "state.db").exists() or Path(folder).is_file()
    except (OSError, ValueError):  # opening it will report the error
        return True
