"""What every `Consensus` must do, as a test class to inherit from.

    class TestMine(ConsensusConformance):
        @pytest.fixture
        async def handles(self):
            one, two = MyConsensus(...), MyConsensus(...)     # two handles on the same empty store
            yield one, two
            await one.aclose()
            await two.aclose()

Needs pytest and pytest-asyncio, in strict or in auto mode. The tests write through one handle and read
through the other. Tests of `compare_and_set_many` with several keys, and of `remove`, are skipped for a store
that raises `Unsupported`, those of `wish` for one that does not define it.
"""

import asyncio
import contextlib

import pytest

from aiopersist.base.runtime import SYSTEM
from aiopersist.storage.consensus import Consensus, Entry, Versioned
from aiopersist.testing.fixtures import TakesHandles
from aiopersist.testing.storage.heads import (
    HINT_TIMEOUT_S,
    Handles,
    HeadsConformance,
    grow,
    numbered,
    set_many,
)
from aiopersist.testing.storage.remove import RemoveConformance
from aiopersist.testing.storage.wishes import NewerConformance, WishesConformance

KEYS = {
    "plain": "a",
    "slashes": "shard//x/",
    "dots": "../..",
    "space": " a b ",
    "percent": "100%_\\",
    "quotes": 'it\'s "quoted"; --',
    "newline": "a\nb\tc",
    "unicode": "größe/日本/🙂",
    "combining": "e\u0301",
    "braces": '{"a": $1, ?}',
    "long": "k" * 600,
}


