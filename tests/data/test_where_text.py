"""Goal: a condition as text keeps the rows that it says, and no others; a wrong one is refused there."""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any

import pyarrow as pa
import pytest
from pydantic import BaseModel, Field

import aiopersist as ap
from aiopersist.data.part.select import apply_where
from aiopersist.data.part.where_text import parse_where
from aiopersist.data.updates.convert import to_table
from tests.support.schemas import NAN


class Val(BaseModel):
    amount: int | None
    weight: float
    name: str
    at: datetime
    day: date
    price: Annotated[Decimal, Field(max_digits=10, decimal_places=2)]
    good: bool
    data: bytes


SCHEMA = ap.Schema(str, Val)


def val(n: int, **values: Any) -> Val:
    plain = {
        "amount": n, "weight": n / 2, "name": f"n{n}", "at": datetime(2026, 1, 1 + n, tzinfo=UTC),
        "day": date(2026, 1, 1 + n), "price": Decimal(n) / 4, "good": n % 2 == 1, "data": bytes([97 + n]),
    }  # fmt: skip
    return Val(**{**plain, **values})


ROWS = [(key, val(n)) for n, key in enumerate("abcdef")]
ROWS[5] = ("f", val(5, amount=None, weight=NAN, name="it's"))


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return to_table([(key, row, 0, 1) for key, row in ROWS], SCHEMA)


def test_a_fraction_beside_large_integers() -> None:
    """Goal: no comparison goes by floats, which have too few digits."""
    schema = ap.Schema(int, int)
    there = to_table([(2**62, 1, 0, 1), (2**53 + 1, 1, 0, 1), (3, 1, 0, 1)], schema)
    for text, keys in [
        ("key < 3.5", {3}),
        ("key > 9007199254740992.5", {2**53 + 1, 2**62}),
        ("key <= 9007199254740992.5", {3}),
        ("key in (9007199254740993.0, 3.5)", {2**53 + 1}),
        ("key < 1e40 and key > 4611686018427387903.5", {2**62}),
    ]:
        assert set(apply_where(there, parse_where(text, schema), schema).column("key").to_pylist()) == keys, (
            text
        )


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('key >= "c" and val.amount > 3', "e"),
        ("key = 'a' or key == \"c\"", "ac"),
        ("not key <> 'b'", "b"),
        ("amount <= 1", "ab"),
        ("1 >= val.amount", "ab"),
        ("amount > 1.5 AND amount < 3.5", "cd"),
        ("-1 < amount and amount < 1", "a"),
        ("amount is null", "f"),
        ("amount IS NOT NULL and good", "bd"),
        ("not good", "ace"),
        ("good = false", "ace"),
        ("key in ('a', 'x', \"f\")", "af"),
        ("amount not in (0, 1, 2)", "de"),
        ("amount in (4)", "e"),
        ("not (amount < 4)", "e"),
        ("key = 'a' or key = 'b' and amount = 7", "a"),
        ("(key = 'a' or key = 'b') and amount = 7", ""),
        ("at >= '2026-01-05T00:00Z'", "ef"),
        ("at < '2026-01-02T01:00+01:00'", "a"),
        ("day = '2026-01-03'", "c"),
        ("price >= 0.75 and price < 1.25", "de"),
        ("price = 1", "e"),
        ("price = '0.75' or '1.00' = price", "de"),
        ("price > 0.749 and price <= 0.7501", "d"),
        ("price = 0.7500", "d"),
        ("price = 0.7501 or price <> 0.7501", "abcdef"),
        ("price in (0.7501, 0.5)", "c"),
        ("price > -1e-200 and price < 1e-200", "a"),
        ("price < 1e30 and price > -1e30", "abcdef"),
        ("price >= 1e30 or price <= -1e300", ""),
        ("amount in (1.5, 2.0)", "c"),
        ("amount < 99999999999999999999 and amount <> 99999999999999999999", "abcde"),
        ("amount = -99999999999999999999 or amount in (99999999999999999999, 3)", "d"),
        ("not amount in (1)", "acde"),
        ("not (amount not in (1))", "b"),
        ("not weight in (0.5)", "acdef"),
        ("price < 99999999999 and price in (99999999999, 1)", "e"),
        ("amount not in (1.5, 2.0)", "abde"),
        ("amount = 1.5 or amount <> 1.5", "abcde"),
        ("not (amount = 1.5)", "abcde"),
        ("2.5 < amount", "de"),
        ("2.5 >= amount", "abc"),
        ("amount < -1e-200", ""),
        ("amount > -1e-200 and amount < 1e200", "abcde"),
        ("data = 'b'", "b"),
        ("name = 'it''s'", "f"),
        ("`val`.`amount` = 2", "c"),
        ("weight >= 1.5", "de"),
        ("amount < weight", ""),
        ("amount > weight", "bcde"),
        ("val.name > key", "abcdef"),
    ],
)  # fmt: skip
def test_what_is_kept(text: str, keys: str, table: pa.Table) -> None:
    found = apply_where(table, parse_where(text, SCHEMA), SCHEMA)
    assert "".join(found.column("key").to_pylist()) == keys


@pytest.mark.parametrize(
    ("text", "problem", "at"),
    [
        ("", "expected a column or a value", 0),
        ("key", "expected a comparison", 3),
        ("key >=", "expected a column or a value", 6),
        ("key >= and val.amount > 3", "expected a column or a value", 7),
        ("key = 'a' val", "one thing too many", 10),
        ("key = 'a", "no name, number, text or sign", 6),
        ("colour = 1", "no column 'colour'", 0),
        ("val.amount > 'x'", "cannot be compared with a column of type int64", 13),
        ("key = 3", "cannot be compared with a column of type string", 6),
        ("good = 1", "cannot be compared with a column of type bool", 7),
        ("amount = true", "cannot be compared", 9),
        ("at > 'yesterday'", "cannot be compared with a column of type timestamp", 5),
        ("at > '2026-01-05T00:00'", "cannot be compared", 5),
        ("1 = 1", "no column", 0),
        ("(key = 'a'", "expected )", 10),
        ("key in ()", "expected a column or a value", 8),
        ("key in (val.name)", "expected a value", 8),
        ("key not 'a'", "expected in", 8),
        ("amount is 3", "expected null", 10),
        ("amount = 3x", "no name, number", 9),
        ("key = 'a'; drop", "no name, number", 9),
        ("val = 'a'", "cannot be compared", 6),
        ("(" * 60 + "good" + ")" * 60, "nested too deep", 50),
        ("good or " * 5000 + "good", "too long", 8000),
        ("__import__('os') = 1", "no column '__import__'", 0),
    ],
)
def test_what_is_refused(text: str, problem: str, at: int) -> None:
    with pytest.raises(ap.InvalidUsage) as refused:
        parse_where(text, SCHEMA)
    assert problem in str(refused.value)
    assert refused.value.at == at
    assert f"at character {at + 1}: " in str(refused.value)


def test_a_long_one(table: pa.Table) -> None:
    """Goal: the longest condition is one that Arrow can walk."""
    where = parse_where("good or " * 999 + "good", SCHEMA)
    assert apply_where(table, where, SCHEMA).num_rows == 3
