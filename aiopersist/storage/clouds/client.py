"""Requests to one place of a store that obstore knows.

The driver evaluates prefixes by whole components of names and takes no limit of a list: a list is read by
pages of 1,000 names (5,000 in Azure), and only as far as it is wanted.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import obstore

from aiopersist.base.resource import run_bounded
from aiopersist.base.runtime import OwnProcess
from aiopersist.base.settings import MIB
from aiopersist.storage.clouds import errors as errors
from aiopersist.storage.clouds.places import CloudPlace
from aiopersist.storage.keys import closed
from aiopersist.storage.objects.answers import ForeignAnswer, is_page, tag_of

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta

T = TypeVar("T")

REQUESTS_AT_ONCE = 32
DELETES_AT_ONCE = 16
PAGE = 1000  # names that are handed over at once
PART_BYTES = 8 * MIB  # above it, parts in parallel are faster than one stream
PARTS_AT_ONCE = 4
CLOSE_TIMEOUT_S = 5.0

_threads: OwnProcess | None = None  # of the driver, which begins them once in a process, and never in a child


class CloudClient:
    """Requests to `place`. `what` names the store in errors."""

    def __init__(self, place: CloudPlace, store: str) -> None:
        self.place = place
        self._what = store
        self._process = OwnProcess(store)
        self._store = place.store
        self._gate = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._abandoned: set[asyncio.Future[Sequence[ObjectMeta]]] = set()
        """Requests that go on after their caller was cancelled."""
        self._closed = False

    def __repr__(self) -> str:
        return self.place.shown

    def check_open(self) -> None:
        global _threads
        _threads = _threads or OwnProcess("the driver of the store")
        _threads.check()
        self._process.check()
        if self._closed:
            raise closed(self._what)

    async def ask(
        self,
        op: str,
        request: Callable[[], Awaitable[T]],
        *,
        writing: bool = False,
        none_if: Callable[[BaseException], bool] = lambda error: False,
    ) -> T | None:
        """Make one request; its errors become those of this library. `None` for errors that are `none_if`."""
        self.check_open()
        try:
            async with self._gate:
                return await request()
        except Exception as error:
            if none_if(error):
                return None
            raise errors.mapped(error, self.place.shown, op, writing=writing) from error

    async def get(self, name: str) -> tuple[bytes, str] | None:
        """The object and its tag; `None` if it is not there."""

        async def read() -> tuple[bytes, str]:
            answer = await obstore.get_async(self._store, name)
            if is_page(answer.attributes.get("Content-Type")):
                raise ForeignAnswer
            return bytes(await answer.bytes_async()), tag_of(answer.meta["e_tag"])

        return await self.ask("get", read, none_if=errors.is_missing)

    async def get_range(self, name: str, offset: int, length: int) -> bytes | None:
        """`length` bytes from `offset` on, as many as there are; `None` if the object is not there."""

        async def read() -> bytes:
            try:
                return bytes(await obstore.get_range_async(self._store, name, start=offset, length=length))
            except Exception as error:
                if errors.is_beyond_the_end(error):
                    return b""
                raise

        return await self.ask("get_range", read, none_if=errors.is_missing)

    async def put(self, name: str, data: bytes) -> None:
        """Write an object, above `PART_BYTES` in parts of this size."""
        options: dict[str, Any] = {"use_multipart": False}
        if len(data) > PART_BYTES:
            options = {"use_multipart": True, "chunk_size": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
        await self.ask("set", partial(obstore.put_async, self._store, name, data, **options), writing=True)

    async def create(self, name: str, data: bytes) -> str | None:
        """Write an object that is not there; its tag, `None` if it is there. Servers that know no conditions
        write it again."""

        async def put() -> str:
            answer = await obstore.put_async(self._store, name, data, mode="create", use_multipart=False)
            if self.place.has_generations and not answer["version"]:
                raise ForeignAnswer
            return tag_of(answer["e_tag"])

        return await self.ask("set", put, none_if=errors.is_there, writing=True)

    async def names(self, folder: str, after: str = "") -> AsyncGenerator["ObjectMeta", None]:
        """The objects below a folder, which ends in a slash or is empty, in the order of their names. Servers
        may ignore `after`."""
        self.check_open()
        stream = obstore.list(self._store, folder.rstrip("/") or None, offset=after or None, chunk_size=PAGE)
        while page := await self.ask("list", partial(self._following, stream)):
            for meta in page:
                yield meta

    async def folders(self, folder: str) -> tuple[list[str], list[str]]:
        """The folders directly in a folder, without a slash at their ends, and the objects beside them."""
        listed = partial(obstore.list_with_delimiter_async, self._store, folder.rstrip("/") or None)
        answer = await self.ask("list", listed)
        assert answer is not None
        folders = [path.rstrip("/") for path in answer["common_prefixes"]]
        return folders, [meta["path"] for meta in answer["objects"]]

    async def delete(self, names: Sequence[str]) -> None:
        """Delete these objects; those that are absent are fine."""
        self.check_open()
        size = self.place.deletes
        batches = [names[begin : begin + size] for begin in range(0, len(names), size)]
        await run_bounded(DELETES_AT_ONCE, [partial(self._delete, list(batch)) for batch in batches])

    async def _delete(self, batch: list[str]) -> None:
        """Delete these objects together, or each by itself if one is absent: the driver then does not tell
        what became of the others."""
        removed = partial(obstore.delete_async, self._store, batch)
        done = await self.ask("delete", partial(_true, removed), none_if=errors.is_missing, writing=True)
        if done is None and len(batch) > 1:
            await run_bounded(DELETES_AT_ONCE, [partial(self._delete, [name]) for name in batch])

    def facts(self) -> dict[str, str]:
        return {"server": f"{self.place.product} at {self.place.server}"}

    async def aclose(self) -> None:
        """The driver closes the connections with its store, which nothing else refers to then."""
        self._process.check()
        self._closed = True
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=CLOSE_TIMEOUT_S)
        self._store = None
        self.place = self.place._replace(store=None)

    async def _following(self, stream: "ListStream[Sequence[ObjectMeta]]") -> "Sequence[ObjectMeta]":
        """The next objects of a list; none at its end.

        A cancellation leaves the request to end by itself: the driver panics where a list is dropped that
        waits for an answer."""
        following: asyncio.Future[Sequence[ObjectMeta]] = asyncio.ensure_future(anext(stream))
        try:
            return await asyncio.shield(following)
        except StopAsyncIteration:
            return ()
        except asyncio.CancelledError:
            self._abandoned.add(following)
            following.add_done_callback(self._ended)
            raise

    def _ended(self, request: "asyncio.Future[Sequence[ObjectMeta]]") -> None:
        self._abandoned.discard(request)
        if not request.cancelled():
            request.exception()  # nobody waits for it


async def _true(request: Callable[[], Awaitable[None]]) -> bool:
    await request()
    return True
