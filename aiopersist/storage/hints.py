"""Hints between processes of one host: a datagram on the loopback names the keys that moved.

Who watches listens on a port and announces it in the store; who commits sends to each announced port.
No process polls. A datagram that is lost, or that arrives for nothing, costs latency or a read, never
correctness, so nothing here is reliable, and nothing is secret or trusted: a forged hint makes its
receiver look at the store, no more.

A port nobody listens on refuses (the loopback tells the sender at its next datagram): that is how
the announcement of a process that died is found out and swept.
"""

import socket
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping

from aiopersist.storage.watchers import Watchers

_LOOPBACK = "127.0.0.1"
_DATAGRAM_BYTES_MAX = 8 * 1024  # well below what the loopback carries in one piece


class HintListener:
    """A port and a thread that wakes watchers for what arrives there."""

    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def listen(self) -> int:
        """Begin to listen, once; the port. Does not wait."""
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
            address = sock.getsockname()
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"", address)  # wakes the thread, which closes the port

    def _receive(self, sock: socket.socket) -> None:
        with sock:
            while True:
                datagram = sock.recv(_DATAGRAM_BYTES_MAX * 2)
                if self._socket is not sock:
                    return
                self._watchers.wake(datagram.decode(errors="replace").split("\0"))


class HintSender:
    """Sends to the ports of others. Used by one thread at a time."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}

    def send(self, targets: Mapping[str, int], keys: Iterable[str]) -> set[str]:
        """Tell the listeners `id -> port` that `keys` moved; the ids of those that are gone."""
        for gone in self._sockets.keys() - targets.keys():
            self._sockets.pop(gone).close()
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
        except OSError:  # its buffer is full: the hint is lost
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
