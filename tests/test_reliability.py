"""Goal: the page on reliability names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def missing(text: str) -> list[str]:
    """The tests that it names and that are not there."""
    found = []
    for file, test in NAMED.findall(text):
        path = ROOT / file
        if not path.exists() or not re.search(rf"^ *(async )?def {test}\(", path.read_text(), re.MULTILINE):
            found.append(f"{file}::{test}")
    return found


def test_each_named_test_is_there() -> None:
    text = PAGE.read_text()
    assert missing(text) == []
    assert len(NAMED.findall(text)) > 50


def test_each_row_of_a_table_names_one() -> None:
    faults = PAGE.read_text().partition("## Losses of power")[0]
    rows = [line for line in faults.splitlines() if line.startswith("| ") and "`tests/" not in line]
    assert [row for row in rows if "shown by |" not in row] == [], "a row without a test"


def test_a_test_that_is_gone_is_noticed() -> None:
    assert missing("`tests/test_reliability.py::test_gone`, `tests/gone.py::test_a`") == [
        "tests/test_reliability.py::test_gone",
        "tests/gone.py::test_a",
    ]
