"""How a value is refused: up to the caller that knows which input row it is."""

from __future__ import annotations


class Refusal(Exception):
    """A value that cannot be stored: its row among the values given, and why."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row
        self.reason = reason
