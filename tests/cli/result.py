"""The result of a command."""

from typing import NamedTuple


class Result(NamedTuple):
    status: int
    out: str
    err: str