class ConsensusConformance(
    TakesHandles, HeadsConformance, RemoveConformance, NewerConformance, WishesConformance
):
    """Inherit, and define a fixture `handles`: two handles on the same empty store, with nothing shared in
    memory that two processes could not share."""

    pytestmark = pytest.mark.asyncio

    async def test_nothing_is_there(self, handles: Handles) -> None:
        one, _ = handles
        assert await one.head("k") is None
        assert await one.scan("k", 0, 10) == []
        assert await one.list_keys("") == []

    async def test_versions_count_from_zero(self, handles: Handles) -> None:
        one, two = handles
        assert await one.compare_and_set("k", None, b"zero") is True
        assert await two.head("k") == Versioned(0, b"zero")
        assert await two.compare_and_set("k", 0, b"one") is True
        assert await one.head("k") == Versioned(1, b"one")
        assert await one.scan("k", 0, 10) == [Versioned(0, b"zero"), Versioned(1, b"one")]

    @pytest.mark.parametrize("expected", [None, 0, 1, 3, 2**40], ids=str)
    async def test_another_head_is_a_mismatch(self, handles: Handles, expected: int | None) -> None:
        one, two = handles
        await grow(one, "k", 3)
        assert await two.compare_and_set("k", expected, b"no") is False
        assert await one.scan("k", 0, 10) == numbered(range(3))

    @pytest.mark.parametrize("expected", [0, 5], ids=str)
    async def test_a_key_that_is_not_there_is_a_mismatch(self, handles: Handles, expected: int) -> None:
        one, two = handles
        assert await one.compare_and_set("k", expected, b"no") is False
        assert await two.head("k") is None
        assert await two.list_keys("") == []

    @pytest.mark.parametrize("size", [0, 1, 3000, 20_000, 3_000_000], ids=str)
    async def test_data_comes_back(self, handles: Handles, size: int) -> None:
        one, two = handles
        data = bytes(i % 251 for i in range(size))
        assert await one.compare_and_set("k", None, data)
        assert await two.head("k") == Versioned(0, data)
        assert await two.scan("k", 0, 1) == [Versioned(0, data)]

    @pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
    async def test_a_legal_key(self, handles: Handles, key: str) -> None:
        one, two = handles
        await grow(one, key, 2)
        await grow(one, key + "x", 1)
        assert await two.head(key) == Versioned(1, b"1")
        assert await two.scan(key, 0, 10) == numbered(range(2))
        assert await two.list_keys(key) == [key, key + "x"]
        assert await two.truncate(key, 1) == 1
        assert await two.head(key + "x") == Versioned(0, b"0")

    async def test_scan(self, handles: Handles) -> None:
        one, two = handles
        await grow(one, "k", 10)
        await grow(one, "k2", 1)
        assert await two.scan("k", 0, 100) == numbered(range(10))
        assert await two.scan("k", 4, 3) == numbered([4, 5, 6])
        assert await two.scan("k", 9, 3) == numbered([9])
        assert await two.scan("k", 10, 3) == []
        assert await two.scan("k", 0, 0) == []

    async def test_truncate(self, handles: Handles) -> None:
        one, two = handles
        await grow(one, "k", 10)
        await grow(one, "other", 10)
        assert await two.truncate("k", 0) == 0
        assert await two.truncate("k", 4) == 4
        assert await two.truncate("k", 4) == 0
        assert await two.truncate("k", 2) == 0
        assert await one.scan("k", 0, 100) == numbered(range(4, 10))
        assert await one.scan("k", 2, 3) == numbered([4, 5, 6])
        assert await one.truncate("k", 9) == 5
        assert await two.head("k") == Versioned(9, b"9")
        assert await two.compare_and_set("k", 9, b"10")
        assert await one.scan("k", 0, 100) == numbered([9, 10])
        assert await one.scan("other", 0, 100) == numbered(range(10))

    async def test_truncating_beyond_the_head_is_an_error(self, handles: Handles) -> None:
        one, two = handles
        await grow(one, "k", 3)
        with pytest.raises(ValueError):
            await two.truncate("k", 3)
        with pytest.raises(ValueError):
            await two.truncate("absent", 0)
        assert await one.scan("k", 0, 10) == numbered(range(3))

    async def test_list_keys(self, handles: Handles) -> None:
        one, two = handles
        keys = ["a/1", "a/2", "a", "b/1", "a%", "a_", "A/1", "a/é", "a/\U0001f642", "a/\uffff"]
        for key in keys:
            await grow(one, key, 2)
        for prefix in ["", "a", "a/", "a%", "a_", "b", "c", "a/1", "a/12"]:
            assert await two.list_keys(prefix) == sorted(key for key in keys if key.startswith(prefix))

    async def test_of_those_that_race_exactly_one_wins(self, handles: Handles) -> None:
        one, _ = handles
        for expected in [None, 0, 1]:
            results = await asyncio.gather(
                *(handle.compare_and_set("k", expected, b"%d" % i) for i, handle in enumerate(handles * 8))
            )
            assert results.count(True) == 1
            winner = results.index(True)
            assert await one.head("k") == Versioned(0 if expected is None else expected + 1, b"%d" % winner)

    async def test_linearizable_under_contention(self, handles: Handles) -> None:
        """Every success is the version that it claims; the log has no gap; heads never go back."""
        written: dict[int, bytes] = {}

        async def contend(handle: Consensus, name: int) -> None:
            for i in range(12):
                head = await handle.head("k")
                before = max(written, default=-1)  # what returned before the next read began
                again = await handle.head("k")
                seqno = -1 if again is None else again.seqno
                assert seqno >= (-1 if head is None else head.seqno)
                assert seqno >= before
                data = b"%d-%d" % (name, i)
                if await handle.compare_and_set("k", None if again is None else again.seqno, data):
                    assert seqno + 1 not in written
                    written[seqno + 1] = data

        one, two = handles
        await asyncio.gather(*(contend(handle, i) for i, handle in enumerate([one, two] * 4)))
        log = await two.scan("k", 0, 1000)
        assert dict(log) == written
        assert [version.seqno for version in log] == list(range(len(log)))

    async def test_many_keys_at_once_each_its_own_outcome(self, handles: Handles) -> None:
        one, two = handles
        keys = [f"k{i}" for i in range(40)]
        created = await asyncio.gather(*(one.compare_and_set(key, None, b"0") for key in keys))
        assert created == [True] * 40
        for key in keys[::4]:
            assert await two.compare_and_set(key, 0, b"1")
        results = await asyncio.gather(*(one.compare_and_set(key, 0, b"mine") for key in keys))
        assert results == [i % 4 != 0 for i in range(40)]
        heads = await asyncio.gather(*(two.head(key) for key in keys))
        assert heads == [Versioned(1, b"mine" if i % 4 else b"1") for i in range(40)]

    async def test_the_same_key_several_times_at_once(self, handles: Handles) -> None:
        one, two = handles
        await grow(one, "k", 1)
        results = await asyncio.gather(*(one.compare_and_set("k", i, b"%d" % (i + 1)) for i in range(6)))
        assert results[0] is True
        log = await two.scan("k", 0, 100)
        assert log == numbered(range(1 + results.count(True)))

    async def test_many_all_or_none(self, handles: Handles) -> None:
        one, two = handles
        await grow(one, "a", 2)
        await grow(one, "b", 1)
        good = [Entry("b", 0, b"1"), Entry("new", None, b"0"), Entry("a", 1, b"2")]
        for bad in [Entry("c", 0, b"x"), Entry("c", 3, b"x")]:
            assert await set_many(two, [*good, bad]) is False
        assert await two.compare_and_set_many([Entry("b", None, b"x"), Entry("a", 1, b"x")]) is False
        assert await one.list_keys("") == ["a", "b"]
        assert await one.head("a") == Versioned(1, b"1")
        assert await two.compare_and_set_many(good) is True
        assert await one.scan("a", 0, 10) == numbered(range(3))
        assert await one.scan("b", 0, 10) == numbered(range(2))
        assert await one.scan("new", 0, 10) == numbered(range(1))
        assert await one.compare_and_set_many([]) is True

    async def test_many_races_with_one(self, handles: Handles) -> None:
        """Two keys that only move together have the same head; a third one also moves alone."""
        one, two = handles
        keys = ["a", "b", "c"]
        for key in keys:
            await grow(one, key, 1)

        async def together(handle: Consensus, order: list[str]) -> int:
            won = 0
            for _ in range(10):
                heads = {key: await handle.head(key) for key in order}
                entries = [Entry(key, head.seqno, b"t") for key, head in heads.items() if head]
                won += await set_many(handle, entries)
            return won

        async def alone(handle: Consensus) -> int:
            won = 0
            for _ in range(10):
                head = await handle.head("c")
                assert head is not None
                won += await handle.compare_and_set("c", head.seqno, b"a")
            return won

        *together_won, alone_won = await asyncio.gather(
            together(one, keys), together(two, keys[::-1]), together(one, ["b", "c", "a"]), alone(two)
        )
        heads = {key: await two.head(key) for key in keys}
        assert heads["a"] == heads["b"] == Versioned(sum(together_won), b"t" if sum(together_won) else b"0")
        assert heads["c"] is not None and heads["c"].seqno == sum(together_won) + alone_won
        for key in keys:
            log = await one.scan(key, 0, 1000)
            assert [version.seqno for version in log] == list(range(len(log)))

    async def test_truncate_races_with_compare_and_set(self, handles: Handles) -> None:
        one, two = handles
        await grow(one, "k", 1)

        async def write() -> None:
            for seqno in range(1, 60):
                assert await one.compare_and_set("k", seqno - 1, b"%d" % seqno)

        async def cut() -> None:
            while True:
                head = await two.head("k")
                assert head is not None
                await two.truncate("k", head.seqno)
                log = await two.scan("k", 0, 1000)
                assert log == numbered(range(log[0].seqno, log[-1].seqno + 1))
                assert log[0].seqno >= head.seqno
                if head.seqno == 59:
                    return
                await SYSTEM.sleep(0)  # a store that never waits lets no other task run

        await asyncio.gather(write(), cut(), cut())
        assert await one.scan("k", 0, 100) == numbered([59])

    async def test_two_truncates_count_each_version_once(self, handles: Handles) -> None:
        one, two = handles
        await grow(one, "k", 20)
        dropped = await asyncio.gather(*(handle.truncate("k", 19) for handle in [one, two] * 3))
        assert sum(dropped) == 19
        assert await one.scan("k", 0, 100) == numbered([19])

    @pytest.mark.parametrize("writer", [0, 1], ids=["the same handle", "the other handle"])
    async def test_watch(self, handles: Handles, writer: int) -> None:
        """A task that reads after each hint sees every change, without polling."""
        watching, writing = handles[0], handles[writer]
        await grow(writing, "k", 1)
        await grow(writing, "other", 1)

        async def until(seqno: int) -> None:
            while True:
                hint = asyncio.create_task(watching.watch("k"))
                await SYSTEM.sleep(0)  # it has begun
                try:
                    head = await watching.head("k")
                    if head is not None and head.seqno >= seqno:
                        return
                    await hint
                    await SYSTEM.sleep(0)  # a hint may come at once
                finally:
                    hint.cancel()

        for seqno in range(1, 6):
            waiting = asyncio.create_task(until(seqno))
            await SYSTEM.sleep(0.05)
            assert not waiting.done()
            assert await writing.compare_and_set("k", seqno - 1, b"x")
            await asyncio.wait_for(waiting, HINT_TIMEOUT_S)

    async def test_watch_is_woken_by_many(self, handles: Handles) -> None:
        one, two = handles
        await asyncio.wait({asyncio.ensure_future(one.watch("warm up"))}, timeout=0.2)
        hints = [asyncio.create_task(one.watch(key)) for key in ("a", "b")]
        await SYSTEM.sleep(0.05)
        assert await set_many(two, [Entry("a", None, b""), Entry("b", None, b"")])
        await asyncio.wait_for(asyncio.gather(*hints), HINT_TIMEOUT_S)

    async def test_a_watch_may_be_cancelled(self, handles: Handles) -> None:
        one, two = handles
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(one.watch("k"), 0.02)
        await grow(two, "k", 2)
        assert await one.head("k") == Versioned(1, b"1")

    async def test_now_is_about_now_and_advances(self, handles: Handles) -> None:
        one, two = handles
        first = await one.now()
        assert abs(first - SYSTEM.wall()) < 30
        await SYSTEM.sleep(0.02)
        assert 0.01 < await one.now() - first < 30
        assert abs(await two.now() - await one.now()) < 30

    async def test_a_cancelled_call_leaves_the_handle_usable(self, handles: Handles) -> None:
        """The outcome of the cancelled call is unknown; the log tells, and has no gap."""
        one, two = handles
        await grow(one, "k", 1)
        for seqno in range(20):
            task = asyncio.create_task(one.compare_and_set("k", seqno, b"%d" % (seqno + 1)))
            for _ in range(seqno):
                await SYSTEM.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            while not await one.compare_and_set("k", seqno, b"%d" % (seqno + 1)):
                head = await two.head("k")
                assert head is not None
                if head.seqno > seqno:
                    break
                await SYSTEM.sleep(0)
            head = await two.head("k")
            assert head == Versioned(seqno + 1, b"%d" % (seqno + 1))
        assert await two.scan("k", 0, 100) == numbered(range(21))

    async def test_closing_twice_is_harmless(self, handles: Handles) -> None:
        one, two = handles
        await grow(one, "k", 1)
        await one.aclose()
        await one.aclose()
        assert await two.head("k") == Versioned(0, b"0")
