"""Goal: the suites for stores run as their docstrings show them, in a project without our configuration:
with pytest-asyncio in strict and in auto mode, and for stores that never let another task run."""

import asyncio
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aiopersist.testing.storage import blob as storage_blob
from aiopersist.testing.storage import consensus as storage_consensus
from aiopersist.testing.storage.wishes import NewerConformance, WishesConformance
from tests.examples import BLOCK

ROOT = Path(__file__).parents[2]

STORES = '''
import os
import time
from collections import defaultdict

import aiopersist as ap
import pytest
from aiopersist.testing.storage import BlobConformance, ConsensusConformance

PLACES = defaultdict(dict)


def place():
    """One for each test; nothing here ever waits."""
    return PLACES[os.environ["PYTEST_CURRENT_TEST"].split(" (")[0]]


class MyBlob(ap.Blob):
    def __init__(self, where): self.data = place()
    async def get(self, key): return self.data.get(key)
    async def get_range(self, key, offset, length):
        value = self.data.get(key)
        return None if value is None else value[offset : offset + length]
    async def set(self, key, data): self.data[key] = bytes(data)
    async def delete(self, keys):
        for key in keys: self.data.pop(key, None)
    async def list(self, prefix):
        for key, value in list(self.data.items()):
            if key.startswith(prefix): yield key, len(value)
    async def aclose(self): pass


class MyConsensus(ap.Consensus):
    """A version per seqno; `watch` returns at once, which a hint may."""
    def __init__(self, where): self.data = place()
    def top(self, key): return max(self.data[key]) if key in self.data else None
    async def head(self, key):
        top = self.top(key)
        return None if top is None else ap.Versioned(top, self.data[key][top])
    async def compare_and_set(self, key, expected, data):
        return await self.compare_and_set_many([(key, expected, data)])
    async def compare_and_set_many(self, entries):
        if any(self.top(key) != expected for key, expected, _ in entries): return False
        for key, expected, data in entries:
            self.data.setdefault(key, {})[0 if expected is None else expected + 1] = data
        return True
    async def scan(self, key, from_seqno, limit):
        found = sorted((s, d) for s, d in self.data.get(key, {}).items() if s >= from_seqno)
        return [ap.Versioned(*version) for version in found[:limit]]
    async def truncate(self, key, seqno):
        if key not in self.data or seqno > self.top(key): raise ValueError(f"{seqno} is beyond the head")
        gone = [s for s in self.data[key] if s < seqno]
        for s in gone: del self.data[key][s]
        return len(gone)
    async def remove(self, key, expected):
        if key not in self.data: return True
        return await self.head(key) == expected and bool(self.data.pop(key))
    async def list_keys(self, prefix): return sorted(key for key in self.data if key.startswith(prefix))
    async def watch(self, key): pass
    async def now(self): return time.time()
    async def aclose(self): pass
'''


OPTIONAL = 1 + sum(name.startswith("test_") for name in [*vars(NewerConformance), *vars(WishesConformance)])
"""Tests of what a store need not do; the one of a blob store is `create`."""


def example(docstring: str | None) -> str:
    """The code that a docstring shows, as it stands there."""
    assert docstring is not None
    found = re.search(r"^(    class TestMine.*?)^(?=\S)", docstring, re.MULTILINE | re.DOTALL)
    assert found is not None
    return textwrap.dedent(found[1])


@pytest.mark.parametrize("mode", ["strict", pytest.param("auto", marks=pytest.mark.long)])
async def test_the_suites_run_as_they_say(tmp_path: Path, mode: str) -> None:
    shown = [example(module.__doc__) for module in (storage_blob, storage_consensus)]
    shown[1] = shown[1].replace("TestMine", "TestMyConsensus")
    (tmp_path / "test_mine.py").write_text("\n\n".join([STORES, *shown]))
    (tmp_path / "pytest.ini").write_text("" if mode == "strict" else "[pytest]\nasyncio_mode = auto\n")
    assert await passed(tmp_path) > 80


async def passed(project: Path) -> int:
    """The number of tests there: none fails, and only those of what a store need not do are skipped."""
    options = ["-q", "-p", "no:cacheprovider", "--timeout=30"]
    command = [sys.executable, "-m", "pytest", *options, "test_mine.py"]
    ran = await asyncio.to_thread(subprocess.run, command, cwd=project, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert re.findall(r"(\d+) skipped", ran.stdout) == [str(OPTIONAL)]
    found = re.search(r"(\d+) passed", ran.stdout)
    assert found is not None
    return int(found[1])


async def test_the_backend_of_the_page_passes_the_suites(tmp_path: Path) -> None:
    """Goal: `docs/stores.md` shows stores that keep their promises."""
    page = (ROOT / "docs/stores.md").read_text(encoding="utf-8")
    blocks = [block.partition("async with")[0] for block in BLOCK.findall(page) if "class " in block]
    assert len(blocks) == 3
    (tmp_path / "test_mine.py").write_text("\n\n".join(blocks))
    assert await passed(tmp_path) > 80
