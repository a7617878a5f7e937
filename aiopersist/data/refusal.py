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


def short(value: object) -> str:
    """The repr of a value, cut where it is long; its type if it has none."""
    try:
        text = repr(value)
    except Exception:  # that of a class may fail
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def unexpected(value: object, expected: str) -> str:
    """What a value of another type than the wanted one is told."""
    shown_type, text = type(value).__name__, short(value)
    return f"expected {expected}, got {text if text.startswith(f'{shown_type}(') else f'{shown_type} {text}'}"
