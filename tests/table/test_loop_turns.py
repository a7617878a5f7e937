"""Goal: one turn of the event loop handles bounded bytes and keys, however many calls begin at once, and
however much one of them puts. What is handled is counted, on the thread of the loop, between two turns."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.data.jsonable import SLICE_ROWS
from aiopersist.shard.stack import ON_THE_LOOP_BYTES, SLICE_BYTES
from aiopersist.table.commit.group import ANSWERS_AT_ONCE
from aiopersist.table.commit.operation import Overlay, Revise
from aiopersist.table.commit.plan import PendingOperation, Plan
from aiopersist.table.handle import opened
from aiopersist.table.pace import ConversionPace
from aiopersist.table.schema import TableSchema
from aiopersist.table.view import contents as view_contents
from aiopersist.table.view.contents import SLICE_KEYS, FullView, PartialView
from aiopersist.table.view.lookup import look_up
from aiopersist.table.view.view import View
from tests.conftest import StoreUrls
from tests.table.kit import Item, in_time

VAL = 50_000  # characters of a large val
CALLS = 100


class Turns:
    """What is handled between two turns of the loop: the sum, and the most there was."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._thread = threading.get_ident()
        self._now: Counter[str] = Counter()
        self.all: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def count(self, owner: Any, name: str, size: Callable[..., int]) -> None:
        """The sizes of the calls of a function on the thread of the loop."""
        original = getattr(owner, name)

        def counted(*args: Any) -> Any:
            if threading.get_ident() == self._thread:
                found = size(*args)
                self.all[name] += found
                self._now[name] += found
                self.most[name] = max(self.most[name], self._now[name])
            return original(*args)

        self._patch.setattr(owner, name, counted)

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(0)
            self._now.clear()


@pytest.fixture
async def turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Turns]:
    counting = Turns(monkeypatch)
    ticking = asyncio.create_task(counting.tick())
    yield counting
    ticking.cancel()


@asynccontextmanager
async def texts(client: ap.Client, **given: Any) -> AsyncIterator[ap.Table[str, str]]:
    async with client.table("t", str, str, **given) as found:
        await found.put("first", "x")
        yield found


async def test_calls_with_large_vals(quiet: ap.Client, turns: Turns) -> None:
    """Their conversion, their group and its commit, and what gets give."""
    async with texts(quiet) as t:
        turns.count(TableSchema, "entry", lambda schema, key, val, most: len(val))
        turns.count(
            TableSchema, "updates", lambda schema, new, old, time: sum(len(v or "") for v in new.values())
        )
        turns.count(TableSchema, "vals", lambda schema, texts: sum(map(len, texts)))
        turns.count(Plan, "_add", lambda plan, op, *rest: sum(map(len, op.action.entries.values())))
        await asyncio.gather(*(t.put(f"k{n}", str(n) * VAL) for n in range(10, CALLS)))
        found = await t.get_many([f"k{n}" for n in range(10, CALLS)])
        assert found == {f"k{n}": str(n) * VAL for n in range(10, CALLS)}
        await t.put_many([(f"k{n}", "y" * VAL) for n in range(60)])
        assert await t.get("k59") == "y" * VAL
    assert turns.all["entry"] == 90 * 2 * VAL
    assert turns.all["_add"] >= 90 * 2 * VAL + 60 * VAL
    most = SLICE_BYTES + 2 * VAL + 2
    assert turns.most["entry"] <= most
    assert turns.most["_add"] <= most + 60 * (VAL + 2)  # one operation is not divided
    assert turns.most["updates"] <= ON_THE_LOOP_BYTES
    assert turns.most["vals"] <= ON_THE_LOOP_BYTES


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "partial"])
async def test_a_put_of_many_entries(quiet: ap.Client, turns: Turns, resident: bool) -> None:
    """Their comparison with what is there, and what the view takes; also in a client that catches up."""
    count = 5 * SLICE_KEYS
    async with texts(quiet, resident=resident) as t, texts(quiet, resident=resident):
        for contents in (FullView, PartialView):
            turns.count(contents, "val_of", lambda self, key: 1)
        turns.count(view_contents, "_size", lambda key, val: 1)
        for val in "ab":
            await t.put_many((f"k{n}", val) for n in range(count))
            assert await t.get_many(["k0", f"k{count - 1}"]) == {"k0": val, f"k{count - 1}": val}
        assert await t.count() == count + 1
    assert turns.all["val_of"] >= count
    assert turns.most["val_of"] <= 2 * SLICE_KEYS
    assert turns.most["_size"] <= 4 * SLICE_KEYS


