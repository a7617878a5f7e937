"""The locations of a stash."""

import uuid
from pathlib import Path

import pytest


@pytest.fixture(params=["mem", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite://{tmp_path}/st.db" if request.param == "sqlite" else f"mem://{uuid.uuid4().hex}"
