"""Names in docstrings, comments and pages exist, and no class name stands for two things.

A mention is text in backticks. A path must be a file; an identifier must be one of the library's, of its
docs' examples, or of Python and the packages it uses.
"""

import ast
import builtins
import keyword
import re
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "aiopersist"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]

# Names of contracts: each package's users meet one of them only.
TWICE = {"Fenced"}

# Everyday words that stood for several things each, and the words of the field that took their places.
BETTER = {
    "Kind": "TableSchema",
    "Whole": "FullView",
    "Parted": "PartialView",
    "Ahead": "Speculation",
    "Cut": "ConsistentRead",
    "Member": "Participant",
    "Courtesy": "fairness",
    "courtesy": "fairness",
    "Need": "HistoryPin",
    "Vigil": "Polling",
    "vigil": "polling",
    "Spend": "MarkConsumed",
}

# Participles and pronouns that name no thing: a variable, an argument or a function says what it has.
VAGUE = frozenset(
    {"found", "given", "known", "loose", "made", "settled", "some", "spent", "taken", "there", "told"}
    | {"vain", "wanted"}
)
# Public arguments, which keep their names.
PUBLIC = {("fastapi/stream.py", "given")}

# Names of others, which no code here uses: of Postgres, S3, Parquet, Python, Java and the tools in the docs.
FOREIGN = frozenset(
    {"PGPASSWORD", "POST", "DATA_SOURCE_NOT_FOUND", "ceil", "host1", "jq", "log2", "psql", "py313"}
    | {
        "OptionalDataException",
        "ProcessPoolExecutor",
        "mp_context",
        "worker_process_init",
        "pyspark_aiopersist",
        "rs",
        "ser_json_bytes",
        "spine_fueled",
        "sqlite_version",
        "key_name",
        "val_name",
        "ARROW_DEFAULT_MEMORY_POOL",
        "jemalloc",
    }
)

MENTION = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PATH = re.compile(r"[\w./-]+\.(?:py|md|toml|ini|yml|sh)")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def sources() -> list[Path]:
    return sorted(LIBRARY.rglob("*.py"))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a module, with their lines."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and type(node.value.value) is str
        ):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def names_of(source: str) -> set[str]:
    """Every identifier of some Python code, and every word of its strings that are no docstrings."""
    found: set[str] = set()
    tree = ast.parse(source)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, str) and not isinstance(node, ast.Constant):
                found.update(value.split("."))
        if isinstance(node, ast.Constant) and type(node.value) is str and id(node) not in prose:
            found.update(re.findall(r"\w+", node.value))
        if isinstance(node, ast.Global | ast.Nonlocal):
            found.update(node.names)
    return found


@cache
def known() -> set[str]:
    found = {*dir(builtins), *keyword.kwlist, *FOREIGN}
    for path in [
        *sources(),
        *sorted((ROOT / "tests").rglob("*.py")),
        *sorted((ROOT / "benches").glob("*.py")),
    ]:
        if path != Path(__file__):
            found |= names_of(path.read_text(encoding="utf-8"))
            found.add(path.stem)
    found |= {part for path in sources() for part in path.relative_to(ROOT).parent.parts}
    found |= tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ].keys()
    for page in PAGES:
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            found.update(re.findall(r"\w+", block))
    return found


def is_file(name: str, near: Path) -> bool:
    """Whether a path that is mentioned in `near` exists: from there, from the library, or from the root."""
    places = (near.parent, near.parent.parent, LIBRARY, ROOT, ROOT / "docs")
    return any((place / name).is_file() for place in places)


def unresolved(text: str, near: Path, identifiers: set[str]) -> list[str]:
    """The mentions of `text` that name nothing."""
    wrong = []
    for mention in MENTION.findall(text):
        if PATH.fullmatch(mention):
            if not is_file(mention, near):
                wrong.append(mention)
        elif (match := IDENTIFIER.match(mention)) and set(match[0].split(".")) - identifiers:
            wrong.append(mention)
    return wrong


def test_what_docstrings_and_comments_mention_exists() -> None:
    identifiers = known()
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: `{mention}`"
        for path in sources()
        for line, text in texts(path)
        for mention in unresolved(text, path, identifiers)
    ]
    assert wrong == []


def test_what_pages_mention_exists() -> None:
    identifiers = known()
    wrong = [
        f"{page.relative_to(ROOT)}: `{mention}`"
        for page in PAGES
        for mention in unresolved(
            re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL), page, identifiers
        )
    ]
    assert wrong == []


def classes() -> dict[str, list[str]]:
    """Where each class name is defined; a leading underscore makes no other name."""
    found = defaultdict(list)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_no_class_name_stands_for_two_things() -> None:
    assert {name: places for name, places in classes().items() if len(places) > 1 and name not in TWICE} == {}


def test_names_that_had_several_meanings_are_gone() -> None:
    modules = {path.stem: [str(path.relative_to(ROOT))] for path in sources()}
    assert {
        name: (places, BETTER[name]) for name, places in (classes() | modules).items() if name in BETTER
    } == {}


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each name that code gives to a variable, an argument, an attribute or a function, with its line. The
    arguments of `Consensus.heads` are public, and stay."""
    public = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "heads"
        for argument in node.args.args
    }
    for node in ast.walk(tree):
        if id(node) in public:
            continue
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name


def test_names_say_what_they_name() -> None:
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources()
        for line, name in bound_names(ast.parse(path.read_text(encoding="utf-8")))
        if name.strip("_") in VAGUE and (path.relative_to(LIBRARY).as_posix(), name) not in PUBLIC
    ]
    assert vague == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("see `state/diff.py` and `diff.py`", ["diff.py"], id="paths"),
        pytest.param("`Client.reader` and `Client.reeder`", ["Client.reeder"], id="names"),
        pytest.param("`commit(register, job)` commits", [], id="a call"),
        pytest.param("`no_such_name(x)`", ["no_such_name(x)"], id="a call of nothing"),
    ],
)
def test_a_stale_mention_is_found(text: str, expected: list[str]) -> None:
    assert unresolved(text, LIBRARY / "shard" / "log.py", known() - {"reeder"}) == expected
