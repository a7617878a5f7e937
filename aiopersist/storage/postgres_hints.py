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
"""

import asyncio
import hashlib
import json
from collections.abc import Collection

from aiopersist.errors import Error
from aiopersist.runtime import Runtime
from aiopersist.storage.postgres_pool import Connection, Pool
from aiopersist.storage.postgres_sql import LISTENS, listeners_lock
from aiopersist.storage.watchers import Watchers

PAYLOAD_BYTES_MAX = 7900  # the server's limit is 8000
SIGN_OF_LIFE_S = 30.0
SIGN_OF_LIFE_TIMEOUT_S = 10.0
NOTIFY = "SELECT pg_notify($1, message) FROM unnest($2::text[]) AS message"
_ALL = "*"  # stands for keys that do not fit


class Hints:
    """Wakes `watchers` for what this instance and others of the same schema commit."""

    def __init__(self, pool: Pool, schema: str, watchers: Watchers, runtime: Runtime) -> None:
        self._pool = pool
        self._channel = "aiopersist_" + hashlib.sha256(schema.encode()).hexdigest()[:16]
        self._lock = listeners_lock(schema)
        self._watchers = watchers
        self._runtime = runtime
        self._id = str(runtime.uuid())
        self._listening: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._moved: set[str] = set()

    def moved(self, keys: Collection[str], alone: bool = False) -> None:
        """Wake those who wait here at once, and tell the others, unless there are none."""
        self._watchers.wake(keys)
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
        while True:
            for delay in self._runtime.delays():
                try:
                    connection = await self._pool.connect()
                except Error:
                    await self._runtime.sleep(delay)
                else:
                    break
            try:
                await self._listen_on(connection)
            finally:
                connection.terminate()
                self._watchers.wake_all()

    async def _listen_on(self, connection: Connection) -> None:
        """Returns when the connection is lost."""
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        try:
            async with asyncio.timeout(SIGN_OF_LIFE_TIMEOUT_S):
                await connection.execute(LISTENS.format(self._lock))
                await connection.add_listener(self._channel, self._heard)
            self._watchers.wake_all()
            while not lost.is_set():
                try:
                    async with asyncio.timeout(SIGN_OF_LIFE_S):
                        await lost.wait()
                except TimeoutError:
                    await connection.execute("SELECT 1", timeout=SIGN_OF_LIFE_TIMEOUT_S)
        except Exception:  # whatever it is, another connection is needed
            return

    def _heard(self, connection: object, pid: int, channel: str, payload: object) -> None:
        sender, *keys = json.loads(str(payload))
        if sender == self._id:
            return
        if _ALL in keys:
            self._watchers.wake_all()
        else:
            self._watchers.wake(keys)


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
