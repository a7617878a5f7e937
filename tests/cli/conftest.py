"""Commands write as to a pipe, however wide the terminal is in which the tests run."""

import pytest


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