async def test_many_calls(quiet: ap.Client, turns: Turns) -> None:
    """Their answers."""
    async with texts(quiet) as t:
        turns.count(PendingOperation, "give_outcome", lambda operation, time: 1)
        for _ in range(2):  # the second time they write nothing
            await asyncio.gather(*(t.put(f"k{n}", "x") for n in range(4 * ANSWERS_AT_ONCE)))
        assert await t.count() == 4 * ANSWERS_AT_ONCE + 1
    assert turns.all["give_outcome"] >= 8 * ANSWERS_AT_ONCE
    assert turns.most["give_outcome"] <= 2 * ANSWERS_AT_ONCE


async def test_updates_of_large_vals(quiet: ap.Client, turns: Turns) -> None:
    """Functions of users run for a bounded number of bytes in a turn."""
    ran = Counter[str]()

    def longer(old: str | None) -> str:
        turns._now["f"] += len(old or "")
        turns.most["f"] = max(turns.most["f"], turns._now["f"])
        ran["f"] += 1
        return (old or "") + "!"

    async with texts(quiet) as t:
        await t.put_many({f"k{n}": "x" * VAL for n in range(CALLS)})
        await asyncio.gather(*(t.update(f"k{n}", longer) for n in range(CALLS)))
        assert {len(val) async for _, val in t.items(prefix="k")} == {VAL + 1}
    assert ran["f"] >= CALLS
    assert turns.most["f"] <= SLICE_BYTES + 2 * VAL


async def test_what_others_read_while_a_plan_is_made(quiet: ap.Client) -> None:
    """Goal: a plan that takes several turns, and transactions that guess what it makes in between: each call
    gets its own result."""

    def one_more(old: str | None) -> str:
        return f"{int((old or '0 ').split()[0]) + 1} {'x' * VAL}"

    async with texts(quiet) as t:

        async def body(tx: ap.Transaction) -> str:
            found = await tx.get(t, "count") or "0 "
            await asyncio.sleep(0)
            tx.put(t, "seen", found[:8])
            return one_more(await tx.get(t, "count"))

        async def transact() -> None:
            while True:
                await quiet.transact(body)

        reading = [asyncio.create_task(transact()) for _ in range(3)]
        for _ in range(3):
            before = int((await t.get("count") or "0 ").split()[0])
            calls = [t.update("count", one_more) for _ in range(60)]
            results = await in_time(asyncio.gather(*calls))
            assert sorted(int((text or "").split()[0]) - before for text in results) == [*range(1, 61)]
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)


async def test_a_guess_changes_no_result_of_a_plan(quiet: ap.Client) -> None:
    """Goal: what runs an operation again, on other vals, after the plan has run it and before it is
    answered."""
    async with quiet.table("t", str, int) as t:
        await t.put("k", 1)
        at, key = (await opened(t)).participant, '"k"'
        action = Revise(at.view.table_schema, key, lambda old: old + 1, 1000)
        operation = PendingOperation((at,), action, (action.keys,), at)
        plan = Plan([operation], 0.0)
        assert list(plan.steps()) == []
        operation.run_on([Overlay(lambda key: "100")])
        operation.give_outcome(5)
        assert await operation.answer == (5, 2)
        assert plan.shards[at].writes.changes == {key: "2"}


