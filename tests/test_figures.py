"""Goal: one thing has one figure, on whatever page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBER = re.compile(r"\d+(?:[.,]\d+)+|\d{2,}")
SOURCES = ("tables", "performance", "comparison")
"""The pages of measurements."""


def section(page: str, heading: str) -> str:
    """The text below a heading, without links."""
    text = (ROOT / page).read_text("utf-8")
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{page} has no heading {heading!r}"
    return re.sub(r"\]\([^)]*\)", "]", found[1])


def test_figures_of_the_first_page_are_those_of_the_measurements() -> None:
    pages = " ".join((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in SOURCES)
    measured = set(NUMBER.findall(pages))
    told = NUMBER.findall(section("README.md", "How fast"))
    assert len(told) > 20
    assert [number for number in told if number not in measured] == []


@pytest.mark.parametrize("what", ["append", "read", "1 % of the keys"])
def test_figures_of_bulk_are_the_same_beside_peers_and_by_hand(what: str) -> None:
    def of(page: str, columns: slice) -> list[str]:
        """The first number of some cells of the line that begins so."""
        (line,) = re.findall(rf"^\| {re.escape(what)} \|.* ?(?:ms|MiB|\d) .*$", bulk(page), re.MULTILINE)
        return [re.search(r"[\d,.]+", cell)[0].strip(",") for cell in line.split("|")[2:][columns]]  # type: ignore[index]

    def bulk(page: str) -> str:
        text = (ROOT / "docs" / page).read_text("utf-8")
        return (
            text[text.index("million rows") :] if page == "comparison.md" else text[text.index("**Bulk.**") :]
        )

    ours, hand = of("comparison.md", slice(0, 2))
    assert of("performance.md", slice(0, 2)) == [hand, ours]
