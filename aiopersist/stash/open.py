"""Opening a stash: by URL, or in a location's own consensus database; to own it, to share it, or to read it.

| mode              | makes the stash | takes it over | can be fenced | changes              |
|-------------------|-----------------|---------------|---------------|----------------------|
| `exclusive=True`  | yes             | yes           | yes           | durable              |
| `exclusive=False` | yes             | no            | yes           | durable              |
| `readonly=True`   | no              | no            | no            | refused              |
| `savepoint=True`  | no              | no            | no            | in memory, then lost |
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Self

import anyio.to_thread

from aiopersist.base.errors import (
    Indeterminate,
    InvalidLocation,
    InvalidUsage,
    StorageUnavailable,
    Unsupported,
    UsageKind,
    shown,
)
from aiopersist.base.resource import Opening, Scope
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.base.settings import Settings, settings_or_environment
from aiopersist.base.supervisor import Supervisor
from aiopersist.data.lazy import import_arrow, warm_up
from aiopersist.measure.metrics import Metrics
from aiopersist.stash.errors import StashError
from aiopersist.stash.memory import DraftStore, MemoryStore, StashTables
from aiopersist.stash.model import Opener, Select
from aiopersist.stash.session import StashSession
from aiopersist.stash.stash import MemoryStash, PostgresStash, SqliteStash, Stash
from aiopersist.stash.store import Store
from aiopersist.storage.address import Address, scheme_of
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.layers import Retry
from aiopersist.storage.memory import MemoryConsensus
from aiopersist.storage.urls import extra, memory_name

DEFAULT_NAME = "stash"


class Mode(NamedTuple):
    """The rights of an opener."""

    exclusive: bool = True
    readonly: bool = False
    savepoint: bool = False

    def checked(self) -> Self:
        """This mode; `INVALID_MODE` for rights that exclude each other."""
        if self.readonly and self.savepoint:
            text = "a stash is opened readonly or as a savepoint, not both"
            raise InvalidUsage(UsageKind.INVALID_MODE, text)
        return self

    @property
    def writes(self) -> bool:
        return not (self.readonly or self.savepoint)


class StashLocation(NamedTuple):
    """The location of one stash: its class, and how to make its store; `store(writes)` does no I/O."""

    kind: type[Stash]
    store: Callable[[bool], Store]


def open(  # noqa: A001  # `ap.stash.open`
    url: str,
    settings: Settings | None = None,
    *,
    exclusive: bool = True,
    readonly: bool = False,
    savepoint: bool = False,
    runtime: Runtime = SYSTEM,
) -> Opening[Stash]:
    """The stash at `mem://name`, `sqlite:///path` or `postgres://...?schema=stash`.

    By default this opener takes it over: the next call of every earlier opener fails as unrecoverable. With
    `exclusive=False` several processes share it. `readonly=True` creates nothing and changes nothing;
    `savepoint=True` keeps changes in memory and drops them at the end.

    `InvalidLocation` at once for a URL that cannot be used, `StorageUnavailable` after
    `settings.open_timeout_s`, `StashError` if the last two modes find no stash."""
    chosen = settings_or_environment(settings)
    mode = Mode(exclusive, readonly, savepoint).checked()
    location = _location(url, runtime, chosen)

    async def open_stash() -> Stash:
        stash = await opened(location, mode, chosen, runtime)
        stash._tasks = stash._session.supervisor
        return stash

    return Opening(open_stash, "aiopersist.stash.open(...)")


def stash_beside(
    url: str | None, consensus: Consensus, name: str, *, runtime: Runtime, settings: Settings
) -> StashLocation:
    """The location of the stash `name`, in the database of a consensus store that was opened by `url`;
    `Unsupported` for another kind, and for a consensus store that was given as an instance."""
    _check_name(name)
    scheme = None if url is None else scheme_of(url)
    if isinstance(consensus, MemoryConsensus) and scheme == "mem":
        return _in_memory(consensus, name)
    if url is not None and scheme == "sqlite":
        return _sqlite(Address.parse(url).file_path, name, runtime)
    if url is not None and scheme in ("postgres", "postgresql"):
        from aiopersist.stash.postgres import PostgresStore, beside

        address = beside(url, name)
        return StashLocation(PostgresStash, lambda writes: PostgresStore(address, settings, writes=writes))
    origin = "given as an instance" if url is None else f"{scheme}://"
    text = f"a stash needs Postgres, SQLite or mem:// as consensus store, opened by its URL, not one {origin}"
    raise Unsupported(text)


async def opened(
    location: StashLocation,
    mode: Mode,
    settings: Settings,
    runtime: Runtime,
    parent: Scope | None = None,
    metrics: Metrics | None = None,
) -> Stash:
    """The stash, opened; `metrics` count its changes. One request; three if it makes the tables."""
    store = location.store(mode.writes)
    supervisor = Supervisor(runtime)
    try:
        await anyio.to_thread.run_sync(_import)
        session = await _session(store, mode, settings, runtime, supervisor)
        session.metrics = metrics or session.metrics
        scope = Scope("the stash", parent)
    except BaseException:
        await store.aclose()
        raise

    async def release() -> None:
        try:
            await session.aclose()
            await supervisor.aclose()
        finally:
            await store.aclose()

    return location.kind(session, scope, release)


async def _session(
    store: Store, mode: Mode, settings: Settings, runtime: Runtime, supervisor: Supervisor
) -> StashSession:
    deadline = settings.open_timeout_s
    retry = Retry(deadline, runtime)
    try:
        async with asyncio.timeout(deadline * 1.5):  # a server that accepts and never answers
            if mode.writes:
                return await _writing(store, mode, settings, runtime, supervisor, retry)
            select = Select() if mode.savepoint else Select(ids=(), rows=False)
            loaded = await retry.repeat("stash.load", lambda: store.load(select))
    except TimeoutError as error:
        raise StorageUnavailable(f"the stash did not answer within {deadline} s") from error
    except Indeterminate as error:
        raise StorageUnavailable(f"the stash cannot be opened: {error}") from error
    if loaded is None:
        raise StashError("there is no stash here: open it to write first")
    session = StashSession(store, None, "", settings=settings, runtime=runtime, supervisor=supervisor)
    return session.draft(DraftStore(loaded), loaded) if mode.savepoint else session


async def _writing(
    store: Store, mode: Mode, settings: Settings, runtime: Runtime, supervisor: Supervisor, retry: Retry
) -> StashSession:
    opener_id, token = str(runtime.uuid()), runtime.token()
    nonce = runtime.token() if mode.exclusive else None
    fence = await retry.repeat("stash.take", lambda: store.take(opener_id, token, nonce))
    opener = Opener(opener_id, fence)
    return StashSession(store, opener, token, settings=settings, runtime=runtime, supervisor=supervisor)


def _import() -> None:
    import_arrow()
    warm_up()


def _location(url: str, runtime: Runtime, settings: Settings) -> StashLocation:
    scheme = scheme_of(url) if isinstance(url, str) else None
    if scheme == "mem":
        return _in_memory(MemoryConsensus(memory_name(url)), DEFAULT_NAME)
    if scheme == "sqlite":
        return _sqlite(Address.parse(url).file_path, DEFAULT_NAME, runtime)
    if scheme in ("postgres", "postgresql"):
        with extra("postgres"):
            from aiopersist.stash.postgres import PostgresStore, at
        address = at(url)
        return StashLocation(PostgresStash, lambda writes: PostgresStore(address, settings, writes=writes))
    examples = "mem://name, sqlite:///path or postgres://..."
    raise InvalidLocation(f"{scheme or 'no scheme'}: name a stash by a URL such as {examples}")


def _in_memory(consensus: MemoryConsensus, name: str) -> StashLocation:
    tables = consensus.attached(f"stash {name}", StashTables)
    return StashLocation(MemoryStash, lambda _: MemoryStore(tables))


def _sqlite(path: str, name: str, runtime: Runtime) -> StashLocation:
    from aiopersist.stash.sqlite import SqliteStore

    return StashLocation(SqliteStash, lambda writes: SqliteStore(path, name, runtime, writes=writes))


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or "\0" in name or not name.isprintable():
        what = f"{shown(name)} is not a name of a stash: give printable text"
        raise InvalidUsage(UsageKind.INVALID_NAME, what, name=name)
