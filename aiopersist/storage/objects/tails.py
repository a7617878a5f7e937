"""The object of a version, and what it carries of the versions before it.

A client that was away reads all versions since then, and many objects cost many requests. So an object
carries its *tail*: a few small versions before it, as far as its writer knows them. Its writer has read or
written each as a version, so they are true, even in an orphan.

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
        self._versions: dict[str, list[Versioned]] = {}

    def add(self, key: str, versions: Sequence[Versioned], *, own: bool = False) -> None:
        """Add versions that follow each other; those of a call's `own` creation follow the known ones. The
        known ones stay if both share a version, and are forgotten if that version differs: then the bucket
        was restored from a backup, and has another history since."""
        before = self._versions.pop(key, [])
        data_of = dict(before)
        shared = [version for version in versions if version.seqno in data_of]
        is_later = not before or versions[-1].seqno > before[-1].seqno
        follows = own and bool(before) and before[-1].seqno + 1 == versions[0].seqno
        if any(data_of[seqno] != data for seqno, data in shared) or (is_later and not shared and not follows):
            before, is_later = [], True
        if is_later:
            older = [version for version in before if version.seqno < versions[0].seqno]
            before = [*older, *versions][-TAIL_MAX:]
        sizes = list(accumulate(len(version.data) for version in reversed(before)))
        self._versions[key] = before[sum(size > TAIL_BYTES_MAX for size in sizes) :]
        if len(self._versions) > KEYS_MAX:
            del self._versions[next(iter(self._versions))]

    def forget(self, key: str) -> None:
        """Its bucket went back to an earlier state."""
        self._versions.pop(key, None)

    def newest(self, key: str) -> list[Versioned]:
        """The newest that are known, in ascending order."""
        return self._versions.get(key, [])

    def before(self, key: str, seqno: int) -> list[bytes]:
        """The data of the versions before `seqno`, in ascending order, up to the one right before it."""
        versions = self._versions.get(key, [])
        return [version.data for version in versions] if versions and versions[-1].seqno == seqno - 1 else []


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
