"""The error of a value that cannot be stored. A caller that knows the input row handles it."""

from __future__ import annotations


class Refusal(Exception):
    """A value cannot be stored: its row among the values (-1: all of them), and the reason."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row
        self.reason = reason


class TooMuchText(Exception):
    """The values have 2 GiB of text or bytes, which one array cannot hold. Fewer values may fit."""


def short(value: object) -> str:
    """The repr of a value, cut where it is long; its type if it has none."""
    try:
        text = repr(value)
    except Exception:  # that of a class may fail
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def unexpected(value: object, expected: str) -> str:
    """The reason for a value of a wrong type."""
    shown_type, text = type(value).__name__, short(value)
    return f"expected {expected}, got {text if text.startswith(f'{shown_type}(') else f'{shown_type} {text}'}"
