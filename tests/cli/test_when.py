"""Goal: times and durations as people write them; what says nothing is refused by its text."""

from datetime import UTC, datetime, timedelta

import pytest

from aiopersist.cli.command import CannotBegin
from aiopersist.cli.when import duration_of, time_of


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("17", 17),
        ("2026-01-31T12:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31 13:00+01:00", datetime(2026, 1, 31, 12, tzinfo=UTC)),
    ],
)
def test_times(text: str, time: object) -> None:
    assert time_of("--as-of", text) == time


def test_times_before_now() -> None:
    before = datetime.now(UTC) - timedelta(minutes=5)
    found = time_of("A", "now-5min")
    assert isinstance(found, datetime)
    assert before <= found <= datetime.now(UTC) - timedelta(minutes=5)


@pytest.mark.parametrize(
    "text",
    ["", "yesterday", "now", "now-5", "now-5m", "-5min", "2026-01-31T12:00", "now-99999999w", "now-1e9d"],
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(CannotBegin) as refused:
        time_of("--as-of", text)
    assert repr(text.removeprefix("now-")) in str(refused.value) or repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1.5h", 5_400), ("7 d", 7 * 86_400), ("2w", 14 * 86_400), ("7x", None)],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert duration_of(text) == (None if seconds is None else timedelta(seconds=seconds))
