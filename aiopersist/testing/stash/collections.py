"""What every stash must do, as a test class to inherit from.

    class TestMine(StashConformance):
        @pytest.fixture
        def url(self):
            return "sqlite:///..."     # a URL without a stash yet, which `aiopersist.stash.open` opens

Needs pytest and pytest-asyncio. The tests write through one handle and read through the other. This file is
about collections; `append`, `typed` and `owners` have the other parts.
"""

from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from itertools import product
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio
from pydantic import BaseModel

from aiopersist import stash as stashes
from aiopersist.base.errors import CodecMismatch, DiffOverflow, InvalidUpdate, InvalidUsage
from aiopersist.base.frontier import TIME_MAX, Antichain, frontier
from aiopersist.stash import AppendBatch, NothingSealed, Stash, StashCollection
from aiopersist.testing.stash.append import EMPTY, StashAppend, at_four, refused, sealed, visible
from aiopersist.testing.stash.owners import CHANGES, READS, StashOwners
from aiopersist.testing.stash.typed import StashTyped

DIFF_MAX = 2**63 - 1


class Color(Enum):
    """Stored by name, so GREEN comes before RED."""

    GREEN = 2
    RED = 1


class Point(BaseModel, frozen=True):
    x: int
    label: str | None = None


class Line(BaseModel):
    begin: Point
    tags: list[str] = []


VALUES: dict[str, tuple[Any, list[Any]]] = {
    "str": (str, ["", "B", "a", "a\0b", 'a"\\\n', "ab", "k" * 3000, "ä", "日本", "\uffff", "🙂"]),
    "bytes": (bytes, [b"", b"\0", b"a", b"\xff"]),
    "int": (int, [-(2**63), -10, -9, 0, 2, 10, 2**53 + 1, 2**63 - 1]),
    "float": (float, [float("-inf"), -1.5, 0.0, 5e-324, 0.1, 10.0, 1e300, float("inf")]),
    "bool": (bool, [False, True]),
    "datetime": (datetime, [datetime(1969, 1, 1, tzinfo=UTC), datetime(2024, 5, 6, 7, 8, 9, 123456, UTC)]),
    "date": (date, [date(1, 1, 1), date(2024, 5, 6)]),
    "Decimal": (Decimal, [Decimal("-1.5"), Decimal(2), Decimal("10.000000001")]),
    "UUID": (UUID, [UUID(int=0), UUID(int=5), UUID(int=2**128 - 1)]),
    "Enum": (Color, [Color.GREEN, Color.RED]),
    "list": (list[int], [[], [2], [2, 1], [10]]),
    "optional": (str | None, [None, "", "a"]),
    "unit": (None, [None]),
    "model": (Point, [Point(x=-1), Point(x=2), Point(x=2, label=""), Point(x=10, label="a")]),
}
NAMES = ["a", "A", "a ", "größe/日本/🙂", 'it\'s "quoted"; --', "100%_\\", "a\nb", "n" * 512]
OTHER_CODECS = {
    "key": (int, int),
    "val": (str, str),
    "val, optional": (str, int | None),
    "key, optional": (str | None, int),
    "model": (str, Line),
    "unit": (str, None),
}
BAD_ENTRIES: dict[str, Any] = {
    "key": ((1, 1), 5, 1),
    "key that is no text": (("\ud800", 1), 5, 1),
    "val": (("a", "x"), 5, 1),
    "bool for an int": (("a", True), 5, 1),
    "no val": (("a", None), 5, 1),
    "negative time": (("a", 1), -1, 1),
    "time too great": (("a", 1), 2**63, 1),
    "product time": (("a", 1), (5, 5), 1),
    "diff too great": (("a", 1), 5, 2**63),
    "float diff": (("a", 1), 5, 1.5),
    "no diff": (("a", 1), 5),
    "no pair": ("abc", 5, 1),
}


