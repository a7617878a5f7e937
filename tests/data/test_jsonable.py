"""Columns as JSON texts: exact, one text per value, the same form as single values have."""

import datetime as dt
import json
from decimal import Decimal, localcontext
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings

from aiopersist.data import jsonable
from aiopersist.data.jsonable import FEW, _texts_by_kernels, column_from_texts, column_texts, to_json
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.convert import to_table
from tests.data import data_oracle as oracle


@pytest.mark.parametrize("case", oracle.CASES.values(), ids=oracle.CASES.keys())
def test_columns_come_back(case: oracle.Case) -> None:
    """Goal: a text per value and a value per text, also of slices and of several chunks."""
    schema = Schema(key=case.key_type, val=case.val_type, time=case.time)

    @settings(max_examples=20)
    @given(oracle.rows_of(case))
    def check(rows: list[Any]) -> None:
        table = to_table(rows, schema)
        for position, name in enumerate(("key", "val")):
            column = table.column(name)
            texts = column_texts(column)
            back = column_from_texts(texts, column.type)
            assert back.type == column.type
            assert column_texts(back) == texts
            field = schema.key if position == 0 else schema.val
            values = [row[position] for row in rows]
            ranks = list(map(oracle.canonical, values))
            assert list(map(oracle.canonical, field.decode(back))) == ranks
            assert len(set(texts)) == len(set(ranks)) == len(set(zip(texts, ranks, strict=True)))
            assert [json.loads(text) for text in texts] == [to_json(scalar) for scalar in column]
            assert column_texts(column.slice(1)) == texts[1:]
            assert column_texts(pa.chunked_array([*column.chunks, *column.slice(1).chunks], column.type)) == (
                texts + texts[1:]
            )
            many = column.take(pa.array([*range(len(rows))] * FEW, pa.int64()))
            assert column_texts(many) == texts * FEW, "kernels say what Python's encoder says"
            assert column_texts(many.slice(len(rows) // 2)) == (texts * FEW)[len(rows) // 2 :]

    check()


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        (pa.array([dt.time(1, 2), None], pa.time32("s")), ["3720", "null"]),
        (pa.array([dt.timedelta(seconds=1)], pa.duration("ms")), ["1000"]),
        (pa.array([1.5, None], pa.float32()), ["1.5", "null"]),
        (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
        (pa.array([b"ab"], pa.binary(2)), ['"YWI="']),
        (pa.array(['a\n,\x00"é']), ['"a\\n,\\u0000\\"é"']),
        (pa.array([{'50% "off"': 1}]), ['{"50% \\"off\\"":1}']),
        (pa.array(['a"', "é\x7f\u2028", "b\\", None]), ['"a\\""', '"é\x7f\u2028"', '"b\\\\"', "null"]),
        (pa.array(["\x1f"]), ['"\\u001f"']),
        (pa.array([True, None, False]), ["true", "null", "false"]),
        (pa.array([-(2**63)]), ["-9223372036854775808"]),
        (pa.array([{"a": None, "b": {"c": 1}}, None]), ['{"a":null,"b":{"c":1}}', "null"]),
        (pa.array([], pa.struct([("a", pa.int64())])), []),
        (pa.array([[[1], []], None, []]), ["[[1],[]]", "null", "[]"]),
    ],
    ids=lambda value: str(getattr(value, "type", ""))[:20],
)
def test_texts(column: pa.Array, texts: list[str]) -> None:
    assert column_texts(column) == texts
    many = pa.chunked_array([column] * (FEW + 1), column.type)
    assert column_texts(many) == texts * (FEW + 1)
    if len(column):
        assert column_texts(many.combine_chunks()) == texts * (FEW + 1)
    assert column_from_texts(texts, column.type).equals(column)


def test_many_texts_make_a_column_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a chunk has no more text than an array may have; a longer text has a chunk of its own."""
    monkeypatch.setattr(jsonable, "CHUNK_LENGTH_MAX", 10)
    values = ["a" * length for length in (8, 3, 3, 20, 0, 0, 4, 5, 30)]
    column = column_from_texts(column_texts(pa.array(values)), pa.string())
    assert [chunk.to_pylist() for chunk in column.chunks] == [
        *([values[0]], values[1:3], [values[3]], values[4:7], [values[7]], [values[8]])
    ]


def test_kernels_take_plain_columns() -> None:
    """Goal: what most tables have is not encoded value by value; else a table of 100,000 keys opens late."""
    row = {"name": "é", "at": dt.datetime(2020, 1, 1), "inner": {"n": 1, "x": 1.5, "flag": True}}
    for column in (pa.array(["a"]), pa.array([1]), pa.array([row]), pa.array([dt.date(2020, 1, 1)])):
        assert _texts_by_kernels(column) == column_texts(column)


def test_texts_do_not_depend_on_the_decimal_context() -> None:
    """Goal: a stash finds a key by its text."""
    column = pa.array([Decimal(0), Decimal("1E-9")], pa.decimal128(38, 9))
    with localcontext(capitals=0, prec=1):
        assert column_texts(column) == ['"0E-9"', '"1E-9"']
        assert [to_json(scalar) for scalar in column] == ["0E-9", "1E-9"]
        assert column_from_texts(column_texts(column), column.type).equals(column)
