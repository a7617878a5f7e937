"""A disk that keeps what was synced, and of the rest what chance wants.

What a file or folder has beyond its last sync is *pending*: its writes, and the names that were made, moved
and removed. At a loss of power each pending write is there, is lost, or is torn: some of its sectors are
there. Each pending name is there or is lost. A move takes a name away only if it gives the other one. These
are the guarantees of POSIX and of SQLite's "powersafe overwrite", and no more: file systems with a journal
keep more.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.power.trace import Call

SECTOR = 512


@dataclass(eq=False)
class Write:
    """`data` at `offset`; or the size becomes `offset`, if there is no data."""

    offset: int
    data: bytes | None


@dataclass(eq=False)
class Entry:
    """A name gets a node, or is removed. `before`: the half of a move that must be there for this half."""

    name: str
    node: "Node | None"
    before: "Entry | None" = None
    synced: bool = False


@dataclass(eq=False)
class Node:
    """A file or a folder."""

    is_folder: bool
    writes: list[Write] = field(default_factory=list)
    """All, of which the first `synced` are durable."""
    synced: int = 0
    entries: list[Entry] = field(default_factory=list)

    @property
    def changes(self) -> int:
        return len(self.entries if self.is_folder else self.writes)

    def sync(self, changes: int) -> None:
        """The first so many changes are durable from now on."""
        self.synced = max(self.synced, changes)
        for entry in self.entries[:changes]:
            entry.synced = True
            if entry.before is not None:
                entry.before.synced = True

    @property
    def names(self) -> "dict[str, Node]":
        """As the process sees them."""
        found: dict[str, Node] = {}
        for entry in self.entries:
            found.pop(entry.name, None)
            if entry.node is not None:
                found[entry.name] = entry.node
        return found

    @property
    def size(self) -> int:
        size = 0
        for write in self.writes:
            size = write.offset if write.data is None else max(size, write.offset + len(write.data))
        return size


class Opened(NamedTuple):
    node: Node
    appends: bool
    calls: int
    """How many calls had ended when it was opened."""


class Disk:
    """The folder `root`, which is durable and empty at first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = Node(True)
        self.said: list[str] = []
        """The lines that the process wrote to its output."""
        self._files: dict[str, Opened] = {}
        self._at: dict[str, int] = {}
        self._there: dict[Entry, bool] = {}
        self._sizes: list[dict[Node, int]] = []
        """After each call, how many changes nodes had: for syncs that began before they ended."""
        self._changes: dict[Node, int] = {}

    def apply(self, call: Call, *, synced: bool = True) -> None:
        """Carry out the next call. `synced`: whether it may be a sync."""
        if call.name in ("fsync", "fdatasync"):
            if synced and (opened := self._files.get(str(call.arguments[0]))):
                began = self._sizes[call.began - 1] if call.began else {}
                opened.node.sync(began.get(opened.node, 0))
        else:
            act = getattr(self, f"_{call.name}", None)
            assert act is not None, f"what does {call} do to files?"
            act(call)
        self._sizes.append(dict(self._changes))

    def is_of(self, call: Call) -> str:
        """The name of the file or folder that a sync is about."""
        opened = self._files.get(str(call.arguments[0]))
        if opened is None:
            return ""
        return self._name_of(opened.node, self.folder) or "."

    def _name_of(self, node: Node, folder: Node) -> str:
        for name, found in folder.names.items():
            if found is node:
                return name + "/" * node.is_folder
            if found.is_folder and (deeper := self._name_of(node, found)):
                return f"{name}/{deeper}"
        return ""

    # --- calls -------------------------------------------------------------------------------------

    def _place(self, path: bytes | str, base: bytes | str = "AT_FDCWD") -> tuple[Node, str] | None:
        """The folder and the name of a path; `None` outside of `root`."""
        text = os.fsdecode(path)
        if not text.startswith("/"):
            opened = self._files.get(str(base))
            return None if opened is None else self._below(opened.node, text)
        inside = os.path.relpath(text, self.root)
        return None if inside.startswith("..") else self._below(self.folder, inside)

    def _below(self, folder: Node, path: str) -> tuple[Node, str] | None:
        *above, name = path.split("/")
        for part in above:
            folder = folder.names[part]
        return folder, name

    def _openat(self, call: Call) -> None:
        self._opened(call, self._place(call.arguments[1], call.arguments[0]), str(call.arguments[2]))

    def _open(self, call: Call) -> None:
        self._opened(call, self._place(call.arguments[0]), str(call.arguments[1]))

    def _opened(self, call: Call, place: tuple[Node, str] | None, flags: str) -> None:
        descriptor = str(call.result)
        self._files.pop(descriptor, None)
        if place is None:
            return
        folder, name = place
        node = folder if name == "." else folder.names.get(name)
        if node is None:
            assert "O_CREAT" in flags, call
            node = Node(False)
            self._named(folder, Entry(name, node))
        if "O_TRUNC" in flags:
            self._wrote(node, Write(0, None))
        found = Opened(node, "O_APPEND" in flags, len(self._sizes))
        self._files[descriptor], self._at[descriptor] = found, 0

    def _fcntl(self, call: Call) -> None:
        if str(call.arguments[1]).startswith("F_DUPFD"):
            self._dup(call)

    def _dup(self, call: Call) -> None:
        """Both descriptors; nobody writes at the position that they share."""
        if opened := self._files.get(str(call.arguments[0])):
            found = opened._replace(calls=len(self._sizes))
            self._files[str(call.result)], self._at[str(call.result)] = found, 0

    def _close(self, call: Call) -> None:
        """The descriptor is free before the call ends: by then another thread may have opened another file
        under the same number."""
        opened = self._files.get(str(call.arguments[0]))
        if opened is not None and opened.calls < call.began:
            del self._files[str(call.arguments[0])]

    def _write(self, call: Call) -> None:
        descriptor, data = str(call.arguments[0]), call.arguments[1]
        assert isinstance(data, bytes)
        if opened := self._files.get(descriptor):
            at = opened.node.size if opened.appends else self._at[descriptor]
            self._wrote(opened.node, Write(at, data[: call.result]))
            self._at[descriptor] = at + call.result
        elif descriptor == "1":
            self.said += data.decode().splitlines()

    def _pwrite64(self, call: Call) -> None:
        descriptor, data, _, offset = call.arguments
        assert isinstance(data, bytes)
        if opened := self._files.get(str(descriptor)):
            self._wrote(opened.node, Write(int(offset), data[: call.result]))

    def _lseek(self, call: Call) -> None:
        if str(call.arguments[0]) in self._files:
            self._at[str(call.arguments[0])] = call.result

    def _ftruncate(self, call: Call) -> None:
        if opened := self._files.get(str(call.arguments[0])):
            self._wrote(opened.node, Write(int(call.arguments[1]), None))

    def _mkdir(self, call: Call) -> None:
        if place := self._place(call.arguments[0]):
            self._named(place[0], Entry(place[1], Node(True)))

    def _rename(self, call: Call) -> None:
        self._moved(self._place(call.arguments[0]), self._place(call.arguments[1]))

    def _renameat(self, call: Call) -> None:
        base, old, other, new = call.arguments[:4]
        self._moved(self._place(old, base), self._place(new, other))

    _renameat2 = _renameat

    def _moved(self, source: tuple[Node, str] | None, target: tuple[Node, str] | None) -> None:
        if source is None and target is None:
            return
        assert source is not None
        assert target is not None
        gives = Entry(target[1], source[0].names[source[1]])
        self._named(target[0], gives)
        self._named(source[0], Entry(source[1], None, before=gives))

    def _unlink(self, call: Call) -> None:
        self._removed(self._place(call.arguments[0]))

    def _unlinkat(self, call: Call) -> None:
        self._removed(self._place(call.arguments[1], call.arguments[0]))

    def _rmdir(self, call: Call) -> None:
        self._removed(self._place(call.arguments[0]))

    def _removed(self, place: tuple[Node, str] | None) -> None:
        if place is not None:
            self._named(place[0], Entry(place[1], None))

    def _named(self, folder: Node, entry: Entry) -> None:
        folder.entries.append(entry)
        self._changes[folder] = folder.changes

    def _wrote(self, node: Node, write: Write) -> None:
        node.writes.append(write)
        self._changes[node] = node.changes

    # --- loss of power -----------------------------------------------------------------------------

    def lose_power(self, folder: Path, dice: Random) -> None:
        """Make `folder` what `root` could be afterwards."""
        self._there = {}
        kept = dice.choice([0.0, 0.0, 0.5, 0.9, 1.0])  # how much of what is pending survives
        self._materialize(self.folder, folder, dice, kept)

    def keep_all(self, folder: Path) -> None:
        """Make `folder` what `root` is while the power is there."""
        self._there = {}
        self._materialize(self.folder, folder, Random(0), 2.0)

    def _materialize(self, node: Node, path: Path, dice: Random, kept: float) -> None:
        if not node.is_folder:
            path.write_bytes(_contents(node, dice, kept))
            return
        path.mkdir(exist_ok=True)
        found: dict[str, Node] = {}
        for entry in node.entries:
            if self._is_there(entry, dice, kept):
                found.pop(entry.name, None)
                if entry.node is not None:
                    found[entry.name] = entry.node
        for name, below in found.items():
            self._materialize(below, path / name, dice, kept)

    def _is_there(self, entry: Entry, dice: Random, kept: float) -> bool:
        """Decided once for an entry, in whatever order folders are made."""
        if entry not in self._there:
            may_be = entry.before is None or self._is_there(entry.before, dice, kept)
            self._there[entry] = entry.synced or (may_be and dice.random() < kept)
        return self._there[entry]


def _contents(node: Node, dice: Random, kept: float) -> bytes:
    data = bytearray()
    for number, write in enumerate(node.writes):
        synced = number < node.synced
        if write.data is None:
            if synced or dice.random() < kept:
                data = data[: write.offset].ljust(write.offset, b"\0")
            continue
        if synced or dice.random() < kept * 0.8:
            pieces = [(0, len(write.data))]
        elif dice.random() < kept:  # torn
            starts = range(0, len(write.data), SECTOR)
            pieces = [(at, min(at + SECTOR, len(write.data))) for at in starts if dice.random() < 0.5]
        else:
            continue
        for begin, end in pieces:
            at = write.offset + begin
            data = data.ljust(at, b"\0")
            data[at : at + end - begin] = write.data[begin:end]
    return bytes(data)
