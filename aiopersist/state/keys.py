"""Blob keys: `<shard>/<writer>/<part>.parquet`, so that a sweep knows the writer of a blob without
reading it. Ids of writers are fresh, and no key is ever written twice."""

import re
from typing import NamedTuple
from uuid import UUID

from aiopersist.base.errors import InvalidUsage, UsageKind, shown

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_FORM = re.compile(rf"([si]{_UUID})/(w{_UUID})/({_UUID})\.parquet")


class BlobKey(NamedTuple):
    """The key of a part: the shard, the writer, which registered before it wrote, and the part."""

    shard: str
    writer: str
    part: str

    @classmethod
    def parse(cls, key: str) -> "BlobKey":
        """The parts of `key`; `InvalidUsage` of kind `INVALID_NAME` for anything but the key of a part."""
        match = _FORM.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            text = f"{shown(key, 200)} is not the key of a part"
            raise InvalidUsage(UsageKind.INVALID_NAME, text, name=key)
        return cls(*match.groups())

    @staticmethod
    def new(shard: str, writer: str, part: UUID) -> str:
        """The key of a new part."""
        return str(BlobKey(shard, writer, str(part)))

    def __str__(self) -> str:
        return f"{self.shard}/{self.writer}/{self.part}.parquet"


def writer_of(key: str) -> str:
    """The writer in the key of a blob, a part or a rollup."""
    return key.split("/")[1]
