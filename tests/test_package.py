"""What a program gets by `import aiopersist`: quickly, typed, and nothing that it did not ask for."""

import json
import re
import statistics
import subprocess
import sys
from importlib.metadata import files, version
from importlib.resources import files as resources

import pytest

IMPORT_MAX_S = 0.3
NOISE = 2.0  # slower machines; the modules that would cost the time are named below

HEAVY = {
    "aiobotocore",
    "aiohttp",
    "asyncpg",
    "botocore",
    "numpy",
    "pandas",
    "polars",
    "pyarrow",
    "rich",
    "sqlite3",
    "typer",
}

MEASURE = """
import sys, time
before = time.process_time()  # waiting for a core says nothing
import aiopersist
after = time.process_time()
import json
print(json.dumps([after - before, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def imported() -> tuple[float, set[str]]:
    # isolated: neither the environment nor the directory of the tests has a say
    run = subprocess.run([sys.executable, "-I", "-c", MEASURE], capture_output=True, text=True, check=True)
    seconds, names = json.loads(run.stdout)
    return seconds, set(names)


def test_import_is_quick_and_loads_nothing_heavy() -> None:
    runs = [imported() for _ in range(5)]
    assert runs[0][1] & HEAVY == set()
    assert statistics.median(seconds for seconds, _ in runs) <= IMPORT_MAX_S * NOISE


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
