"""Goal: a change of the library without a news fragment is noticed, and a plain clone is let through."""

import subprocess
from pathlib import Path

import pytest

from tests.fragments import changed_since, problems

LIBRARY = "aiopersist/client/client.py"
FRAGMENT = "changes/+faster-opening.changed.md"


@pytest.mark.parametrize(
    ("changed", "there", "wrong"),
    [
        pytest.param([], [], 0, id="nothing"),
        pytest.param(["docs/index.md"], [], 0, id="docs alone"),
        pytest.param([LIBRARY], [], 1, id="no fragment"),
        pytest.param([LIBRARY], [FRAGMENT], 1, id="the fragment of another change"),
        pytest.param([LIBRARY, FRAGMENT], [FRAGMENT], 0, id="a fragment"),
        pytest.param([LIBRARY, "CHANGELOG.md"], [], 0, id="a release"),
        pytest.param([], ["changes/faster.md"], 1, id="a fragment of no type"),
        pytest.param([], ["changes/README.md"], 0, id="the page that explains them"),
    ],
)
def test_problems(changed: list[str], there: list[str], wrong: int) -> None:
    assert len(problems(changed, there)) == wrong


def test_a_branch_is_compared_with_where_it_left_its_base(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert changed_since(tmp_path, ["main"]) is None
    git("init", "-b", "main")
    git("commit", "--allow-empty", "-m", "first")
    assert changed_since(tmp_path, ["origin/main"]) is None
    assert changed_since(tmp_path, ["origin/main", "main"]) == []
    git("checkout", "-b", "mine")
    (tmp_path / "committed").touch()
    git("add", ".")
    git("commit", "-m", "second")
    (tmp_path / "not-yet").touch()
    assert changed_since(tmp_path, ["main"]) == ["committed", "not-yet"]
