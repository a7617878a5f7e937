"""The effects of `import aiopersist`: it is light and typed, and imports nothing that is not needed."""

import ast
import asyncio
import json
import re
import subprocess
import sys
from importlib.metadata import files, version
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap

HEAVY = {
    "aiobotocore",
    "aiohttp",
    "asyncpg",
    "botocore",
    "numpy",
    "obstore",
    "pandas",
    "polars",
    "pyarrow",
    "rich",
    "sqlite3",
    "typer",
}

# A process that only reads never needs these. A module of the library takes about a third of a millisecond, a
# dataclass as much.
LATER = {
    "aiopersist.backup",
    "aiopersist.cli",
    "aiopersist.compact",
    "aiopersist.demo",
    "aiopersist.fastapi",
    "aiopersist.gc",
    "aiopersist.indexed",
    "aiopersist.maintenance.background",
    "aiopersist.maintenance.inspect",
    "aiopersist.measure.view",
    "aiopersist.base.portal",
    "aiopersist.read.scan",
    "aiopersist.read.shared_read",
    "aiopersist.spark",
    "aiopersist.stash",
    "aiopersist.state.compaction",
    "aiopersist.state.lifecycle",
    "aiopersist.state.writing",
    "aiopersist.subscription",
    "aiopersist.table",
    "aiopersist.storage.clouds",
    "aiopersist.storage.disk_cache",
    "aiopersist.testing",
    "aiopersist.web",
    "aiopersist.write",
    "anyio",
    "fastapi",
    "opentelemetry",
    "prometheus_client",
    "difflib",
}
STORES = {f"aiopersist.storage.{name}" for name in ("files", "postgres", "s3", "sqlite")}
OWN_MODULES_MAX = 133
READING_MODULES_MAX = 149

ALONE = """
import json, sys
import aiopersist
print(json.dumps([name for name in sys.modules if name.startswith("aiopersist")]))
"""
IMPORT = """
import json, sys
import aiopersist
aiopersist.open
print(json.dumps(sorted(sys.modules)))
"""


def isolated(script: str) -> Any:
    """What the script prints, with the package that is tested here: else neither the environment nor the
    directory of the tests has a say."""
    place = f"import sys\nsys.path.insert(0, {str(Path(ap.__file__).parents[1])!r})\n"
    command = [sys.executable, "-I", "-c", place + script]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def imported() -> set[str]:
    return set(isolated(IMPORT))


def test_import_loads_nothing_heavy() -> None:
    assert isolated(ALONE) == ["aiopersist"]
    names = imported()
    assert {name.partition(".")[0] for name in names} & HEAVY == set()
    assert names & (LATER | STORES) == set()
    assert sum(name.startswith("aiopersist.") for name in names) <= OWN_MODULES_MAX


NAMES = """
import json, sys
import aiopersist

there = dir(aiopersist)
from aiopersist import *
found = {name: type(eval(name)).__name__ for name in aiopersist.__all__}
print(json.dumps([there, found, sorted(aiopersist._MODULES.items())]))
"""


def test_names_that_are_imported_later_are_there() -> None:
    """Goal: it makes no difference to a user when a name is imported."""
    there, found, later = isolated(NAMES)
    assert set(ap.__all__) <= set(there)
    assert found == {name: type(getattr(ap, name)).__name__ for name in ap.__all__}
    block = next(node for node in ast.parse(Path(ap.__file__).read_text()).body if isinstance(node, ast.If))
    for_checkers = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert sorted((alias.name, node.module) for node in for_checkers for alias in node.names) == [
        (name, "aiopersist" if module == "aiopersist.stash" else module) for name, module in later
    ]
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        getattr(ap, "nothing_of_this_name")  # noqa: B009  # of the package


def test_it_is_typed() -> None:
    assert resources("aiopersist").joinpath("py.typed").is_file()


