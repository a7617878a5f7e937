"""Imports go one way, files and functions stay small.

The order below is the design's: a package may import from those above it only. Every import counts:
lazy ones in functions, those for type checkers, and modules that are named in a string.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "aiopersist"
PACKAGE = "aiopersist"
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 40  # without its docstring
TESTS = Path(__file__).parent

# Each line may import from the lines before it; those in one line do not know each other.
ORDER = (
    ("base",),
    ("measure",),
    ("data", "storage", "state"),
    ("shard", "stash"),
    ("parts", "gc"),
    ("write", "read", "compact"),
    ("subscription",),
    ("maintenance", "backup"),
    ("indexed", "table"),
    ("iceberg",),
    ("erase",),
    ("client",),
    ("spark", "web"),
    ("fastapi",),
    ("demo",),
    ("cli",),
)
LAYERS = {name: layer for layer, names in enumerate(ORDER) for name in names}


class Import(NamedTuple):
    """One edge, and where it is."""

    importer: str
    imported: str
    line: int


def modules(root: Path) -> dict[str, str]:
    """The source of every module, by its dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def imports(name: str, source: str, known: Mapping[str, str]) -> Iterator[Import]:
    """Every module of the package that `source` names in an import, or whole in a string."""
    is_folder = any(other.startswith(name + ".") for other in known)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, is_folder, node)
            inner = [f"{base}.{alias.name}" for alias in node.names]
            targets = [i if i in known else base for i in inner]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            targets = [node.value] if node.value in known and "." in node.value else []
        else:
            continue
        for target in targets:
            if re.match(rf"{PACKAGE}(\.|$)", target):
                yield Import(name, target, node.lineno)


