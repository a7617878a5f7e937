"""The bridge between Spark's threads and the event loop: a portal that owns the clients.

Spark's drivers and workers are blocking threads. A worker process of Spark is a fork that lives for one task
or a minute, so its open clients are only a cache. A bridge belongs to a process id: a fork gets a new one.
"""

from collections import Counter
from concurrent.futures import Future
from functools import partial
from threading import Lock

from aiopersist.base.portal import CLOSE_DEADLINE_S, PerProcess, Portal, to_its_end
from aiopersist.client.client import Client
from aiopersist.spark.location import SparkLocation


class Bridge(Portal):
    """See the header. Any thread except the loop's own may call its methods."""

    def __init__(self) -> None:
        super().__init__("the bridge to Spark")
        self._clients: dict[tuple[SparkLocation, bool], Future[Client]] = {}
        self._users: Counter[tuple[SparkLocation, bool]] = Counter()
        self._lasting: set[tuple[SparkLocation, bool]] = set()
        self._lock = Lock()
        self.is_worker = False
        """Whether this process runs Spark's tasks."""

    def client(self, location: SparkLocation, *, maintenance: bool = False) -> Client:
        """The client of the location. The first call opens it, for the rest of the process; after a failure
        the next call opens it again."""
        with self._lock:
            self._lasting.add((location, maintenance))
        return self._opened((location, maintenance))

    def _opened(self, key: tuple[SparkLocation, bool]) -> Client:
        location, maintenance = key
        with self._lock:
            future = self._clients.get(key)
            if future is None or (future.done() and future.exception() is not None):
                opening = partial(location.open, maintenance=maintenance)
                future = self._clients[key] = self.start(opening)
        return future.result()

    def acquire(self, location: SparkLocation, *, maintenance: bool) -> Client:
        """The client, for a caller that will `release` it."""
        key = (location, maintenance)
        with self._lock:
            self._users[key] += 1
        try:
            return self._opened(key)
        except BaseException:
            with self._lock:
                self._users[key] -= 1
            raise

    def release(self, location: SparkLocation, *, maintenance: bool) -> None:
        """End one use. The last one closes the client, unless `client` has returned it."""
        key = (location, maintenance)
        with self._lock:
            self._users[key] -= 1
            unused = not self._users[key] and key not in self._lasting
            client = self._clients.pop(key, None) if unused else None
        if client is not None:
            self.run(to_its_end, client.result().aclose)

    def close_all(self) -> None:
        """Close all clients, each within `CLOSE_DEADLINE_S`; the rest end with their leases. A worker's
        clients stay open: their staged batches outlive the process until the leases end."""
        if self.is_worker:
            return
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        closings = [
            self.start(client.result().aclose)
            for client in clients
            if client.done() and client.exception() is None
        ]
        for future in closings:
            try:
                future.result(CLOSE_DEADLINE_S)
            except Exception:  # the process ends; leases end the rest
                future.cancel()


bridge = PerProcess(Bridge, Bridge.close_all)
