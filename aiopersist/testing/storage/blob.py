"""What every `Blob` must do, as a test class to inherit from.

    class TestMine(BlobConformance):
        @pytest.fixture
        async def handles(self):
            one, two = MyBlob(...), MyBlob(...)     # two handles on the same empty store
            yield one, two
            await one.aclose()
            await two.aclose()

Needs pytest and pytest-asyncio, in strict or in auto mode. The tests write through one handle and read
through the other, so that no store passes because a handle remembers what it wrote.
"""

import asyncio
import contextlib

import pytest

from aiopersist.base.errors import Unsupported
from aiopersist.base.runtime import SYSTEM
from aiopersist.base.settings import MIB
from aiopersist.storage.blob import Blob
from aiopersist.testing.fixtures import TakesHandles

Handles = tuple[Blob, Blob]

KEYS = {
    "plain": "a",
    "nested": "s1/w2/3.parquet",
    "space": "a b/c d",
    "percent": "50%25/x%2Fy",
    "plus": "a+b=c&d",
    "question": "what?/x#y",
    "quotes": 'it\'s "quoted"',
    "tilde": "~user/x~",
    "tmp": "tmp/x",
    "tmp-like": "tmp~/x",
    "dots": "..a/b../...",
    "colon": "c:x/y;z,w",
    "unlike-xml": "<a>&amp;",
    "backslash": "a\\b",
    "long": "x" * 200,
}


async def listed(blob: Blob, prefix: str = "") -> dict[str, int]:
    """The keys and their sizes; a key that is listed twice is a failure."""
    items = [item async for item in blob.list(prefix)]
    sizes = dict(items)
    assert len(sizes) == len(items)
    return sizes


