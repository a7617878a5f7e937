"""Each call of a table, on each kind of location."""

import asyncio
import threading
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow
import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.table.schema import TableSchema
from tests.support.shards import refused
from tests.table.kit import Item, changes_of, entries, least_sent, steps_until, versions


async def test_put_get_delete_insert_update(client: ap.Client) -> None:
    """The calls as the tutorial shows them, and the times that they return."""
    stock = client.table("stock", str, Item)
    first = await stock.put("apple", Item(count=3))
    assert await stock.get("apple") == Item(count=3)
    assert await stock.get("pear") is None

    second = await stock.put_many({"pear": Item(count=1), "fig": Item(count=2)})
    assert second > first
    assert await stock.get_many(["fig", "kiwi", "pear"]) == {"fig": Item(count=2), "pear": Item(count=1)}

    assert await stock.insert("kiwi", Item(count=9)) > second
    with pytest.raises(ap.KeyExists, match="kiwi") as caught:
        await stock.insert("kiwi", Item(count=10))
    assert caught.value.key == "kiwi"

    assert await stock.update("apple", lambda old: Item(count=old.count - 1)) == Item(count=2)
    assert await stock.update("apple", lambda old: None) is None
    assert await stock.update("apple", lambda old: old) is None
    last = await stock.delete("fig", "kiwi", "nothing")
    assert await entries(stock) == [("pear", Item(count=1))]

    assert await stock.get("apple", as_of=first) == Item(count=3)
    assert await stock.get_many(["apple", "pear"], as_of=first) == {"apple": Item(count=3)}
    assert await entries(stock, as_of=second) == [
        ("apple", Item(count=3)),
        ("fig", Item(count=2)),
        ("pear", Item(count=1)),
    ]
    assert await stock.count(as_of=second) == 3
    assert await stock.count() == 1
    assert (await stock.view()).keys == 1
    assert (await stock.view()).upper == ap.Antichain(last + 1)


@pytest.mark.parametrize("count", [2, 30_000])
@pytest.mark.parametrize("form", ["list", "dict", "items"])
async def test_entries_are_taken_as_the_call_begins(client: ap.Client, form: str, count: int) -> None:
    """Goal: what their owner does to the collection afterwards, while the table opens, changes nothing."""
    stock = client.table("stock", int, int)
    owned: Any = {i: i for i in range(count)}
    given = owned.items() if form == "items" else owned
    if form == "list":
        owned = given = list(owned.items())
    put = asyncio.create_task(stock.put_many(given))
    await asyncio.sleep(0)
    owned.clear()
    await put
    assert await stock.count() == count


async def test_vals_are_taken_as_the_call_begins(client: ap.Client) -> None:
    """Goal: what their owner makes of a val afterwards, while the table opens, changes nothing."""
    stock = client.table("stock", str, Item)
    for call in (stock.put, stock.insert):
        item = Item(count=1)
        done = asyncio.create_task(call(call.__name__, item))
        await asyncio.sleep(0)
        item.count = 2
        await done
        client._services.tables._is_ready, client._services.tables._warming = (
            False,
            None,
        )  # as in a process that begins
    assert [val.count async for _, val in stock.items()] == [1, 1]


class Cents(int):
    """Made of euros, also where it is copied."""

    def __new__(cls, euros: int) -> "Cents":
        return super().__new__(cls, 100 * euros)


async def test_a_val_that_is_copied_as_another_one(client: ap.Client) -> None:
    """Goal: the first put of a process stores the val that it was given, as the next one does."""
    prices = client.table("prices", str, int)
    for name in ("first", "second"):
        await prices.put(name, Cents(3))
    assert await entries(prices) == [("first", 300), ("second", 300)]


async def test_columns_are_taken_as_the_call_begins(client: ap.Client) -> None:
    stock = client.table("stock", str, Item)
    await stock.put("apple", Item(count=3))
    columns = ["val.count"]
    reading = asyncio.create_task(stock.to_arrow(columns=columns))
    await asyncio.sleep(0)
    columns[:] = ["key"]
    assert (await reading).column_names == ["val.count"]


