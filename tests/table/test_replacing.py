"""Goal: a large put replaces the vals of its keys, and of no others; the last entry of a key counts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given

import aiopersist as ap
from aiopersist.data.updates.consolidate import contents, sort_and_consolidate
from aiopersist.data.updates.convert import to_table
from aiopersist.table.bulk.replacing import Replacing, ReplacingAll, numbered


class Pair(NamedTuple):
    """A key of two leaves: a row may have one leaf of one key, and the other of another."""

    name: str
    number: int | None


SCHEMA: ap.Schema[Any, Any, int] = ap.Schema(key=Pair, val=float)
KEYS = st.builds(Pair, st.sampled_from(["", "a", "b"]), st.sampled_from([None, -1, 2]))
VALS = st.sampled_from([0.0, -0.0, 1.5, float("nan")])
TIME = 7


def pieces(table: Any, sizes: Sequence[int]) -> list[Any]:
    """The rows in tables of these sizes, and the rest in one."""
    found = []
    for size in sizes:
        found.append(table.slice(0, size))
        table = table.slice(size)
    return [piece for piece in (*found, table) if piece.num_rows]


@pytest.mark.parametrize("whole", [False, True])
@given(
    entries=st.lists(st.tuples(KEYS, VALS), max_size=12),
    before=st.dictionaries(KEYS, VALS, max_size=8),
    sizes=st.lists(st.integers(1, 4), max_size=4),
    old_sizes=st.lists(st.integers(1, 3), max_size=4),
)
def test_it_gives_what_a_dict_would(
    whole: bool, entries: Any, before: Any, sizes: list[int], old_sizes: list[int]
) -> None:
    given_ = to_table(entries, SCHEMA, columns=("key", "val"), row_base=0)
    new = sort_and_consolidate(numbered(given_, 0, SCHEMA))
    there = to_table([(key, val, 0, 1) for key, val in before.items()], SCHEMA)
    old = iter([table.to_batches()[0] for table in pieces(contents(there, SCHEMA), old_sizes)])
    replacing = (ReplacingAll if whole else Replacing)(SCHEMA, TIME)
    updates = []
    for piece in (*pieces(new, sizes), None):
        replacing.add(piece)
        while replacing.needs_old:
            replacing.add_old(next(old, None))
            updates.append(replacing.take_deletions())
        updates += [replacing.take_deletions(), replacing.take()]
    found = [(*row,) for table in updates for row in ap.Updates(table, SCHEMA).rows()]

    after = {**({} if whole else before), **dict(entries)}
    gone = [(key, val, TIME, -1) for key, val in before.items() if not same(after.get(key), val)]
    came = [(key, val, TIME, 1) for key, val in after.items() if not same(before.get(key), val)]
    assert sorted(map(repr, found)) == sorted(repr(row).replace("-0.0", "0.0") for row in gone + came)


def same(one: float | None, other: float | None) -> bool:
    """Whether both are the same val: NaN is one, and so is zero."""
    return repr(one).replace("-0.0", "0.0") == repr(other).replace("-0.0", "0.0")