class BlobConformance(TakesHandles):
    """Inherit, and define a fixture `handles`: two handles on the same empty store, with nothing shared in
    memory that two processes could not share."""

    pytestmark = pytest.mark.asyncio

    async def test_missing_is_none(self, handles: Handles) -> None:
        one, _ = handles
        assert await one.get("a/b") is None
        assert await one.get_range("a/b", 0, 10) is None
        assert await listed(one) == {}

    @pytest.mark.parametrize("size", [0, 1, 1024, MIB + 1], ids=str)
    async def test_a_value_comes_back(self, handles: Handles, size: int) -> None:
        one, two = handles
        data = bytes(i % 251 for i in range(size))
        await one.set("k", data)
        assert await two.get("k") == data
        assert await one.get("k") == data
        assert await listed(two) == {"k": size}

    async def test_a_big_value_comes_back(self, handles: Handles) -> None:
        one, two = handles
        data = bytes(range(256)) * (20 * 4 * 1024) + b"end"
        await one.set("big", memoryview(data))
        assert await two.get("big") == data
        assert await two.get_range("big", 8 * MIB - 2, 4) == data[8 * MIB - 2 : 8 * MIB + 2]
        assert await listed(two) == {"big": len(data)}

    async def test_a_memoryview_is_taken(self, handles: Handles) -> None:
        one, two = handles
        await one.set("k", memoryview(b"xabcx")[1:4])
        assert await two.get("k") == b"abc"

    async def test_what_is_kept_is_not_the_buffer(self, handles: Handles) -> None:
        one, two = handles
        buffer = bytearray(b"before")
        await one.set("k", memoryview(buffer))
        buffer[:] = b"after!"
        assert await two.get("k") == b"before"

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, 3), (2, 4), (0, 10), (9, 1), (9, 5), (5, 0), (10, 1), (10, 0), (50, 5), (0, 100)],
        ids=str,
    )
    async def test_a_range_is_a_slice(self, handles: Handles, offset: int, length: int) -> None:
        one, two = handles
        await one.set("k", b"0123456789")
        assert await two.get_range("k", offset, length) == b"0123456789"[offset : offset + length]

    @pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, 1), (3, 4)], ids=str)
    async def test_a_range_of_an_empty_value(self, handles: Handles, offset: int, length: int) -> None:
        one, two = handles
        await one.set("empty", b"")
        assert await two.get_range("empty", offset, length) == b""

    @pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
    async def test_a_legal_key(self, handles: Handles, key: str) -> None:
        one, two = handles
        await one.set(key, b"abc")
        assert await two.get(key) == b"abc"
        assert await two.get_range(key, 1, 1) == b"b"
        assert await listed(two) == {key: 3}
        assert await listed(two, key) == {key: 3}
        await two.delete([key])
        assert await one.get(key) is None
        assert await listed(one) == {}

    async def test_keys_are_told_apart(self, handles: Handles) -> None:
        one, two = handles
        keys = ["a/x", "a/X", "A/x", "a/x.", "a/x~", "tmp/x", "tmp~/x", "a%2Fx", "b/tmp/x"]
        for key in keys:
            await one.set(key, key.encode())
        assert {key: await two.get(key) for key in keys} == {key: key.encode() for key in keys}
        assert set(await listed(two)) == set(keys)

    async def test_setting_again_is_harmless(self, handles: Handles) -> None:
        one, two = handles
        await asyncio.gather(*(handle.set("a/k", b"same") for handle in [one, two] * 8))
        assert await one.get("a/k") == b"same"
        assert await listed(two) == {"a/k": 4}

    async def test_a_value_is_created_once(self, handles: Handles) -> None:
        one, two = handles
        attempts = [handle.create("a/k", str(i).encode()) for i, handle in enumerate([one, two] * 8)]
        try:
            written = await asyncio.gather(*attempts)
        except Unsupported:
            pytest.skip("it cannot create values")
        assert written.count(True) == 1
        value = str(written.index(True)).encode()
        assert await two.get("a/k") == value
        assert await listed(two) == {"a/k": len(value)}
        await one.delete(["a/k"])
        assert await two.create("a/k", b"again")
        assert await one.get("a/k") == b"again"

    async def test_list_takes_a_prefix_of_text(self, handles: Handles) -> None:
        one, two = handles
        keys = ["ab/1", "ab/2", "abc/1", "ac/1", "ab/c/1", "b"]
        for key in keys:
            await one.set(key, b"x")
        for prefix in ["", "a", "ab", "ab/", "ab/c", "ab/c/1", "ab/c/12", "c", "b", "b/", "../", "/", "a//"]:
            assert set(await listed(two, prefix)) == {key for key in keys if key.startswith(prefix)}

    async def test_list_is_complete_beyond_a_page(self, handles: Handles) -> None:
        one, two = handles
        keys = [f"many/{i % 7}/{i}" for i in range(1234)]
        gate = asyncio.Semaphore(32)

        async def put(key: str) -> None:
            async with gate:
                await one.set(key, key.encode())

        await asyncio.gather(*map(put, keys))
        assert await listed(two, "many/") == {key: len(key) for key in keys}
        await two.delete([*keys, "many/absent"])
        assert await listed(one, "many/") == {}

    async def test_a_list_may_be_left_early(self, handles: Handles) -> None:
        one, two = handles
        for i in range(5):
            await one.set(f"k{i}", b"x")
        async for _ in two.list("k"):
            break
        assert len(await listed(two)) == 5

    async def test_delete(self, handles: Handles) -> None:
        one, two = handles
        await one.set("a/1", b"x")
        await one.set("a/2", b"x")
        await two.delete(["a/1", "absent", "a/absent", "a/1/absent"])
        await two.delete(["a/1"])
        await two.delete([])
        assert await one.get("a/1") is None
        assert await listed(one) == {"a/2": 1}
        await one.set("a/3", b"x")
        assert await listed(two, "a/") == {"a/2": 1, "a/3": 1}

    async def test_a_value_is_whole_or_not_there(self, handles: Handles) -> None:
        """Readers beside a writer see nothing or the whole value."""
        one, two = handles
        data = b"0123456789abcdef" * (MIB // 16)
        writing = asyncio.create_task(one.set("k", data))
        while not writing.done():
            values = await two.get("k")
            assert values is None or values == data
            for size in (await listed(two)).values():
                assert size == len(data)
            await SYSTEM.sleep(0)  # a store that never waits lets no other task run
        await writing
        assert await two.get("k") == data

    async def test_many_at_once(self, handles: Handles) -> None:
        one, two = handles
        await asyncio.gather(*(one.set(f"k/{i}", b"%d" % i) for i in range(100)))
        values = await asyncio.gather(*(two.get(f"k/{i}") for i in range(100)))
        assert values == [b"%d" % i for i in range(100)]

    async def test_a_cancelled_call_leaves_the_handle_usable(self, handles: Handles) -> None:
        one, two = handles
        data = b"x" * 200_000
        for i in range(10):
            task = asyncio.create_task(one.set(f"c/{i}", data))
            for _ in range(i):
                await SYSTEM.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            reading = asyncio.create_task(one.get(f"c/{i}"))
            await SYSTEM.sleep(0)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        await one.set("after", b"1")
        assert await two.get("after") == b"1"
        for size in (await listed(two, "c/")).values():
            assert size == len(data)

    async def test_closing_twice_is_harmless(self, handles: Handles) -> None:
        one, two = handles
        await one.set("k", b"x")
        await one.aclose()
        await one.aclose()
        assert await two.get("k") == b"x"
