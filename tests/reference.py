"""The built pages load nothing from other hosts, and those of the reference have every public name, and no
other: `python -m tests.reference SITE`.

Run by `tox -e docs` after `mkdocs build`, without the library installed. A name is public if it is in
`__all__` of a public package, or on `public_api.txt`, which has the members of classes too.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r'<h[1-6] id="(aiopersist\.[^"]+)"')
PACKAGES = (
    "",
    "backup",
    "fastapi",
    "indexed",
    "measure",
    "spark",
    "stash",
    "testing.stash",
    "testing.simulation",
    "testing.storage",
    "web",
)
# What a browser fetches by itself: scripts, pictures, styles, fonts; not what a reader clicks on.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|(?:url\(|@import\s*)["']?((?:https?:)?//[^"')\s]+)"""
)

LEFT_OUT = re.compile(r".*\.T|aiopersist\.stash")  # a type variable
# The suites are inherited from as a whole, and every stash has the members of `Stash`.
MEMBERS_ELSEWHERE = re.compile(
    r"aiopersist\.(testing\..*Conformance|stash\.(Memory|Postgres|Sqlite)Stash)\..+"
)
DOORS = ("Admin", "Workers")
# Each has the name of its module: the module would be shown.
BY_MODULE = {f"aiopersist.stash.{name}.{name}": f"aiopersist.stash.{name}" for name in ("open", "transact")}


def exported(package: str) -> set[str]:
    """The names in `__all__`, by which users import them."""
    path = ROOT / "aiopersist" / package.replace(".", "/") / "__init__.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            prefix = ".".join(filter(None, ["aiopersist", package]))
            return {f"{prefix}.{name}" for name in ast.literal_eval(node.value)}
    raise AssertionError(f"{path} has no __all__")


def written_down() -> set[str]:
    """The names and members of `public_api.txt`."""
    found = set()
    module = owner = ""
    for line in (ROOT / "tests/public_api.txt").read_text(encoding="utf-8").splitlines():
        name = re.split(r"\W", line.strip().removeprefix("async "))[0]
        if not line.startswith(" "):
            module = line
        elif not line.startswith("    "):
            owner = f"{module}.{name}"
            found.add(owner)
        else:
            found.add(f"{owner}.{name}")
    return found


def is_moved(name: str, public: set[str]) -> bool:
    """Whether this is a deprecated forward of the client, to a call behind one of its doors."""
    owner, _, call = name.rpartition(".")
    return owner == "aiopersist.Client" and any(f"aiopersist.{door}.{call}" in public for door in DOORS)


def shown(site: Path) -> set[str]:
    """The names that have a heading."""
    pages = (site / "reference").rglob("index.html")
    found = {name for page in pages for name in HEADING.findall(page.read_text(encoding="utf-8"))}
    return {BY_MODULE.get(name, name) for name in found}


def foreign(site: Path) -> set[str]:
    """What the pages fetch from other hosts, with the page."""
    texts = (path for kind in ("html", "css", "svg") for path in site.rglob(f"*.{kind}"))
    return {
        f"{path.relative_to(site)} fetches {''.join(found)}"
        for path in texts
        for found in FETCHED.findall(path.read_text(encoding="utf-8"))
    }


def main(site: Path) -> int:
    names = {name for package in PACKAGES for name in exported(package)}
    documented = names | written_down()
    public = {name for name in documented if not LEFT_OUT.fullmatch(name) and not is_moved(name, documented)}
    found = shown(site)
    missing = {name for name in public - found if not MEMBERS_ELSEWHERE.fullmatch(name)}
    internal = {name for name in found - public if name.rpartition(".")[0] not in public}
    for name in sorted(missing):
        sys.stderr.write(f"{name} is public, and not in the reference\n")
    for name in sorted(internal):
        sys.stderr.write(f"{name} is in the reference, and not public\n")
    elsewhere = foreign(site)
    for fetch in sorted(elsewhere):
        sys.stderr.write(f"{fetch}\n")
    return len(missing | internal | elsewhere)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])) > 0)
