"""Hints between processes of one host: a datagram on the loopback interface names the keys that moved.

A process that waits for hints listens on a port and announces the port in the store; a process that commits
sends to each announced port. No process polls. A datagram that is lost, or that nothing caused, costs latency
or a read, never correctness: so nothing here is reliable, secret or trusted. A forged hint makes its receiver
read the store, no more.

A port on which no process listens refuses: the loopback interface tells the sender at its next datagram.
That is how the announcement of a process that died is found and deleted.
"""

import socket
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress

from aiopersist.storage.waiters import Waiters

_LOOPBACK = "127.0.0.1"
_DATAGRAM_BYTES_MAX = 8 * 1024  # well below what the loopback interface carries in one piece


class LoopbackHints:
    """The hints of one handle: `waiters` are the tasks that wait here, under `id` it is announced."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.waiters = Waiters()
        self.listener = HintListener(self.waiters)
        self.sender = HintSender()
        self.unreachable: set[str] = set()
        """Ids of announced listeners that no longer listen."""


class HintListener:
    """A port, and a thread that wakes waiters for each datagram that arrives there."""

    def __init__(self, waiters: Waiters) -> None:
        self._waiters = waiters
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def listen(self) -> int:
        """Begin to listen, once, and return the port. Does not wait."""
        with self._lock:
            if self._socket is None:
                sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                sock.bind((_LOOPBACK, 0))
                self._socket = sock
                threading.Thread(
                    target=self._receive, args=(sock,), name="aiopersist-hints", daemon=True
                ).start()
            port: int = self._socket.getsockname()[1]
            return port

    def close(self) -> None:
        """Stop listening; idempotent."""
        with self._lock:
            sock, self._socket = self._socket, None
            if sock is not None:
                _wake(sock)

    def _receive(self, sock: socket.socket) -> None:
        with sock:
            while True:
                datagram = sock.recv(_DATAGRAM_BYTES_MAX * 2)
                with self._lock:
                    if self._socket is not sock:
                        return
                self._waiters.wake(datagram.decode(errors="replace").split("\0"))


def _wake(sock: socket.socket) -> None:
    """End a wait of the thread, which then closes the port."""
    try:
        sock.sendto(b"", sock.getsockname())  # to itself: there may be no descriptor left for another one
    except OSError:  # a container may have no loopback interface
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


class HintSender:
    """Sends hints to the ports of other processes. One thread uses it at a time."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}

    def send(self, targets: Mapping[str, int], keys: Iterable[str]) -> set[str]:
        """Tell the listeners `id -> port` that `keys` moved; return the ids of those that are gone."""
        for listener in self._sockets.keys() - targets.keys():
            self._sockets.pop(listener).close()
        datagrams = list(_datagrams(keys))
        return {listener for listener, port in targets.items() if not self._sent(listener, port, datagrams)}

    def close(self) -> None:
        """Release the sockets."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()

    def _sent(self, listener: str, port: int, datagrams: Collection[bytes]) -> bool:
        try:
            sock = self._sockets.get(listener)
            if sock is None:
                sock = self._sockets[listener] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                sock.setblocking(False)
                sock.connect((_LOOPBACK, port))
            for datagram in datagrams:
                sock.send(datagram)
        except ConnectionRefusedError:
            return False
        except OSError:  # the receiver's buffer is full: the hint is lost
            pass
        return True


def _datagrams(keys: Iterable[str]) -> Iterator[bytes]:
    datagram = b""
    for key in keys:
        data = key.encode()
        if datagram and len(datagram) + len(data) >= _DATAGRAM_BYTES_MAX:
            yield datagram
            datagram = b""
        datagram = datagram + b"\0" + data if datagram else data
    if datagram:
        yield datagram
