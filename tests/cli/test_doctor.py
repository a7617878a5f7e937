"""Goal: `aiopersist doctor` tries what a client needs of a location, leaves nothing behind, and says what is
unusual."""

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from typer.testing import CliRunner

import aiopersist as ap
from aiopersist.cli.app import app
from aiopersist.cli.doctor import FAILED, OK, UNUSUAL, _races, judged_clock, judged_fact, judged_latency
from aiopersist.storage.objects.consensus import ObjectsConsensus
from tests.cli.result import Result
from tests.storage.objects_kit import Objects, World
from tests.storage.test_objects_opening import LooksThenWrites


def doctor(*arguments: object) -> Result:
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    return Result(done.exit_code, done.stdout, done.stderr)


def findings(*arguments: object, status: int = 0) -> dict[str, tuple[str, str]]:
    """What was found, with its verdict."""
    done = doctor(*arguments, "--json")
    assert done.status == status, done
    return {finding["what"]: (finding["found"], finding["verdict"]) for finding in json.loads(done.out)}


def test_a_directory(tmp_path: Path) -> None:
    """Goal: it is tried from end to end, and holds nothing more than before; none is made where there is
    none."""

    async def make() -> None:
        async with ap.open(tmp_path / "data"):
            pass

    asyncio.run(make())
    found = findings("--location", tmp_path / "data")
    assert found["compare-and-set"] == ("refuses an unexpected version", OK)
    assert {"python", "pyarrow", "clock", "commit", "head", "put", "get", "blobs"} <= found.keys()
    assert found["race"] == ("one of 8 writers wins, 20 times", OK)
    assert found["consensus journal_mode"] == ("wal", OK)
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file() and "doctor" in str(path)]

    async def keys() -> list[str]:
        consensus = ap.open_consensus(f"sqlite://{tmp_path}/data/state.db")
        try:
            return await consensus.list_keys("doctor/")
        finally:
            await consensus.aclose()

    assert asyncio.run(keys()) == []
    assert "at worst" in doctor("--location", tmp_path / "data").out
    assert doctor("--location", tmp_path / "nothing").status == 2
    assert not (tmp_path / "nothing").exists()


async def test_a_store_that_loses_races() -> None:
    """Goal: a conditional put that is a look and then a write is found, though it passes alone."""
    for bucket, verdict in ((LooksThenWrites(World({})), FAILED), (Objects(World({})), OK)):
        (found,) = await _races(ObjectsConsensus(bucket))
        assert found.verdict == verdict


async def _opened(s3_url: str, postgres_url: str) -> None:
    async with ap.open(blob=s3_url, consensus=postgres_url):
        pass


def test_servers(best_s3_url: str, postgres_url: str) -> None:
    """Goal: what the servers say of themselves, and whether S3 knows conditional puts; no secrets."""
    asyncio.run(_opened(best_s3_url, postgres_url))
    done = doctor("--blob", best_s3_url, "--consensus", postgres_url)
    assert done.status == 0
    assert "secret" not in done.out
    found = findings("--blob", best_s3_url, "--consensus", postgres_url)
    assert found["consensus store"][0].startswith("Postgres ")
    assert found["consensus synchronous_commit"] == ("on", OK)
    assert found["consensus in_recovery"] == ("false", OK)
    assert found["race"][1] == OK
    assert found["blob conditional puts"][0] in ("yes", "no")


def test_a_role_that_may_only_read(best_s3_url: str, postgres_url: str) -> None:
    """Goal: what fails is a finding; the rest is tried, and the exit status is 1."""
    asyncio.run(_opened(best_s3_url, postgres_url))
    reader = asyncio.run(_reader(postgres_url))
    found = findings("--blob", best_s3_url, "--consensus", reader, status=1)
    assert found["commits"][1] == FAILED
    assert found["blobs"][1] == OK


async def _reader(postgres_url: str) -> str:
    """The URL of a role that may not write."""
    address, _, options = postgres_url.partition("?")
    schema, role = options.partition("schema=")[2].partition("&")[0], f"r_{uuid4().hex[:12]}"
    connection = await asyncpg.connect(address)
    try:
        await connection.execute(f"CREATE ROLE {role} LOGIN")
        await connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
        await connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}")
    finally:
        await connection.close()
    return f"{address.replace('postgres@', f'{role}@')}?{options}"


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (judged_latency("commit", [0.001] * 3), OK),
        (judged_latency("commit", [0.00001] * 3), UNUSUAL),  # no disk is so fast
        (judged_latency("commit", [0.2] * 3), UNUSUAL),
        (judged_latency("get", [0.01, 0.01, 9.0]), OK),  # one pause says nothing
        (judged_clock(0.5), OK),
        (judged_clock(-3.0), UNUSUAL),
        (judged_fact("consensus fsync", "off"), UNUSUAL),
        (judged_fact("consensus fsync", "on"), OK),
        (judged_fact("blob fsync", "off"), UNUSUAL),
        (judged_fact("blob store", "off"), OK),
        (judged_fact("consensus store", "SQLite 3.51.2"), UNUSUAL),
        (judged_fact("consensus store", "SQLite 3.9.10"), UNUSUAL),
        (judged_fact("consensus store", "SQLite 3.51.3"), OK),
        (judged_fact("consensus store", "SQLite 4.0"), OK),
        (judged_fact("consensus store", "Postgres 18"), OK),
    ],
)
def test_verdicts(finding: Any, verdict: str) -> None:
    assert finding.verdict == verdict
    assert bool(finding.advice) is (verdict != OK)
