"""Hints between processes by LISTEN/NOTIFY.

Notifications are sent after commits, from a task of their own and another connection, since a NOTIFY
inside a transaction makes commits wait for each other. What moves while one is sent goes with the
next, so their number is bounded by round trips, not by commits. A hint that gets lost costs latency.

*Who listens* holds an advisory lock, shared, on the connection it listens on, from before that. A commit
tries to take it exclusively for its own duration: where it succeeds nobody listens, and nothing is sent.
Who begins to listen meanwhile waits for the end of that commit, and then looks for himself. Two commits
at once may hinder each other: then one of them sends for nobody.

One connection listens, from the first watch on. Whenever it is (again) there, everybody is woken: what
moved before came without a hint. It is asked for a sign of life now and then, since a network that
silently drops packets would keep it looking well.

A server may refuse to listen (a standby, a pooler, a missing privilege) or cut the connection at once.
Each attempt then waits longer than the one before, until one has lasted; those who wait look for
themselves meanwhile, as after a lost hint, and the log says so once.
"""

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Collection

from aiopersist.errors import Error
from aiopersist.runtime import Runtime
from aiopersist.storage.postgres.pool import Connection, Pool
from aiopersist.storage.postgres.sql import LISTENS, listeners_lock
from aiopersist.storage.waiters import Waiters

log = logging.getLogger("aiopersist")

PAYLOAD_BYTES_MAX = 7900  # the server's limit is 8000
SIGN_OF_LIFE_S = 30.0
SIGN_OF_LIFE_TIMEOUT_S = 10.0
LASTING_S = 5.0  # a connection that lasted as long was well; without one for as long the log says so
NOTIFY = "SELECT pg_notify($1, message) FROM unnest($2::text[]) AS message"
_ALL = "*"  # stands for keys that do not fit


class NotifyHints:
    """Wakes `waiters` for what this instance and others of the same schema commit."""

    def __init__(self, pool: Pool, schema: str, waiters: Waiters, runtime: Runtime) -> None:
        self._pool = pool
        self._channel = "aiopersist_" + hashlib.sha256(schema.encode()).hexdigest()[:16]
        self._lock = listeners_lock(schema)
        self._waiters = waiters
        self._runtime = runtime
        self._id = str(runtime.uuid())
        self._listening: asyncio.Task[None] | None = None
        self._listens_since = math.inf
        self._telling: asyncio.Task[None] | None = None
        self._moved: set[str] = set()

    def moved(self, keys: Collection[str], alone: bool = False) -> None:
        """Wake those who wait here at once, and tell the others, unless there are none."""
        self._waiters.wake(keys)
        if alone:
            return
        self._moved.update(keys)
        if not self._pool.closed and (self._telling is None or self._telling.done()):
            self._telling = self._pool.spawn(self._tell())

    def listen(self) -> None:
        """Begin to listen, once."""
        if self._listening is None:
            self._listening = self._pool.spawn(self._listen())

    def stop_listening(self) -> None:
        """Nobody waits any more."""
        if self._listening is not None:
            self._listening.cancel()

    async def _tell(self) -> None:
        while self._moved:
            keys, self._moved = self._moved, set()
            try:
                await self._notify(payloads(self._id, keys))
            except Error:  # lost: whoever waits looks for himself after a while
                pass

    async def _notify(self, messages: list[str]) -> None:
        await self._pool.use(lambda connection: connection.execute(NOTIFY, self._channel, messages))

    async def _listen(self) -> None:
        delays, well_at, warned = self._runtime.delays(), self._runtime.monotonic(), False
        while True:
            self._listens_since = math.inf
            failure = await self._listen_once()
            now = self._runtime.monotonic()
            if now - self._listens_since > LASTING_S:
                delays, well_at, warned = self._runtime.delays(), now, False
            elif now - well_at > LASTING_S and not warned:
                warned = True
                log.warning("commits of other processes are noticed late, by polling: %s", failure)
            await self._runtime.sleep(next(delays))

    async def _listen_once(self) -> str:
        """Listen on a connection until it is lost; says why it was."""
        try:
            connection = await self._pool.connect()
        except Error as error:
            return str(error)
        try:
            return await self._listen_on(connection)
        except Exception as error:  # whatever it is, another connection is needed
            return f"postgres cannot listen: {type(error).__name__}: {error}"
        finally:
            connection.terminate()

    async def _listen_on(self, connection: Connection) -> str:
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        async with asyncio.timeout(SIGN_OF_LIFE_TIMEOUT_S):
            await connection.execute(LISTENS.format(self._lock))
            await connection.add_listener(self._channel, self._heard)
        self._listens_since = self._runtime.monotonic()
        self._waiters.wake_all()
        while not lost.is_set():
            try:
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    await lost.wait()
            except TimeoutError:
                await connection.execute("SELECT 1", timeout=SIGN_OF_LIFE_TIMEOUT_S)
        return "postgres ends the connection that listens"

    def _heard(self, connection: object, pid: int, channel: str, payload: object) -> None:
        sender, *keys = json.loads(str(payload))
        if sender == self._id:
            return
        if _ALL in keys:
            self._waiters.wake_all()
        else:
            self._waiters.wake(keys)


def payloads(sender: str, keys: Collection[str]) -> list[str]:
    """Messages that name the sender and all `keys`, each below the server's limit."""
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
