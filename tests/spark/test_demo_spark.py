"""Goal: the demo on Spark verifies itself, and can tell when it should fail."""

import asyncio
import importlib.util
import re
from pathlib import Path

import pytest

import aiopersist as ap
from aiopersist.demo.git import FileVersion, Repository
from tests.cli.test_demo import demo, one_line
from tests.cli.test_demo_indexed import DATES, repository
from tests.spark.conftest import need_spark

__all__ = ["repository"]


def test_two_demos_at_once_are_refused(tmp_path: Path) -> None:
    result = demo("--spark", "--indexed", cwd=tmp_path)
    assert (result.status, one_line(result)) == (
        2,
        "aiopersist: --tables, --indexed and --spark are separate demos: choose one\n",
    )


@pytest.mark.skipif(importlib.util.find_spec("pyspark") is not None, reason="pyspark is here")
def test_without_pyspark_it_says_what_to_install(repository: Path) -> None:
    result = demo("--spark", cwd=repository)
    assert result.status == 2
    assert "pip install '.[spark]' in a clone" in one_line(result)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_it_loads_follows_compacts_and_checks(repository: Path, tmp_path: Path) -> None:
    need_spark()
    kept = tmp_path / "kept"
    first = await asyncio.to_thread(demo, repository, "--spark", "--location", kept, "--limit", 3)
    assert first.status == 0, first.err
    assert "3 commits loaded by Spark" in first.out
    second = await asyncio.to_thread(demo, repository, "--spark", "--location", kept)
    assert second.status == 0, second.err
    assert re.search(r"\d+ DataFrames \(\d+ rows\), the compacted shard and the subscriber's", second.out)
    commits = await (await Repository.find(repository)).first_parents()
    async with ap.open(kept) as client:
        schema = ap.Schema(key=bytes, val=FileVersion)
        wrong = FileVersion(mode=0o100644, blob=b"\0" * 20, size=1)
        async with client.writer(f"spark-{commits[0]}", schema) as writer:
            assert writer.upper == ap.Antichain(len(DATES))
        await client.admin.drop(f"spark-{commits[0]}")
        async with client.writer(f"spark-{commits[0]}", schema) as writer:
            await writer.compare_and_append([(b"no-such-file", wrong, 0, 1)], 0, 1)
    third = await asyncio.to_thread(demo, repository, "--spark", "--location", kept)
    assert third.status == 1
    assert "differs from git at" in third.err  # after what Java has to say
