"""Work on columns beside the same by hand: consolidation, parts, inline parts."""

from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.frontier import Antichain, Description
from aiopersist.data.part.inline import decode_inline, encode_inline
from aiopersist.data.part.part import PartWriter, decode_part
from aiopersist.data.updates.consolidate import sort_and_consolidate
from benches import byhand

SCHEMA = ap.Schema(key=bytes, val=bytes)
DESCRIPTION = Description(Antichain(0), Antichain(), Antichain(0))
ROW_GROUP_BYTES = 8 * 1024 * 1024
SHORT = 100_000  # rows, where nothing is measured: still two row groups


@pytest.mark.parametrize("n", [100, 10_000, 500_000])
def test_consolidate(n: int, rounds: Any, enabled: bool) -> None:
    n = n if enabled else min(n, SHORT)
    table = byhand.table(n)

    async def ours() -> None:
        assert sort_and_consolidate(table).num_rows == n

    async def by_hand() -> None:
        assert byhand.consolidate(table).num_rows == n

    rounds({"by hand": by_hand, "ours": ours}, 200 if n < 1_000 else 9)


def test_encode_part(rounds: Any, enabled: bool) -> None:
    table = sort_and_consolidate(byhand.table(500_000 if enabled else SHORT))
    encoded = PartWriter(SCHEMA, DESCRIPTION).whole(table, ROW_GROUP_BYTES)
    other = byhand.part(table)

    async def encode() -> None:
        PartWriter(SCHEMA, DESCRIPTION).whole(table, ROW_GROUP_BYTES)

    async def encode_by_hand() -> None:
        byhand.part(table)

    rounds({"encode by hand": encode_by_hand, "encode": encode}, 7)
    assert encoded.size < 1.5 * len(other)
    assert decode_part(encoded.data, encoded, SCHEMA).equals(table)


def test_decode_part(rounds: Any, enabled: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = sort_and_consolidate(byhand.table(500_000 if enabled else SHORT))
    encoded = PartWriter(SCHEMA, DESCRIPTION).whole(table, ROW_GROUP_BYTES)
    other = byhand.part(table)

    async def decode() -> None:
        assert decode_part(encoded.data, encoded, SCHEMA).num_rows == table.num_rows

    async def decode_by_hand() -> None:
        assert pq.read_table(pa.BufferReader(other)).num_rows == table.num_rows

    rounds({"decode by hand": decode_by_hand, "decode": decode}, 9)


def test_inline_part(rounds: Any) -> None:
    """Ten rows as an IPC message and as a small Parquet file."""
    table = sort_and_consolidate(byhand.table(10))
    data = encode_inline(table)
    part = PartWriter(SCHEMA, DESCRIPTION).whole(table, ROW_GROUP_BYTES)

    async def inline() -> None:
        decode_inline(encode_inline(table), SCHEMA, None)

    async def parquet() -> None:
        PartWriter(SCHEMA, DESCRIPTION).whole(table, ROW_GROUP_BYTES)
        decode_part(part.data, part, SCHEMA)

    assert len(data) < part.size
    rounds({"inline": inline, "Parquet": parquet}, 200)
