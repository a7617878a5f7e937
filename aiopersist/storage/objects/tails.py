"""The object of a version, and what it carries of the versions before it.

Who has been away reads all versions since then, and many objects cost many requests. So an object carries its
*tail*: the versions before it, as far as its writer knows them, a few and small. They are what was read or
written as versions, so they are true wherever they are found, also in an orphan.

    <token> <length of the first> <length of the next>\\n<the first of the tail><the next><the version>
"""

from collections.abc import Sequence
from itertools import accumulate

from aiopersist.base.errors import Corruption
from aiopersist.storage.consensus import Versioned

TAIL_MAX = 8  # versions
TAIL_BYTES_MAX = 16 * 1024
KEYS_MAX = 64
HEAD_BYTES_MAX = 64 + 20 * TAIL_MAX  # of the line before the versions


class Tails:
    """By key, the newest versions that one handle has read or written as such; they follow each other."""

    def __init__(self) -> None:
        self._known: dict[str, list[Versioned]] = {}

    def add(self, key: str, versions: Sequence[Versioned], *, own: bool = False) -> None:
        """These follow each other; those of a call's `own` creation follow what was known. What was known
        stays if they share a version with it, and is forgotten if that is another one: its bucket was
        restored from a backup, and what came after that has another history."""
        known = self._known.pop(key, [])
        there = dict(known)
        shared = [version for version in versions if version.seqno in there]
        is_later = not known or versions[-1].seqno > known[-1].seqno
        follows = own and bool(known) and known[-1].seqno + 1 == versions[0].seqno
        if any(there[seqno] != data for seqno, data in shared) or (is_later and not shared and not follows):
            known, is_later = [], True
        if is_later:
            older = [version for version in known if version.seqno < versions[0].seqno]
            known = [*older, *versions][-TAIL_MAX:]
        sizes = list(accumulate(len(version.data) for version in reversed(known)))
        self._known[key] = known[sum(size > TAIL_BYTES_MAX for size in sizes) :]
        if len(self._known) > KEYS_MAX:
            del self._known[next(iter(self._known))]

    def forget(self, key: str) -> None:
        """Its bucket went back to what was before them."""
        self._known.pop(key, None)

    def newest(self, key: str) -> list[Versioned]:
        """The newest that are known, in ascending order."""
        return self._known.get(key, [])

    def before(self, key: str, seqno: int) -> list[bytes]:
        """The data of the versions before `seqno`, in ascending order, up to the one right before it."""
        known = self._known.get(key, [])
        return [version.data for version in known] if known and known[-1].seqno == seqno - 1 else []


def packed(token: bytes, tail: Sequence[bytes], data: bytes) -> bytes:
    """The object of a version."""
    lengths = b"".join(b" %d" % len(each) for each in tail)
    return b"".join((token, lengths, b"\n", *tail, data))


def unpacked(name: str, seqno: int, stored: bytes) -> list[Versioned]:
    """Version `seqno`, and its tail before it. `Corruption` if the object is no version."""
    line, newline, _ = stored[:HEAD_BYTES_MAX].partition(b"\n")
    lengths = [int(part) for part in line.split(b" ")[1:] if part.isdigit()]
    begin = len(line) + 1
    ends = list(accumulate(lengths, initial=begin))
    if not newline or len(lengths) != line.count(b" ") or ends[-1] > len(stored) or len(lengths) > seqno:
        raise Corruption(f"the object {name!r} is no version: it does not begin with a token")
    parts = [stored[start:stop] for start, stop in zip(ends, [*ends[1:], len(stored)], strict=True)]
    return [Versioned(seqno - len(lengths) + number, part) for number, part in enumerate(parts)]
