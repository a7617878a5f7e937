"""A change of the library has a news fragment: `python -m tests.fragments`, run by `tox -e lint`.

The branch is compared with where it left `AIOPERSIST_TEST_BASE`, else `origin/main`, else `main`. Where there
is no such commit, or nothing came after it (a plain clone, an archive), there is nothing to check.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"changes/\+[a-z0-9-]+\.(added|changed|deprecated|removed|fixed)\.md")
ALSO_THERE = {"changes/README.md"}


def problems(changed: Iterable[str], there: Iterable[str]) -> list[str]:
    """What is wrong: `changed` are the paths that the branch changed, `there` all files in `changes/`."""
    changed = set(changed)
    wrong = [f"{path}: the name is not {NAME.pattern}" for path in there if not _is_named_well(path)]
    library = sorted(path for path in changed if path.startswith("aiopersist/"))
    told = [path for path in changed if NAME.fullmatch(path) or path == "CHANGELOG.md"]
    if library and not told:
        wrong.append(
            f"{len(library)} files of the library changed, {library[0]} first, without a fragment: add "
            "changes/+WORDS.TYPE.md (changes/README.md), which may say that users see no difference"
        )
    return wrong


def _is_named_well(path: str) -> bool:
    return path in ALSO_THERE or NAME.fullmatch(path) is not None


def git(root: Path, *arguments: str) -> list[str] | None:
    """The lines that git says, or `None` where it fails, or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def changed_since(root: Path, bases: Iterable[str]) -> list[str] | None:
    """The paths that changed since the branch left the first of `bases` that is there."""
    for base in bases:
        if found := git(root, "merge-base", base, "HEAD"):
            untracked = git(root, "ls-files", "--others", "--exclude-standard") or []
            return [*(git(root, "diff", "--name-only", found[0]) or []), *untracked]
    return None


def main() -> int:
    named = os.environ.get("AIOPERSIST_TEST_BASE")
    changed = changed_since(ROOT, [named] if named else ["origin/main", "main"])
    if changed is None:
        print("fragments: there is no commit to compare with")
    there = [f"changes/{path.name}" for path in (ROOT / "changes").iterdir() if not path.name.startswith(".")]
    wrong = problems(changed or [], there)
    print("\n".join(wrong), file=sys.stderr, end="\n" * bool(wrong))
    return len(wrong)


if __name__ == "__main__":
    raise SystemExit(main() > 0)
