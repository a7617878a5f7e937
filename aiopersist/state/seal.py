"""The checksum of a version, at the end of its commit id.

Releases without this checksum read the commit id as a text without meaning, so the format need not change.
Their commit ids are shorter, and are not checked. The checksum covers the id of the shard and the bytes of
the version without the checksum itself. So it detects damaged bytes and bytes of another shard. Bytes of
another version of the same shard have another seqno (`shard/log.py`).
"""

from zlib import crc32

from aiopersist.base.errors import Corruption
from aiopersist.state.diff import Diff, decode_diff, encode_diff

PLAIN_CHARS = 36  # of the longest commit id that was ever written without a checksum: a UUID
_CHARS = 9  # a dot and 32 bits in hex


def sealed(diff: Diff, shard: str) -> bytes:
    """The bytes of `diff`, with their checksum in its commit id. Takes a microsecond for each 2 kB."""
    plain = encode_diff(diff)
    at = plain.index(diff.commit.encode()) + len(diff.commit)
    return b"%s.%08x%s" % (plain[:at], crc32(plain, crc32(shard.encode())), plain[at:])


def decode_version(data: bytes, shard: str) -> Diff:
    """The diff; `Corruption` for other bytes, damaged ones, those of another shard or of a later format."""
    diff = decode_diff(data)
    check_seal(data, diff.commit, shard)
    return diff


def check_seal(data: bytes, commit: str, shard: str) -> None:
    """`Corruption` unless `data` has the checksum of its commit id, if the id has one."""
    if len(commit) <= PLAIN_CHARS:
        return
    at = data.find(commit.encode(errors="replace")) + len(commit)
    expected = f".{crc32(data[at:], crc32(data[: at - _CHARS], crc32(shard.encode()))):08x}"
    if commit[-_CHARS:] != expected:
        text = "a version does not have its checksum: it is damaged, or of another shard"
        raise Corruption(text, shard_id=shard)
