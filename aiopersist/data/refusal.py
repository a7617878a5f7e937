"""The refusal of a value. It travels up to the caller that knows the number of the input row."""

from __future__ import annotations


class Refusal(Exception):
    """A value cannot be stored: its row among the given values (-1: all of them), and the reason."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row
        self.reason = reason


class TooMuchText(Exception):
    """These values have 2 GiB of text or bytes, which one array cannot hold: fewer of them may do."""
