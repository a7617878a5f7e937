"""The tool that says what slow commits waited for runs."""

import re

import pytest

from benches import tails


def test_it_tells_what_slow_commits_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    tails.main("sqlite", 10, 100)
    first, second, *table = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"sqlite, 10 rows: p50 [\d.]+ ms, p99 [\d.]+ ms .*", first)
    assert re.fullmatch(r"nobody could look for \d+ of \d+ ms", second)
    assert any("sqlite" in line or "loop" in line for line in table)
