"""Pages wait for what they show, however slow the machine is."""

import pytest


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("census", "cache", "reads"):
        monkeypatch.setattr(f"aiopersist.web.{module}.WAIT_S", 30.0)