async def test_large_and_small_calls_keep_their_order(quiet: ap.Client) -> None:
    """Whether a val may be changed by its owner, or not: the last one counts. One that is cancelled while it
    waits for its turn holds up nothing."""
    async with texts(quiet) as t:
        calls = [asyncio.create_task(t.put("k", "x" * VAL)) for _ in range(20)]
        calls += [asyncio.create_task(t.put("k", val)) for val in ("y", "z" * VAL, "last")]
        cancelled = asyncio.create_task(t.put("other", "x" * VAL))
        last = asyncio.create_task(t.delete("first"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await in_time(asyncio.gather(*calls, last))
        assert await t.get("k") == "last"
        assert await t.get_many(["first", "other"]) == {}
    async with quiet.table("m", str, Item) as m:
        await asyncio.gather(*(m.put("k", Item(count=n)) for n in range(50)), t_puts(quiet))
        assert await m.get("k") == Item(count=49)


async def test_a_put_of_few_entries_keeps_its_order_among_large_puts(quiet: ap.Client) -> None:
    """Goal: it overtakes none of those that wait for their turn, and none that come later overtake it."""
    async with texts(quiet) as t:
        calls = [t.put("k", "x" * VAL) for _ in range(20)]
        await in_time(asyncio.gather(*calls, t.put_many({"k": "last"}), t.put("l", "1")))
        assert await t.get("k") == "last"
        calls = [t.put("l", "x" * VAL) for _ in range(20)]
        await in_time(asyncio.gather(*calls, t.put_many({"l": "2"}), t.put("l", "last")))
        assert await t.get("l") == "last"


async def test_who_comes_as_others_go_on_comes_after_them(quiet: ap.Client) -> None:
    pace, order = ConversionPace(), list[object]()

    async def call(name: object, size: int) -> None:
        await pace.turn("x" * size)
        order.append(name)

    begun = [asyncio.create_task(call(number, VAL)) for number in range(20)]
    while not all(task.done() for task in begun[:20]):  # one more comes in each turn
        begun.append(asyncio.create_task(call(len(begun), 1)))
        await asyncio.sleep(0)
    await in_time(asyncio.gather(*begun))
    assert order == [*range(len(begun))]


async def test_rows_that_a_transaction_appends_count(
    quiet: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One commit has a bounded number of bytes, also of those."""
    monkeypatch.setattr("aiopersist.table.commit.plan.PLAN_BYTES", 1_000_000)
    groups: list[int] = []
    plan = Plan.steps

    def steps(self: Plan) -> Iterator[None]:
        yield from plan(self)
        groups.append(sum(rows.nbytes for planned in self.parts for rows in planned.writes.rows))

    monkeypatch.setattr(Plan, "steps", steps)
    async with await quiet.writer("rows", ap.Schema(str, int), clock="wall") as w, texts(quiet):

        async def append(number: int) -> None:
            async def body(tx: ap.Transaction) -> None:
                tx.append(w, [(f"{number} {n} {'x' * 4000}", n) for n in range(100)])

            await quiet.transact(body)

        await asyncio.gather(*map(append, range(10)))
    assert sum(groups) >= 10 * 400_000
    assert max(groups) <= 1_500_000


async def test_a_put_is_told_though_the_view_fails(quiet: ap.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what is durable is told as such, and never done twice, whatever becomes of the view after it."""
    async with quiet.table("t", str, int) as t:
        await t.put("k", 1)
        for failure in (RuntimeError("no thread"), InvalidUsage(UsageKind.INVALID_APPEND, "no view")):
            await t.get("k")  # the view catches up
            with monkeypatch.context() as patch:

                def fails(*args: object, failure: Exception = failure) -> None:
                    patch.undo()
                    raise failure

                patch.setattr(View, "apply", fails)
                assert await t.update("k", lambda old: (old or 0) + 1) is not None
        assert await t.get("k") == 3
        assert await t.update("k", lambda old: (old or 0) + 1) == 4


async def test_what_a_large_look_up_leaves_behind(elsewhere: StoreUrls) -> None:
    """A view keeps to the memory that it may take once nobody uses the keys any more."""
    bytes_max, count = 100_000, 5 * SLICE_KEYS
    settings = ap.Settings(table_resident_bytes=bytes_max)
    async with (
        ap.open(**elsewhere._asdict(), settings=settings, maintenance=False) as client,
        texts(client, resident=False) as t,
    ):
        await t.put_many((f"k{n}", "x") for n in range(count))
        assert len(await t.get_many([f"k{n}" for n in range(count)])) == count
        view = (await opened(t)).view
        for _ in range(100):
            await asyncio.sleep(0)
        assert view.contents.bytes <= bytes_max


async def test_the_keys_of_a_view_that_ceases_to_have_all_stay_known(
    elsewhere: StoreUrls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: while a group looks up keys of another table, since it is planned in several turns."""
    began, go = asyncio.Event(), asyncio.Event()

    async def slowly(session: Any, schema: Any, *args: Any) -> dict[str, str]:
        if schema.name == "partial":
            began.set()
            await go.wait()
        return await look_up(session, schema, *args)

    monkeypatch.setattr("aiopersist.table.view.view.look_up", slowly)
    async with ap.open(**elsewhere._asdict(), maintenance=False) as client:
        for name in ("whole", "partial"):
            await client.table(name, str, int).put("k", 1)
    async with ap.open(**elsewhere._asdict(), maintenance=False) as client:
        tables = client.table("whole", str, int), client.table("partial", str, int, resident=False)
        first, second = [(await opened(t)).participant for t in tables]
        operation = PendingOperation((first, second), lambda *cells: None, (['"k"'], ['"k"']), first)
        with ExitStack() as kept:
            fetching = asyncio.create_task(client._services.tables.group._fetch_keys([operation], kept))
            await in_time(began.wait())
            await first.view.become(False)
            assert await first.view.read(['"k"']) == {'"k"': "1"}  # in memory, as far as others need it
            go.set()
            await in_time(fetching)
            first.view.contents.tidy(0)
            assert [p.view.contents.val_of('"k"') for p in (first, second)] == ["1", "1"]
        first.view.contents.tidy(0)
        assert first.view.contents.unknown(['"k"']) == ['"k"']


async def t_puts(client: ap.Client) -> None:
    async with client.table("u", str, str) as t:
        await asyncio.gather(*(t.put(f"k{n}", "x" * VAL) for n in range(20)))


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "partial"])
async def test_nobody_sees_half_of_a_put(quiet: ap.Client, resident: bool) -> None:
    """While a view takes many changes, in several turns: readers see all of them, or none."""
    count, seen = 5 * SLICE_KEYS, set[int]()
    async with quiet.table("t", str, int, resident=resident) as t:
        await t.put_many((f"k{n}", 0) for n in range(count))
        keys = [f"k{n}" for n in range(0, count, 97)]

        async def read() -> None:
            while True:
                vals = set((await t.get_many(keys, stale=True)).values())
                assert len(vals) == 1
                seen.update(vals)

                async def body(tx: ap.Transaction) -> list[int]:
                    return sorted(set((await tx.get_many(t, keys)).values()))

                assert len(await quiet.transact(body)) == 1

        reading = asyncio.create_task(read())
        for number in range(1, 4):
            await in_time(t.put_many((f"k{n}", number) for n in range(count)))
            await asyncio.gather(*(t.put(f"other{n}", n) for n in range(10)))
        reading.cancel()
        (ended,) = await asyncio.gather(reading, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), ended
        assert {0, 3} & seen
        assert set((await t.get_many(keys)).values()) == {3}
        assert await t.count() == count + 10


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "partial"])
@pytest.mark.parametrize("many_first", [True, False], ids=["many first", "few first"])
async def test_nobody_sees_half_of_a_commit(quiet: ap.Client, resident: bool, many_first: bool) -> None:
    """Goal: of a commit that changes few keys of one table and many of another, each body of a transaction
    sees all, or nothing, also while a view takes the changes in several turns."""
    count, seen, began = 3 * SLICE_ROWS, set[tuple[int | None, ...]](), list[asyncio.Task[None]]()
    async with quiet.table("few", str, int) as few, quiet.table("many", str, int, resident=resident) as many:

        async def put(number: int) -> None:
            async def body(tx: ap.Transaction) -> None:
                for given in (many, few) if many_first else (few, many):
                    await tx.get(given, "k0")
                    tx.put_many(given, {f"k{n}": number for n in range(count if given is many else 1)})

            await in_time(quiet.transact(body))

        async def read(tx: ap.Transaction) -> None:  # what it raised would not be told: it runs again
            for order in ((few, many), (many, few)):
                seen.add(tuple([await tx.get(given, "k0") for given in order]))

        async def keep_reading() -> None:
            while True:
                began.append(asyncio.create_task(quiet.transact(read)))
                await asyncio.sleep(0.0005)

        await put(0)
        reading = asyncio.create_task(keep_reading())
        for number in range(1, 4):
            await put(number)
        reading.cancel()
        await asyncio.wait([reading])
        await in_time(asyncio.gather(*began))
        assert {vals for vals in seen if len({*vals}) > 1} == set()
        assert len(seen) > 1
