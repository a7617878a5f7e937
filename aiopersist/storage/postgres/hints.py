"""Hints between processes by LISTEN and NOTIFY.

A separate task sends notifications after the commit, on another connection, since a NOTIFY inside a
transaction makes commits wait for each other. Keys that move while one notification is sent go with the next,
so round trips bound the number of notifications, not commits. A lost hint costs latency.

*Listeners* hold an advisory lock, shared, on the connection on which they listen, and take it before they
listen. A commit tries to take the lock exclusively for its own duration. If it succeeds, no process listens,
and nothing is sent. A process that begins to listen meanwhile waits for the end of that commit, and then
reads the store. Two commits at once may hinder each other: then one of them notifies without need.

One connection listens, from the first watch on. Each time it connects, all waiters are woken: earlier moves
came without a hint. The connection sends a query now and then, since a network that silently drops
packets would keep a lost connection looking alive.

A server may refuse to listen (a standby, a missing privilege) or cut the connection at once. Each
attempt then waits longer than the one before, until one connection has lasted; meanwhile waiters poll, as
after a lost hint, and the log says so once.

At a pooler nobody can listen. There the seqnos of the keys that somebody waits for are read again and again,
all by one statement: soon after something moved, and less often at rest.
"""

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial

from aiopersist.base.errors import Error
from aiopersist.base.runtime import Runtime
from aiopersist.storage.postgres.connect import Connection
from aiopersist.storage.postgres.pool import Pool
from aiopersist.storage.postgres.sql import LISTENS
from aiopersist.storage.postgres.tables import advisory_lock, quoted
from aiopersist.storage.waiters import Waiters

log = logging.getLogger("aiopersist").getChild("storage")

PAYLOAD_BYTES_MAX = 7900  # the server's limit is 8000
KEEPALIVE_S = 30.0  # between two queries on the connection that listens
KEEPALIVE_TIMEOUT_S = 10.0
LASTING_S = 5.0  # a connection that lasts so long is healthy; after so long without one the log says so
NOTIFY = "SELECT pg_notify($1, message) FROM unnest($2::text[]) AS message"
POLL_S = 0.2  # between two looks at a pooler, at first; it grows to the second one
POLL_MAX_S = 2.0
POLL_GROWTH = 1.25
SEQNOS = "SELECT key, seqno FROM {heads} WHERE key = ANY($1::text[])"
_ALL = "*"  # instead of keys that do not fit