def _absolute(name: str, is_folder: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    base = parts[: len(parts) - node.level + is_folder]
    return ".".join([*base, node.module] if node.module else base)


def top(name: str) -> str:
    """The layer's name: `aiopersist.shard.log` is in `shard`."""
    return name.split(".")[1] if "." in name else ""


def edges(sources: Mapping[str, str]) -> list[Import]:
    return [edge for name, source in sources.items() for edge in imports(name, source, sources)]


def wrong_imports(sources: Mapping[str, str]) -> list[str]:
    """All edges that do not go down."""
    found = ((edge, _wrong(edge)) for edge in edges(sources))
    return [f"{e.importer}:{e.line} imports {e.imported}: {why}" for e, why in found if why]


def cycle(sources: Mapping[str, str]) -> str | None:
    """One cycle, if there is any. A folder may be imported by what is in it."""
    graph: dict[str, set[str]] = {name: set() for name in sources}
    for edge in edges(sources):
        if not f"{edge.importer}.".startswith(f"{edge.imported}."):
            graph[edge.importer].add(edge.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return " -> ".join(reversed(e.args[1]))
    return None


def _wrong(edge: Import) -> str | None:
    importer, imported = top(edge.importer), top(edge.imported)
    if edge.importer == PACKAGE or importer == imported:
        return None
    if edge.imported == PACKAGE:
        return "nobody imports from the package's root"
    if imported == "testing":
        return "nobody imports testing"
    if importer == "testing":
        return None
    if unknown := {importer, imported} - LAYERS.keys():
        return f"{unknown.pop()} has no place in the order"
    if LAYERS[imported] > LAYERS[importer]:
        return "upwards"
    return "sideways" if LAYERS[imported] == LAYERS[importer] else None


def wrong_headers(sources: Mapping[str, str]) -> list[str]:
    """All packages below the client whose headers do not name the packages that they import; all import
    `base`."""
    packages = {top(name) for name in sources if name.count(".") > 1} - {"base"}
    imported: defaultdict[str, set[str]] = defaultdict(set)
    for edge in edges(sources):
        imported[top(edge.importer)].add(top(edge.imported))
    problems = []
    for package in sorted(name for name in packages & LAYERS.keys() if LAYERS[name] < LAYERS["client"]):
        header = ast.get_docstring(ast.parse(sources[f"{PACKAGE}.{package}"])) or ""
        _, _, line = header.partition("\nImports ")
        said = set(re.findall(r"\w+", line.partition(".")[0])) & packages
        if said != (found := imported[package] & packages - {package}):
            problems.append(f"{package} imports {sorted(found)}; its header says {sorted(said)}")
    return problems


def unnamed_modules(sources: Mapping[str, str]) -> list[str]:
    """All modules and packages that the header of their package does not name."""
    packages = {name.rpartition(".")[0] for name in sources} - {"", PACKAGE}
    headers = {name: ast.get_docstring(ast.parse(sources[name])) or "" for name in packages}
    inner = [name.rpartition(".") for name in sources]
    return [f"{p}: {m}" for p, _, m in inner if p in packages and not re.search(rf"`{m}[`/]", headers[p])]


def too_long(sources: Mapping[str, str]) -> list[str]:
    """All files and functions over the limits."""
    problems = []
    for name, source in sources.items():
        if (lines := len(source.splitlines())) > FILE_LINES_MAX:
            problems.append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1 - _docstring_lines(node)
                if lines > FUNCTION_LINES_MAX:
                    problems.append(f"{name}:{node.lineno} {node.name}: {lines} lines")
    return problems


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    return (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0


def test_imports_go_one_way() -> None:
    assert wrong_imports(modules(ROOT)) == []


def test_headers_name_what_a_package_imports() -> None:
    assert wrong_headers(modules(ROOT)) == []


def test_headers_name_the_modules_of_a_package() -> None:
    assert unnamed_modules(modules(ROOT)) == []


def test_there_is_no_cycle() -> None:
    assert cycle(modules(ROOT)) is None


def test_files_and_functions_are_small() -> None:
    assert too_long(modules(ROOT)) == []


def test_files_of_tests_are_small() -> None:
    sources = modules(TESTS)
    long = [name for name, source in sources.items() if len(source.splitlines()) > FILE_LINES_MAX]
    assert long == []


def test_every_module_has_a_place() -> None:
    places = LAYERS.keys() | {"", "testing"}
    assert {top(name) for name in modules(ROOT)} - places == set()


MADE_UP = {
    "aiopersist": "from aiopersist.client import open",
    "aiopersist.base": "",
    "aiopersist.base.errors": "",
    "aiopersist.client": "from aiopersist.base.errors import Error",
    "aiopersist.data": "",
    "aiopersist.state": "",
    "aiopersist.state.model": "",
    "aiopersist.shard": "",
    "aiopersist.shard.log": "from aiopersist.state.model import State",
    "aiopersist.testing": "from aiopersist import client",
}


def test_sources_in_order_pass() -> None:
    assert wrong_imports(MADE_UP) == []
    assert cycle(MADE_UP) is None


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        pytest.param(
            "aiopersist.shard.log",
            "def f():\n    from aiopersist.client import open\n",
            "aiopersist.shard.log:2 imports aiopersist.client: upwards",
            id="lazy",
        ),
        pytest.param(
            "aiopersist.shard.log",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import aiopersist.client\n",
            "aiopersist.shard.log:3 imports aiopersist.client: upwards",
            id="for type checkers",
        ),
        pytest.param(
            "aiopersist.state.model",
            "from aiopersist import data",
            "aiopersist.state.model:1 imports aiopersist.data: sideways",
            id="sideways, a module from the root",
        ),
        pytest.param(
            "aiopersist.state.model",
            "from ..shard import log",
            "aiopersist.state.model:1 imports aiopersist.shard.log: upwards",
            id="relative",
        ),
        pytest.param(
            "aiopersist.state",
            "from . import model\nfrom ..shard import log",
            "aiopersist.state:2 imports aiopersist.shard.log: upwards",
            id="relative, from a folder",
        ),
        pytest.param(
            "aiopersist.base.errors",
            "from importlib import import_module\nimport_module('aiopersist.client')",
            "aiopersist.base.errors:2 imports aiopersist.client: upwards",
            id="named in a string",
        ),
        pytest.param(
            "aiopersist.client",
            "import aiopersist as ap",
            "aiopersist.client:1 imports aiopersist: nobody imports from the package's root",
            id="the root",
        ),
        pytest.param(
            "aiopersist.client",
            "from aiopersist.testing import anything",
            "aiopersist.client:1 imports aiopersist.testing: nobody imports testing",
            id="testing",
        ),
        pytest.param(
            "aiopersist.helpers",
            "from aiopersist.base.errors import Error",
            "aiopersist.helpers:1 imports aiopersist.base.errors: helpers has no place in the order",
            id="unknown",
        ),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, expected: str) -> None:
    assert wrong_imports(MADE_UP | {module: source}) == [expected]


def test_a_cycle_within_a_folder_is_found() -> None:
    sources = MADE_UP | {
        "aiopersist.shard.fetch": "from aiopersist.shard.log import x",
        "aiopersist.shard.log": "def f():\n    import aiopersist.shard.fetch",
    }
    assert wrong_imports(sources) == []
    assert sorted(set((cycle(sources) or "").split(" -> "))) == [
        "aiopersist.shard.fetch",
        "aiopersist.shard.log",
    ]


def test_a_long_file_and_a_long_function_are_found() -> None:
    long_function = "async def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX
    assert too_long({"a": "x = 1\n" * FILE_LINES_MAX, "b": "def f():\n" + "    x = 1\n" * 39}) == []
    assert too_long({"a": "x = 1\n" * (FILE_LINES_MAX + 1), "b": long_function}) == [
        "a: 401 lines",
        "b:1 f: 41 lines",
    ]


def test_the_picture_of_the_floors_has_them_in_their_order() -> None:
    picture = (TESTS.parent / "docs/images/floors.svg").read_text(encoding="utf-8")
    names = re.findall(r'class="n" x="[\d.]+" y="(\d+)" text-anchor="middle">([a-z]+)', picture)
    drawn: dict[str, set[str]] = {}
    for height, name in names:
        drawn.setdefault(height, set()).add(name)
    assert [drawn[height] for height in sorted(drawn, key=int)] == [set(line) for line in reversed(ORDER)]
