"""Texts of figures, moments and times, for pages and commands. Pure.

Texts of users cannot hide anything or change the text beside them: control characters and characters that
turn the direction of writing become visible signs. The templates escape everything for HTML.
"""

import unicodedata
from datetime import UTC, datetime, timedelta
from math import isinf

from aiopersist.base.frontier import Antichain, Time
from aiopersist.state.model import Clock

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST_S = 253_402_300_799  # the last second of the year 9999, beyond which Python has no instants
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
SPANS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))


def size_text(count: float) -> str:
    """Bytes, with three digits: `1.25 MiB`."""
    for unit in BYTE_UNITS:
        if count < 1024 or unit == BYTE_UNITS[-1]:
            break
        count /= 1024
    if unit == "B":
        return f"{count:,.0f} B"
    return f"{count:,.{0 if count >= 100 else 1 if count >= 10 else 2}f} {unit}"


def number_text(count: float) -> str:
    """A count with thousands separators: `1,250,000`."""
    return f"{count:,.0f}"


def counted(count: int, noun: str) -> str:
    """A count with its noun: `1 batch`, `1,250 batches`."""
    plural = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def rate_text(per_s: float) -> str:
    """A rate: `12 /s`, `3.2 /min`."""
    if per_s <= 0:
        return "0"
    factor, unit = 3600.0, "h"
    if per_s * 60 >= 1:
        factor, unit = (1.0, "s") if per_s >= 1 else (60.0, "min")
    value = per_s * factor
    return f"{value:,.{0 if value >= 10 else 1}f} /{unit}"


def growth_text(bytes_per_s: float) -> str:
    """A rate of growth: `+1.25 MiB /min`."""
    each_minute = round(bytes_per_s * 60)
    sign = "+" if each_minute > 0 else "\N{MINUS SIGN}" if each_minute < 0 else ""
    return f"{sign}{size_text(abs(each_minute))} /min"


def duration_text(seconds: float) -> str:
    """A duration in its largest unit: `3.2 ms`, `45 s`, `12 min`, `3 d`."""
    if isinf(seconds):
        return "more"
    if seconds < 0:
        return f"-{duration_text(-seconds)}"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
    length, unit = next((span for span in SPANS if seconds >= span[0]), SPANS[-1])
    value = round(seconds / length, 1 if seconds < 10 * length and unit != "s" else 0)
    return f"{value:,.{0 if value == int(value) else 1}f} {unit}"


def ago_text(moment: float | None, now: float) -> str:
    """The time since a moment: `3 min ago`."""
    if moment is None:
        return "never"
    return "now" if now - moment < 1 else f"{duration_text(now - moment)} ago"


def expiry_text(moment: float | None, now: float) -> str:
    """The time until a moment, or `never`: `in 3 d`. The next commit drops what is overdue."""
    if moment is None:
        return "never"
    return f"in {duration_text(moment - now)}" if moment >= now else "with the next commit"


def moment_text(moment: float) -> str:
    """A moment in Unix seconds, in UTC."""
    return instant_text(int(moment * 1e6))[:19]


def instant_text(micros: int) -> str:
    """Microseconds since 1970 as an instant in UTC, without needless digits."""
    if not 0 <= micros // 1_000_000 <= LAST_S:
        return f"{micros:,} µs"
    instant = EPOCH + timedelta(microseconds=micros)
    return instant.isoformat(" ", "microseconds" if micros % 1_000_000 else "seconds").removesuffix("+00:00")


def time_text(time: Time, clock: Clock) -> str:
    """A time; on a wall clock as an instant."""
    if isinstance(time, tuple):
        return f"({', '.join(map(str, time))})"
    return instant_text(time) if clock is Clock.WALL and time else f"{time}"


def frontier_text(frontier: Antichain | None, clock: Clock) -> str:
    """A frontier; with one element, its time."""
    if frontier is None:
        return "—"
    if not frontier.elements:
        return "the end"
    if clock is Clock.WALL and frontier == Antichain(0):
        return "the beginning"
    texts = [time_text(time, clock) for time in frontier.elements]
    return texts[0] if len(texts) == 1 else f"{{{', '.join(texts)}}}"


def short_id(text: str) -> str:
    """The first digits of a random id, enough for a list, without the owner; other texts unchanged."""
    bare = text.partition("@")[0]
    return bare[:9] if len(bare) > 30 and bare[:1] in "rwsi" and bare.count("-") == 4 else text


def visible(text: str) -> str:
    """The text; a sign replaces each invisible character, and each that turns the direction of writing."""
    return text if text.isprintable() else "".join(map(_sign, text))


def _sign(character: str) -> str:
    code = ord(character)
    if character.isprintable() or character == " ":
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    if unicodedata.category(character) == "Zs":
        return character
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def cut(text: str, length: int) -> str:
    """At most `length` characters of a text."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
