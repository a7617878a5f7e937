"""The rows of a share: n consumers divide the keys by a hash of their canonical JSON, which is the same on
every machine and in every version.
"""

from typing import TYPE_CHECKING
from zlib import crc32

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.data.jsonable import column_texts
from aiopersist.data.lazy import pa

if TYPE_CHECKING:
    from pyarrow import Table as ArrowTable  # type: ignore[import-untyped]  # pyarrow ships no stubs

Share = tuple[int, int]
"""`(i, n)`: the i-th of n."""


def check_share(share: object) -> Share:
    """`share`; `InvalidUsage` unless it is valid."""
    if isinstance(share, tuple) and len(share) == 2 and all(type(number) is int for number in share):
        i, n = share
        if 0 <= i < n:
            return i, n
    text = f"share={shown(share)} is not (i, n) with 0 <= i < n"
    raise InvalidUsage(UsageKind.INVALID_SHARE, text, share=share)


def within_share(updates: "ArrowTable", share: Share) -> "ArrowTable":
    """The rows whose keys belong to `share`."""
    i, n = share
    texts = column_texts(updates.column("key"))
    return updates.filter(pa.array([crc32(text.encode()) % n == i for text in texts], pa.bool_()))
