"""Goal: `aiopersist sql` answers queries over shards and tables by their names, as of a time, in each format;
errors are sentences; nothing is written to the location."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.cli.command import CannotBegin
from aiopersist.cli.sql import named
from tests.cli.test_commands import aiopersist


class Item(BaseModel):
    team: str
    amount: int


async def _fill(folder: Path) -> int:
    async with ap.open(folder, maintenance=False) as client:
        stock = client.table("stock", str, Item)
        then = await stock.put("apple", Item(team="a", amount=1))
        await stock.put_many({f"k{n:03}": Item(team="ab"[n % 2], amount=n) for n in range(200)})
        async with client.writer("old-stock", ap.Schema(int, str)) as writer:
            await writer.append([(1, "x", 0, 3), (2, "y", 0, 1)], 0, 1)
        return then


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("location")
    return folder, asyncio.run(_fill(folder))


def rows(folder: Path, query: str, *options: Any) -> list[Any]:
    answer = aiopersist("sql", query, "--json", *options, "--location", folder)
    assert answer.status == 0, answer.err
    return [json.loads(line) for line in answer.out.splitlines()]


def test_tables_and_shards_by_name(filled: tuple[Path, int]) -> None:
    folder, then = filled
    sums = "select team, sum(amount)::int s, count(*) n from stock where amount >= 100 group by 1 order by 1"
    assert rows(folder, sums) == [{"team": "a", "s": 7450, "n": 50}, {"team": "b", "s": 7500, "n": 50}]
    assert rows(folder, "from stock", "--as-of", then) == [{"key": "apple", "team": "a", "amount": 1}]
    both = """select o.key, val, diff, amount from "old-stock" o join stock s on amount = o.key
              where s.key <> 'apple'"""
    assert sorted(map(str, rows(folder, both))) == [
        "{'key': 1, 'val': 'x', 'diff': 3, 'amount': 1}",
        "{'key': 2, 'val': 'y', 'diff': 1, 'amount': 2}",
    ]
    assert rows(folder, "select 1 as one") == [{"one": 1}]


def test_formats(filled: tuple[Path, int], tmp_path: Path) -> None:
    folder, _ = filled
    query = "select key, amount from stock where key < 'k002' order by key"
    csv = aiopersist("sql", query, "--format", "csv", "--location", folder)
    assert csv.out.splitlines() == ["key,amount", "apple,1", "k000,0", "k001,1"]
    table = aiopersist("sql", query, "--format", "table", "--location", folder)
    assert "apple" in table.out and "│" in table.out
    file = tmp_path / "rows.parquet"
    written = aiopersist("sql", query, "--to", file, "--location", folder)
    assert (written.status, written.out) == (0, f"3 rows in {file}\n")
    assert pq.read_table(file).to_pylist()[0] == {"key": "apple", "amount": 1}
    assert aiopersist("sql", query, "--to", tmp_path / "x.what", "--location", folder).status == 2


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("from stok", 1, "stok does not exist"),
        ("from stok", 1, "there are 'old-stock', 'stock'"),
        ("selec", 1, "syntax error"),
        ("select amount / 'x' from stock", 1, "x"),
        ("select error('no ' || key) from stock", 1, "no apple"),
    ],
)
def test_errors_are_sentences(filled: tuple[Path, int], query: str, status: int, message: str) -> None:
    answer = aiopersist("sql", query, "--location", filled[0])
    assert (answer.status, answer.out) == (status, "")
    assert message in answer.err and "Traceback" not in answer.err


def test_a_time_that_cannot_be_read(filled: tuple[Path, int]) -> None:
    answer = aiopersist("sql", 'from "old-stock"', "--as-of", 7, "--location", filled[0])
    assert answer.status == 1 and "not complete at 7" in answer.err


def test_names_in_a_query() -> None:
    names = ["stock", "old-stock", "Team", "a.b", 'q"uote', "x"]
    assert named("select stocks from OLD_stock", names) == []
    assert named('from "old-stock" join STOCK', names) == ["stock", "old-stock"]
    assert named('select team from "a.b", "q""uote"', names) == ["Team", "a.b", 'q"uote']
    assert named("from Team, t", ["Team", "team"]) == ["Team"]
    for query in ("from TEAM", 'from "Team", team'):
        with pytest.raises(CannotBegin, match="'Team' and 'team'"):
            named(query, ["Team", "team"])


def test_without_duckdb(filled: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    answer = aiopersist("sql", "from stock", "--location", filled[0])
    assert answer.status == 2 and ".[sql]" in answer.err


def test_an_interrupt_ends_it(filled: tuple[Path, int]) -> None:
    query = "select count(*) from stock a, stock b, stock c, stock d, stock e where a.amount + e.amount > 7"
    command = [sys.executable, "-m", "tests.cli.main", "sql", query, "--json", "--location", str(filled[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        while run.poll() is None and b"duckdb" not in Path(f"/proc/{run.pid}/maps").read_bytes():
            os.sched_yield()
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