class NotifyHints:
    """Wakes `waiters` for the commits of this store and of all others on the same schema."""

    def __init__(self, pool: Pool, schema: str, waiters: Waiters, runtime: Runtime) -> None:
        self._pool = pool
        self._channel = "aiopersist_" + hashlib.sha256(schema.encode()).hexdigest()[:16]
        self._lock = advisory_lock(schema)
        self._seqnos_sql = SEQNOS.format(heads=f"{quoted(schema)}.heads")
        self._waiters = waiters
        self._runtime = runtime
        self._id = str(runtime.uuid())
        self._listening: asyncio.Task[None] | None = None
        self._listening_since = math.inf
        self._notifying: asyncio.Task[None] | None = None
        self._moved: set[str] = set()

    def moved(self, keys: Collection[str], seqnos: Mapping[str, int] = {}, alone: bool = False) -> None:
        """Wake the waiters of this process at once, and notify the others, unless this one is `alone`."""
        self._waiters.wake(keys, seqnos)
        if alone:
            return
        self._moved.update(keys)
        if not self._pool.closed and (self._notifying is None or self._notifying.done()):
            self._notifying = self._pool.spawn(self._notify_all())

    def listen(self) -> None:
        """Begin to listen, once."""
        if self._listening is None:
            self._listening = self._pool.spawn(self._listen())

    def stop_listening(self) -> None:
        """Stop listening; idempotent."""
        if self._listening is not None:
            self._listening.cancel()

    async def _notify_all(self) -> None:
        while self._moved:
            keys, self._moved = self._moved, set()
            with suppress(Error):  # lost: the other processes poll after a while
                await self._pool.use(partial(self._notify, payloads(self._id, keys)))

    async def _notify(self, messages: list[str], connection: Connection) -> None:
        await connection.execute(NOTIFY, self._channel, messages)

    async def _listen(self) -> None:
        delays, healthy_at, warned = self._runtime.delays(), self._runtime.monotonic(), False
        while True:
            self._listening_since = math.inf
            failure = await self._listen_once()
            now = self._runtime.monotonic()
            if now - self._listening_since > LASTING_S:
                delays, healthy_at, warned = self._runtime.delays(), now, False
            elif now - healthy_at > LASTING_S and not warned:
                warned = True
                text, extra = "commits of other processes are noticed late, by polling: %s", {"op": "watch"}
                log.warning(text, failure, extra=extra)
            await self._runtime.sleep(next(delays))

    async def _listen_once(self) -> str:
        """Listen on a connection until it is lost; return the reason."""
        try:
            connection = await self._pool.connect()
        except Error as error:
            return str(error)
        if connection.pooled:
            connection.terminate()
            return await self._look()
        try:
            return await self._listen_on(connection)
        except Exception as error:  # after any error a new connection is needed
            return f"postgres cannot listen: {type(error).__name__}: {error}"
        finally:
            connection.terminate()

    async def _listen_on(self, connection: Connection) -> str:
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        async with asyncio.timeout(KEEPALIVE_TIMEOUT_S):
            await connection.execute(LISTENS.format(self._lock))
            await connection.add_listener(self._channel, self._heard)
        self._listening_since = self._runtime.monotonic()
        self._waiters.wake_all()
        while not lost.is_set():
            try:
                async with asyncio.timeout(KEEPALIVE_S):
                    await lost.wait()
            except TimeoutError:
                await connection.execute("SELECT 1", timeout=KEEPALIVE_TIMEOUT_S)
        return "postgres closed the connection that listens"

    async def _look(self) -> str:
        """Wake those whose keys have moved since the look before, until a look fails; return the reason."""
        self._listening_since = self._runtime.monotonic()
        last: dict[str, int | None] = {}  # also of keys for which nobody waited at the last look only
        before, delay = set[str](), POLL_S
        while True:
            keys = self._waiters.keys()
            try:
                seqnos = await self._pool.read(partial(self._seqnos, keys)) if keys else {}
            except Error as error:
                return str(error)
            moved = [key for key in keys if key not in last or last[key] != seqnos.get(key)]
            last = {key: last[key] for key in before if key in last} | {key: seqnos.get(key) for key in keys}
            before = {*keys}
            self._waiters.wake(moved)
            delay = POLL_S if moved else min(delay * POLL_GROWTH, POLL_MAX_S)
            await self._runtime.sleep(delay)

    async def _seqnos(self, keys: Collection[str], connection: Connection) -> dict[str, int]:
        return {row["key"]: row["seqno"] for row in await connection.fetch(self._seqnos_sql, list(keys))}

    def _heard(self, connection: object, pid: int, channel: str, payload: object) -> None:
        sender, keys = heard(str(payload))
        if sender == self._id:
            return
        if _ALL in keys:
            self._waiters.wake_all()
        else:
            self._waiters.wake(keys)


def heard(payload: str) -> tuple[str, list[str]]:
    """The sender and the keys of a message. Anybody may send on a channel: another text counts as a message
    from nobody about all keys."""
    try:
        texts = json.loads(payload)
    except (ValueError, RecursionError):
        texts = None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        return "", [_ALL]
    return texts[0], texts[1:]


def payloads(sender: str, keys: Collection[str]) -> list[str]:
    """Messages that carry the sender and all `keys`, each below the server's limit."""
    messages: list[str] = []
    group: list[str] = [sender]
    size = 0
    for key in keys:
        key_size = len(json.dumps(key, ensure_ascii=False).encode()) + 2
        if key_size + len(sender) + 8 > PAYLOAD_BYTES_MAX:
            return [json.dumps([sender, _ALL])]
        if size + key_size + len(sender) + 8 > PAYLOAD_BYTES_MAX:
            messages.append(json.dumps(group, ensure_ascii=False))
            group, size = [sender], 0
        group.append(key)
        size += key_size
    return [*messages, json.dumps(group, ensure_ascii=False)]