class StashConformance(StashAppend, StashTyped, StashOwners):
    """Inherit, and define a fixture `url`: a URL without a stash yet."""

    pytestmark = pytest.mark.asyncio

    @pytest_asyncio.fixture
    async def stash(self, url: str) -> AsyncIterator[Stash]:
        """The owner."""
        async with stashes.open(url) as stash:
            yield stash

    @pytest_asyncio.fixture
    async def other(self, url: str, stash: Stash) -> AsyncIterator[Stash]:
        """Another handle on the same stash, which fences no opener."""
        async with stashes.open(url, exclusive=False) as other:
            yield other

    # --- collections -----------------------------------------------------------------------------

    async def test_a_new_collection_is_empty(self, stash: Stash, other: Stash) -> None:
        created = [await stash.collection(name, str, int) for name in NAMES]
        assert [c.name for c in created] == NAMES
        assert len({c.id for c in created}) == len(NAMES)
        assert [(await other.collection(name, str, int)).id for name in NAMES] == [c.id for c in created]
        assert await visible(other, *created) == [([], Antichain(0), Antichain(0))] * len(created)

    async def test_a_handle_works_with_every_opener(self, stash: Stash, other: Stash, url: str) -> None:
        c = await stash.collection("c", str, int)
        await other.update(c, ("a", 1), 0, 1)
        await other.seal(c, 1)
        assert await stash.peek(c) == [("a", 1, 1)]
        async with stashes.open(url, readonly=True) as reader:
            assert await reader.peek(c) == [("a", 1, 1)]

    async def test_codecs_are_the_same_every_time(self, stash: Stash, other: Stash) -> None:
        c = await stash.collection("c", str, int)
        for handle, (key, val) in product((stash, other), OTHER_CODECS.values()):
            with pytest.raises(CodecMismatch, match="'c'") as caught:
                await handle.collection("c", key, val)
            assert caught.value.requested != caught.value.actual
        assert (await other.collection("c", str, int)).id == c.id

    @pytest.mark.parametrize(("type_", "values"), VALUES.values(), ids=VALUES)
    async def test_values_come_back_in_order(
        self, stash: Stash, other: Stash, type_: Any, values: list[Any]
    ) -> None:
        """As keys and as values, whatever the order in which they were written."""
        both = await stash.collection("both", type_, type_)
        expected = [(pair, time, 1) for pair in product(values, values) for time in (0, 1)]
        await stash.update_many(both, expected[::-1])
        assert await other.iter(both) == expected
        assert await other.iter_key(both, values[-1]) == [(v, t, 1) for v in values for t in (0, 1)]
        await stash.seal(both, 2)
        assert await other.peek(both) == [(*pair, 2) for pair in product(values, values)]
        one = await stash.collection("one", type_, Line)
        lines = {value: Line(begin=Point(x=i), tags=["a"] * i) for i, value in enumerate(map(str, values))}
        await sealed(stash, one, [(v, lines[str(v)], 1) for v in values[::-1]])
        for value in values:
            assert await other.peek_key_one(one, value) == lines[str(value)]
        if type_ != list[int]:  # no keys of a dict
            assert list((await other.peek_one(one)).items()) == [(v, lines[str(v)]) for v in values]

    async def test_iter_is_consolidated_and_forwarded_to_since(self, stash: Stash, other: Stash) -> None:
        c = await stash.collection("c", str, int)
        await stash.update_many(c, [(("b", 1), 0, 1), (("a", 2), 7, 2), (("a", 2), 0, 1), (("a", 1), 3, 1)])
        await stash.update_many(c, [(("b", 1), 0, -1), (("a", 2), 7, 1), (("a", 2), 2, -1), (("c", 0), 1, 0)])
        await stash.update_many(c, [])
        expected = [(("a", 1), 3, 1), (("a", 2), 0, 1), (("a", 2), 2, -1), (("a", 2), 7, 3)]
        assert await other.iter(c) == expected
        assert await other.iter_key(c, "a") == [(val, time, diff) for (_, val), time, diff in expected]
        assert await other.iter_key(c, "b") == await other.iter_key(c, "x") == []
        await stash.seal(c, 4)
        await stash.compact(c, 2)
        assert await other.iter(c) == [(("a", 1), 3, 1), (("a", 2), 7, 3)]
        await stash.compact(c, 4)
        assert await other.iter(c) == [(("a", 1), 4, 1), (("a", 2), 7, 3)]
        assert await other.iter_key(c, "a") == [(1, 4, 1), (2, 7, 3)]
        assert (await other.since(c), await other.upper(c)) == (Antichain(4), Antichain(4))

    async def test_an_update_is_at_or_beyond_upper(self, stash: Stash, other: Stash) -> None:
        (c,) = await at_four(stash, other, "c")
        await stash.update(c, ("b", 2), 4, 1)
        before = await visible(other, c)
        for entry in [(("a", 1), 3, 1), (("a", 1), 0, -1)]:
            with refused("'c'", "{2}", "{4}"):
                await stash.update(c, *entry)
            with refused("'c'", "{2}", "{4}"):
                await other.update_many(c, [(("a", 1), 4, 1), entry, (("a", 1), 5, 1)])
        await stash.seal(c, EMPTY)
        with refused("'c'", "{2}", "{}"):
            await stash.update(c, ("a", 1), TIME_MAX, 1)
        assert [entries for entries, *_ in await visible(other, c)] == [entries for entries, *_ in before]

    async def test_bad_values_write_nothing(self, stash: Stash, other: Stash) -> None:
        (c,) = await at_four(stash, other, "c")
        before = await visible(other, c)
        for kind, entry in BAD_ENTRIES.items():
            with pytest.raises(InvalidUpdate, match="'c'") as caught:
                await stash.update_many(c, [(("a", 1), 5, 1), entry])
            assert caught.value.row == 1, kind
        bad: Any = 1
        for waiting in (stash.update(c, (bad, 1), 5, 1), stash.iter_key(c, bad), stash.peek_key_one(c, bad)):
            with pytest.raises(InvalidUpdate, match="'c'"):
                await waiting
        assert await visible(other, c) == before

    async def test_frontiers_advance(self, stash: Stash, other: Stash) -> None:
        (c,) = await at_four(stash, other, "c")
        for upper in (3, Antichain(0)):
            with refused("'c'", "{2}", "{4}", str(frontier(upper))):
                await stash.seal(c, upper)
        for since in (1, 5, EMPTY):
            with refused("'c'", "{2}", "{4}", str(frontier(since))):
                await stash.compact(c, since)
        assert (await other.since(c), await other.upper(c)) == (Antichain(2), Antichain(4))
        await stash.seal(c, 4)
        await stash.compact(c, Antichain(2))
        await stash.seal(c, Antichain(9))
        await stash.compact(c, 9)
        assert (await other.since(c), await other.upper(c)) == (Antichain(9), Antichain(9))

    async def test_empty_frontiers(self, stash: Stash, other: Stash) -> None:
        (c,) = await at_four(stash, other, "c")
        for _ in range(2):
            await stash.seal(c, EMPTY)
        assert await other.peek_timestamp(c) == TIME_MAX
        assert await other.peek_one(c) == {"a": 1}
        with refused("'c'", "{2}", "{}"):
            await stash.seal(c, TIME_MAX)
        for _ in range(2):
            await stash.compact(c, EMPTY)
            await stash.consolidate(c)
        assert (await other.since(c), await other.upper(c)) == (EMPTY, EMPTY)
        reads: list[Any] = [other.iter, other.peek, other.peek_one, other.peek_timestamp, other.make_batch]
        for waiting in [*(read(c) for read in reads), other.iter_key(c, "a"), stash.compact(c, 5)]:
            with refused("'c'", "{}"):
                await waiting

    async def test_the_greatest_time(self, stash: Stash, other: Stash) -> None:
        c = await stash.collection("c", str, int)
        await stash.update(c, ("a", 1), TIME_MAX, 1)
        await stash.seal(c, TIME_MAX - 1)
        new_batch = await c.make_batch(stash)
        assert (new_batch.timestamp, new_batch.upper) == (TIME_MAX - 1, Antichain(TIME_MAX))
        await stash.append([new_batch])
        assert await other.peek(c) == []
        with refused("'c'", str(TIME_MAX)):
            await c.make_batch(stash)
        last = [(("b", 1), TIME_MAX, 1)]
        await stash.append([AppendBatch(c.id, TIME_MAX, EMPTY, TIME_MAX, TIME_MAX, last)])
        assert await other.peek_timestamp(c) == TIME_MAX
        assert await other.iter(c) == [(("a", 1), TIME_MAX, 1), (("b", 1), TIME_MAX, 1)]
        assert await other.peek_one(c) == {"a": 1, "b": 1}

    async def test_consolidation_is_never_seen(self, stash: Stash, other: Stash) -> None:
        """Nor is consolidation in the background: far more updates are written than entries remain."""
        c, idle = [await stash.collection(name, str, int) for name in ("c", "idle")]
        for time in range(8):
            new_batch = await c.make_batch(stash)
            new_batch.compact = max(0, time - 2)
            for key in range(60):
                if time:
                    c.append_to_batch(new_batch, str(key % 20), time - 1, -1)
                c.append_to_batch(new_batch, str(key % 20), time, 1)
            await stash.append([new_batch])
            assert await other.peek(c) == sorted((str(key), time, 3) for key in range(20))
        before = await visible(other, c)
        assert len(before[0][0]) == 20 * (1 + 2 * 2)
        await stash.consolidate(c)
        assert await visible(other, c) == before
        await stash.compact(c, 8)
        await other.consolidate_batch([c, idle, c])
        assert await visible(stash, c) == [
            ([((str(k), 7), 8, 3) for k in sorted(map(str, range(20)))], Antichain(8), Antichain(8))
        ]

    async def test_several_at_once_go_in_order(self, stash: Stash, other: Stash) -> None:
        """After a failure neither that change nor later ones are applied; earlier ones may be or not."""
        a, b, c = [await stash.collection(name, str, int) for name in "abc"]
        await stash.seal_batch([(a, 3), (b, Antichain(4)), (a, 5)])
        await stash.compact_batch([(b, 4), (a, 1), (a, 2)])
        for nothing in (stash.seal_batch, stash.compact_batch, stash.consolidate_batch):
            await nothing([])
        assert await visible(other, a, b) == [
            ([], Antichain(2), Antichain(5)),
            ([], Antichain(4), Antichain(4)),
        ]
        with refused("'b'", "{3}", "{4}"):
            await stash.seal_batch([(a, 6), (b, 3), (c, 9), (b, 9)])
        with refused("'b'", "{5}", "{4}"):
            await stash.compact_batch([(a, 3), (b, 5), (c, 0)])
        assert await visible(other, b, c) == [
            ([], Antichain(4), Antichain(4)),
            ([], Antichain(0), Antichain(0)),
        ]
        assert await other.upper(a) in (Antichain(5), Antichain(6))
        assert await other.since(a) in (Antichain(2), Antichain(3))

    # --- reading at a time -----------------------------------------------------------------------

    async def test_nothing_is_sealed(self, stash: Stash, other: Stash) -> None:
        """No time can be read until upper is beyond since; the error names both."""
        c = await stash.collection("c", str, int)
        await stash.update(c, ("a", 1), 0, 1)

        async def check(frontier: Antichain) -> None:
            reads: list[Any] = [other.peek, other.peek_one, other.peek_timestamp]
            for waiting in [*(read(c) for read in reads), other.peek_key_one(c, "a")]:
                with refused("'c'", f"since is {frontier}", f"upper is {frontier}", kind=NothingSealed):
                    await waiting

        await check(Antichain(0))
        await stash.seal(c, 7)
        assert await other.peek_timestamp(c) == 6
        await stash.compact(c, 7)
        await check(Antichain(7))
        await stash.seal(c, 8)
        assert (await other.peek_timestamp(c), await other.peek(c)) == (7, [("a", 1, 1)])

    async def test_peek_is_what_is_sealed(self, stash: Stash, other: Stash) -> None:
        c = await stash.collection("c", str, int)
        await stash.update_many(c, [(("b", 1), 0, 1), (("a", 9), 1, 1), (("a", 5), 2, 2), (("a", 9), 4, -1)])
        await stash.update_many(c, [(("b", 1), 4, -1), (("c", 1), 5, 1)])
        seen = []
        for upper in range(1, 7):
            await stash.seal(c, upper)
            seen.append(await other.peek(c))
        first, second = [("b", 1, 1)], [("a", 9, 1), ("b", 1, 1)]
        assert seen[:4] == [first, second, [("a", 5, 2), *second], [("a", 5, 2), *second]]
        assert seen[4:] == [[("a", 5, 2)], [("a", 5, 2), ("c", 1, 1)]]

    async def test_one_val_per_key(self, stash: Stash, other: Stash) -> None:
        """A key with more or less than one value is an error, also alone; other keys can be read."""
        c = await stash.collection("c", str, int)
        good = [("b", 1, 1), ("a", 2, 1)]
        await sealed(stash, c, good)
        assert list((await other.peek_one(c)).items()) == [("a", 2), ("b", 1)]
        for changes in [
            [("x", 1, 2)],
            [("x", 1, -1)],
            [("x", 1, 1), ("x", 2, 1)],
            [("x", 1, 1), ("x", 2, -1)],
        ]:
            await sealed(stash, c, changes)
            with refused("'c'", "'x'"):
                await other.peek_one(c)
            with refused("'c'", "'x'"):
                await other.peek_key_one(c, "x")
            assert await other.peek_key_one(c, "a") == 2
            assert await other.peek_key_one(c, "y") is None
            await sealed(stash, c, [(key, val, -diff) for key, val, diff in changes])
            assert await other.peek_one(c) == {"a": 2, "b": 1}

    async def test_an_optional_val_is_no_absent_one(self, stash: Stash, other: Stash) -> None:
        for name, val in [("optional", int | None), ("unit", None)]:
            c: StashCollection[str, Any] = await stash.collection(name, str, val)
            await sealed(stash, c, [("a", None, 1)])
            assert await other.peek_one(c) == {"a": None}
            with pytest.raises(InvalidUsage, match=name):
                await other.peek_key_one(c, "a")

    async def test_a_sum_out_of_range_is_told_when_read(self, stash: Stash, other: Stash) -> None:
        """The sum is stored through all consolidation, and may come back into range."""
        c = await stash.collection("c", str, int)
        await stash.update(c, ("a", 1), 0, DIFF_MAX)
        await stash.update_many(c, [(("a", 1), 1, DIFF_MAX), (("b", 1), 0, 1)])
        await stash.seal(c, 1)
        assert await other.peek(c) == [("a", 1, DIFF_MAX), ("b", 1, 1)]
        assert await other.iter_key(c, "a") == [(1, 0, DIFF_MAX), (1, 1, DIFF_MAX)]
        await stash.append([await c.make_batch(stash)])
        for _ in range(2):
            for call in (other.iter, other.peek):
                with pytest.raises(DiffOverflow) as caught:
                    await call(c)
                assert (caught.value.key, caught.value.val) == ("a", 1)
            with pytest.raises(DiffOverflow):
                await other.iter_key(c, "a")
            assert await other.peek_key_one(c, "b") == 1
            await stash.consolidate(c)
        new_batch = await c.make_batch(stash)
        c.append_to_batch(new_batch, "a", 1, -DIFF_MAX)
        await stash.append([new_batch])
        await stash.consolidate(c)
        assert await other.peek(c) == [("a", 1, DIFF_MAX), ("b", 1, 1)]

    async def test_closed(self, stash: Stash, other: Stash) -> None:
        """Closing is idempotent and concerns no other handle; all writes stay."""
        (c,) = await at_four(stash, other, "c")
        before = await visible(other, c)
        new_batch = await c.make_batch(stash)
        await stash.aclose()
        await stash.aclose()
        for call in (READS | CHANGES).values():
            with pytest.raises(InvalidUsage):
                await call(stash, c, new_batch)
        for waiting in (stash.migrate([]), stash.confirm_leadership()):
            with pytest.raises(InvalidUsage):
                await waiting
        assert await visible(other, c) == before