async def test_arrow_data_in_a_list_is_converted_on_a_thread(
    client: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: few items may be much data."""
    stock, threads, convert = client.table("stock", int, int), set[int](), TableSchema.columns_of

    def noted(*args: Any) -> Any:
        threads.add(threading.get_ident())
        return convert(*args)

    monkeypatch.setattr(TableSchema, "columns_of", noted)
    given = [{"key": [1, 2], "val": [3, 4]}, {"key": [1], "val": [5]}]
    await stock.put_many([*map(pyarrow.table, given)])
    assert await entries(stock) == [(1, 5), (2, 4)]
    assert threads and threading.get_ident() not in threads


async def test_it_goes_on_in_another_client(location: Any) -> None:
    """What one client put, the next one has; and what it wrote is one row per key."""
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        stock = client.table("stock", str, int)
        for number in range(5):
            await stock.put("a", number)
        await stock.put_many((f"k{i}", i) for i in range(100))
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        stock = client.table("stock", str, int)
        assert await stock.get("a") == 4
        assert await stock.count() == 101
        async with client.reader("stock", stock.schema) as reader, reader.snapshot() as snapshot:
            assert all(diff == 1 for _, _, diff in await snapshot.rows())
        report = await client.admin.fsck("stock")
        assert report.ok, report.problems


async def test_an_empty_table_never_waits(mem: ap.Client) -> None:
    """Every read of a table in which nothing was ever put answers at once."""
    table = mem.table("t", str, int)
    assert await table.get("a") is None
    assert await table.get("a", stale=True) is None
    assert await table.get_many(["a"]) == {}
    assert await table.get_many([]) == {}
    assert await entries(table) == []
    assert await table.count() == 0
    assert (await table.to_arrow()).column_names == ["key", "val"]
    assert (await table.to_arrow(columns=["val"])).column_names == ["val"]
    assert (await table.to_polars()).shape == (0, 2)
    assert (await table.to_pandas()).shape == (0, 2)
    assert (await table.view()).keys == 0
    assert await table.delete("a") == 0


async def test_what_changes_nothing_writes_nothing(client: ap.Client) -> None:
    """The val that is there, a key that is not, an update to the same: no version, and one read of the head;
    the time is the greatest complete one."""
    table = client.table("t", str, Item)
    time = await table.put("a", Item(count=1))
    seqno = await versions(client, "t")
    for call in (
        lambda: table.put("a", Item(count=1)),
        lambda: table.put_many({"a": Item(count=1)}),
        lambda: table.put_many({}),
        lambda: table.delete("b"),
        lambda: table.delete(),
    ):
        assert await call() == time
        assert await least_sent(client, call) == 1
    assert await table.update("a", lambda old: old) == Item(count=1)
    assert await table.update("b", lambda old: None) is None
    assert await least_sent(client, lambda: table.update("a", lambda old: old)) == 1
    assert await versions(client, "t") == seqno


async def test_what_undoes_itself_in_one_group_writes_nothing(mem: ap.Client) -> None:
    """Operations of one group that cancel out are no version either."""
    table = mem.table("t", str, int)
    await table.put("a", 1)
    seqno = await versions(mem, "t")
    await asyncio.gather(
        table.put("a", 2), table.delete("a"), table.put("a", 1), table.put("b", 1), table.delete("b")
    )
    assert await versions(mem, "t") == seqno


async def test_a_linearizable_get_is_one_read_of_the_head(client: ap.Client) -> None:
    """At rest each get costs one request, and a stale one none; beside `as_of` stale= is refused."""
    table = client.table("t", str, int)
    await table.put("a", 1)
    assert await least_sent(client, lambda: table.get("a")) == 1
    assert await least_sent(client, lambda: table.get_many(["a", "b"])) == 1
    assert await least_sent(client, lambda: table.get("a", stale=True)) == 0
    assert await least_sent(client, lambda: table.get_many(["a"], stale=True)) == 0
    assert await table.get("a", stale=True) == 1
    assert await refused(table.get("a", as_of=1, stale=True)) is ap.UsageKind.INVALID_TIME
    assert await refused(table.get_many(["a"], as_of=1, stale=True)) is ap.UsageKind.INVALID_TIME


class Size(BaseModel):
    rows: int
    name: str | None = None


FORMS: dict[str, Any] = {
    "mapping": lambda: {"a": 1, "b": 2},
    "items": lambda: {"a": 1, "b": 2}.items(),
    "list": lambda: [("a", 7), ("b", 2), ("a", 1)],
    "generator": lambda: ((key, val) for key, val in [("a", 1), ("b", 2)]),
    "arrow": lambda: pa().table({"key": ["a", "b"], "val": [1, 2]}),
    "batches": lambda: iter(pa().table({"key": ["a", "b"], "val": [1, 2]}).to_batches()),
    "polars": lambda: __import__("polars").DataFrame({"key": ["a", "b"], "val": [1, 2]}),
    "pandas": lambda: __import__("pandas").DataFrame({"key": ["a", "b"], "val": [1, 2]}),
    "rows of pandas": lambda: _every_other(
        __import__("pandas").DataFrame({"key": ["a", "x", "y", "b", "z"], "val": [1, 0, 0, 2, 0]})
    ),
    "mappings": lambda: [{"a": 7}, {"b": 2, "a": 1}],
    "iterator of mappings": lambda: iter([{"a": 7}, ("b", 2), {"a": 1}, {}]),
    "frames": lambda: [
        __import__("polars").DataFrame({"key": [k], "val": [v]}) for k, v in (("a", 1), ("b", 2))
    ],
}


def _every_other(frame: Any) -> Any:
    """Those with a val, under the index that they had."""
    return frame[frame.val != 0]


def pa() -> Any:
    import pyarrow

    return pyarrow


@pytest.mark.parametrize("form", FORMS)
async def test_put_many_takes(form: str, quiet: ap.Client) -> None:
    """Entries in every form, all at one time; of several vals of a key the last."""
    table = quiet.table("t", str, int)
    await table.put("z", 0)
    seqno = await versions(quiet, "t")
    time = await table.put_many(FORMS[form]())
    assert await entries(table) == [("a", 1), ("b", 2), ("z", 0)]
    assert await versions(quiet, "t") == seqno + 1
    async with quiet.reader("t", table.schema) as reader, reader.listen(0) as listen:
        async for updates in listen.steps():
            found = updates.updates.to_arrow().column("time").to_pylist()
            assert found[-2:] == [time, time]
            break


async def test_put_many_takes_flat_columns(quiet: ap.Client) -> None:
    """A model's fields may be columns of their own."""
    table = quiet.table("t", str, Size)
    await table.put_many(pa().table({"key": ["a", "b"], "rows": [1, 2], "name": ["x", None]}))
    assert await entries(table) == [("a", Size(rows=1, name="x")), ("b", Size(rows=2))]


async def test_many_rows_are_counted_without_holding_them(
    quiet: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, rows = quiet.table("t", int, int), 70_000
    numbers = list(range(rows))
    time = await table.put_many(pa().table({"key": numbers, "val": numbers}))
    await table.put_many(pa().table({"key": numbers[: rows // 2], "val": [0] * (rows // 2)}))
    is_zero = pyarrow.compute.field("val") == 0
    monkeypatch.delattr(ap.Snapshot, "to_arrow")
    assert await table.count() == rows
    assert await table.count(where=is_zero) == rows // 2
    assert await table.count(as_of=time, where=is_zero) == 1
    assert await table.count(1_000, 2_000) == 1_000


async def test_put_many_takes_streams(quiet: ap.Client) -> None:
    """More rows than one chunk, in one version."""
    table = quiet.table("t", int, int)
    await table
    seqno = await versions(quiet, "t")
    await table.put_many((i % 30_000, i) for i in range(60_000))
    assert await table.count() == 30_000
    assert await table.get(5) == 30_005
    assert (await table.view()).keys == 30_000
    assert await versions(quiet, "t") <= seqno + 2  # the writer registers


async def test_the_contents_as_frames(client: ap.Client) -> None:
    """Columns `key` and `val` or those asked for, no diff, one row per key, in key order."""
    table = client.table("t", str, Size)
    await table.put_many({key: Size(rows=i, name=None if i % 2 else "x") for i, key in enumerate("cab")})
    arrow = await table.to_arrow()
    assert arrow.column_names == ["key", "val"]
    assert arrow.column("key").to_pylist() == ["a", "b", "c"]
    chosen = await table.to_arrow(columns=["val.name", "rows"])
    assert chosen.to_pydict() == {"val.name": [None, "x", "x"], "rows": [1, 2, 0]}
    same = await table.to_arrow(columns=["name"])
    assert same.num_rows == 3  # one row per key, though two are equal
    assert (await table.to_polars(columns=["key"])).to_dict(as_series=False) == {"key": ["a", "b", "c"]}
    assert list((await table.to_pandas(start="b")).key) == ["b", "c"]
    assert await refused(table.to_arrow(columns=["no"])) is ap.UsageKind.INVALID_COLUMN


async def test_datetimes_are_times(client: ap.Client) -> None:
    """`as_of` takes aware datetimes, and an instant that is past is complete, also at rest."""
    table = client.table("t", str, int)
    before = datetime.now(UTC) - timedelta(minutes=1)
    time = await table.put("a", 1)
    at = datetime.fromtimestamp(time / 1e6, UTC) + timedelta(microseconds=1)
    assert await table.get("a", as_of=at) == 1
    assert await table.get("a", as_of=before) is None
    assert await entries(table, as_of=before) == []
    nothing: Any = pytest.importorskip("pandas").NaT
    for bad in (datetime(2020, 1, 1), nothing):
        assert await refused(table.get("a", as_of=bad)) is ap.UsageKind.INVALID_TIME


async def test_an_instant_is_the_same_in_each_zone(client: ap.Client) -> None:
    """To the microsecond, by every call that takes one: also in the hour that a zone has twice."""
    table, zone = client.table("t", str, int), ZoneInfo("Europe/Berlin")
    twice = datetime(2025, 10, 26, 2, 30, tzinfo=zone)
    feeds = [table.changes(as_of=at) for at in (twice, twice.replace(fold=1))]
    for feed, utc in zip(feeds, (0, 1), strict=True):
        async with feed:
            upper = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(
                microseconds=(await anext(feed)).upper.time - 1
            )
            assert upper == datetime(2025, 10, 26, utc, 30, tzinfo=UTC)
    first, last = await table.put("a", 1), await table.put("a", 2)
    for at_zone in (zone, timezone(timedelta(hours=5, minutes=45, microseconds=7))):
        for time, val in ((first - 1, None), (first, 1), (last - 1, 1), (last, 2)):
            at = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time)).astimezone(at_zone)
            there = {} if val is None else {"a": val}
            assert await table.get("a", as_of=at) == val
            assert await table.get_many(["a"], as_of=at) == dict(await entries(table, as_of=at)) == there
            assert await table.count(as_of=at) == len(there)
            async with table.changes(as_of=at) as feed:
                step = await anext(feed)
                assert ([c.new for c in step.changes], step.upper.time) == ([*there.values()], time + 1)
            async with table.subscription("s", start=at) as sub:
                expected = [new for put, new in ((first, 1), (last, 2)) if put > time]
                found = changes_of(await steps_until(sub, lambda s, e=expected: len(changes_of(s)) >= len(e)))
                assert [change.new for change in found] == expected
            await client.admin.drop_subscription("t", "s")


async def test_what_is_stale_is_of_an_open_client_and_its_loop() -> None:
    """Goal: a call without a request is a call, too."""
    client = await ap.open("mem://", maintenance=False)
    table = client.table("t", int, int)
    await table.put(1, 1)

    def calls() -> list[Any]:
        return [table.get(1, stale=True), table.get_many([1], stale=True), table.view()]

    def in_another_loop() -> list[ap.UsageKind]:
        return [asyncio.run(refused(call)) for call in calls()]

    assert await asyncio.to_thread(in_another_loop) == [ap.UsageKind.WRONG_LOOP] * 3
    await client.aclose()
    assert [await refused(call) for call in calls()] == [ap.UsageKind.CLOSED] * 3