def test_the_wheel_has_the_testing_package_and_no_tests() -> None:
    shipped = [str(path) for path in files("aiopersist") or []]
    if not any(path.startswith("aiopersist/") for path in shipped):
        pytest.skip("installed in place")
    assert "aiopersist/testing/servers.py" in shipped
    assert "aiopersist/py.typed" in shipped
    assert not any(path.startswith(("tests/", "benches/")) for path in shipped)


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", version("aiopersist"))


READ = """
import asyncio, sys
import aiopersist as ap

async def read():
    async with ap.open(sys.argv[1]) as client, client.reader("t") as r, r.snapshot() as s:
        print(len(await s.rows()))
    print(sorted({"pandas", "polars"} & set(sys.modules)))

asyncio.run(read())
print(" ".join(sys.modules))
"""


async def test_who_reads_a_little_waits_for_no_import_but_pyarrow(tmp_path: Path) -> None:
    """Goal: pandas takes a second, polars half of one; a small snapshot needs neither."""
    async with ap.open(tmp_path) as client, client.writer("t", ap.Schema(key=str, val=int)) as w:
        for n in range(20):
            await w.compare_and_append([(f"k{n}", n, n, 1), ("all", 0, n, 1)], n, n + 1)
        await client.admin.retain("t", 5)
        await client.admin.force_compaction("t")
        await w.compare_and_append([("k0", 0, 20, -1)], 20, 21)
    command = [sys.executable, "-c", READ, str(tmp_path)]
    run = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    rows, slow, names, _ = run.stdout.split("\n")
    assert (rows, slow) == ("20", "[]")
    modules = set(names.split())
    assert modules & LATER == set()
    assert sum(name.startswith("aiopersist.") for name in modules) <= READING_MODULES_MAX


APPEND = """
import asyncio, sys, threading
import aiopersist as ap

SLOW = {"pandas", "polars", "pyarrow.parquet", "pyarrow.dataset"}
OURS = ("aiopersist.write", "aiopersist.compact", "aiopersist.gc", "aiopersist.maintenance.background")
SLOW |= {*OURS, "aiopersist.state.lifecycle", "aiopersist.maintenance.inspect", "aiopersist.subscription"}
on_the_loop = []

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in SLOW and threading.current_thread() is threading.main_thread():
            on_the_loop.append(name)

VALUES = {bytes: lambda n: b"%d" % n, str: str, int: int, list[int]: lambda n: [n]}

async def append(kind):
    sys.meta_path.insert(0, Watch())
    val = {"bytes": bytes, "str": str, "int": int, "list": list[int]}[kind]
    key = str if kind == "list" else val
    schema, of_key, of_val = ap.Schema(key=key, val=val), VALUES[key], VALUES[val]
    async with ap.open(sys.argv[1]) as client, client.writer("t", schema) as w:
        for n in range(150):
            rows = [(of_key(i), of_val(n), n, 1) for i in range(10)]
            await w.compare_and_append(rows, n, n + 1)
        await w.write([(of_key(i), of_val(i)) for i in range(10)])
        batch = await w.builder(w.upper)
        await batch.add(of_key(1), of_val(2), 151, 1)
        await w.compare_and_append_batch([await batch.finish(152)], 151, 152)
        try:
            await w.write([(of_key(1), None)])
        except ap.InvalidUpdate:
            pass
        await client.admin.force_compaction("t")
        await client.admin.inspect("t")
        async with client.subscription("t", name="s") as subscription:
            await anext(subscription)
        async with client.reader("t", schema) as r, r.snapshot() as s:
            print(len(await s.rows()))
    print(on_the_loop)
    print(sorted({"pandas", "polars"} & set(sys.modules)))

asyncio.run(append(sys.argv[2]))
"""


@pytest.mark.parametrize(
    "kind", ["str", "list", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("bytes", "int"))]
)
async def test_who_appends_plain_values_imports_neither_pandas_nor_polars(kind: str, tmp_path: Path) -> None:
    """Goal: a new process pays for what it uses; what it imports later, it imports beside the event loop."""
    command = [sys.executable, "-c", APPEND, str(tmp_path), kind]
    run = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    rows, on_the_loop, heavy, _ = run.stdout.split("\n")
    assert int(rows) >= 150
    assert on_the_loop == "[]"
    if kind != "list":
        assert heavy == "[]"


TABLES = """
import asyncio, sys, threading
import aiopersist as ap

SLOW = {"pandas", "polars", "pyarrow", "pyarrow.compute", "pyarrow.dataset", "pyarrow.parquet"}
found = []

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in SLOW and threading.current_thread() is threading.main_thread():
            found.append(name)

async def work(name, val, n):
    sys.meta_path.insert(0, Watch())
    async with ap.open(sys.argv[1]) as client:
        t = client.table(name, str, int if val == 1 else list[int])
        print(await t.get("k1") == val)
        print(sorted({"pandas", "polars"} & set(sys.modules)))

        async def body(tx):
            entries = [entry async for entry in tx.items(t)]
            tx.put_many(t, {f"{name}{i}": val for i in range(30)})

        if name == "puts":
            await t.put("a", val)
        await client.transact(body)
        await t.put("a", val)
        await t.put_many({f"k{i}": val for i in range(n)})
        await t.delete("k2", "k3")
        async with t.changes(keys=["a"]) as feed:
            await anext(feed)
        async with t.subscription("s") as sub:
            await sub.ack(await anext(sub))
        assert len([entry async for entry in t.items(prefix="k")]) == n - 2
    print(found)

name = sys.argv[2]
asyncio.run(work(name, [1] if name == "lists" else 1, 50))
"""


@pytest.mark.parametrize("name", ["puts", "transactions", "lists"])
async def test_tables_import_nothing_on_the_event_loop(name: str, tmp_path: Path) -> None:
    """Goal: tasks of the application go on while modules are imported; a get of a table that has plain keys
    and vals needs neither pandas nor polars."""
    async with ap.open(tmp_path, maintenance=False) as client:
        table: Any = client.table(name, str, list[int] if name == "lists" else int)
        await table.put_many({f"k{n}": [1] if name == "lists" else 1 for n in range(20)})
    command = [sys.executable, "-c", TABLES, str(tmp_path), name]
    run = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    there, heavy, on_the_loop, _ = run.stdout.split("\n")
    assert there == "True"
    assert on_the_loop == "[]"
    if name != "lists":
        assert heavy == "[]"


COMMAND = """
import contextlib, io, json, sys
from aiopersist.cli import main

sys.argv = ["aiopersist", *sys.argv[1:]]
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main()
print(json.dumps([out.getvalue(), sorted(sys.modules)]))
"""


@pytest.mark.parametrize("command", ["--version", "ls"])
async def test_a_command_imports_what_it_needs(command: str, tmp_path: Path) -> None:
    """Goal: `--version` takes 0.1 s of processor time, `ls` less than 0.5; arrow alone takes 0.2."""
    async with ap.open(tmp_path, maintenance=False) as client:
        await client.table("stock", str, int).put("apple", 1)
    given = [command] if command == "--version" else [command, "--location", str(tmp_path)]
    run = [sys.executable, "-c", COMMAND, *given]
    done = await asyncio.to_thread(subprocess.run, run, capture_output=True, text=True, check=True)
    text, names = json.loads(done.stdout)
    assert ap.__version__ in text if command == "--version" else "stock" in text
    loaded = {name.partition(".")[0] for name in names}
    assert loaded & {"pyarrow", "numpy", "polars", "pandas", "aiobotocore", "asyncpg"} == set()
    if command == "--version":
        assert loaded & {"rich", "pydantic", "asyncio"} == set()
        assert [name for name in names if name.startswith("aiopersist.")] == [
            "aiopersist.cli",
            "aiopersist.cli.app",
            "aiopersist.cli.terminal",
        ]
