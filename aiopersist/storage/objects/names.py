"""The names of the objects that keep the versions of keys. Each key has a folder.

kshard%2F3f2a.../
    v/7fffffffffffffd1      version 46: names descend, so that a list begins with the head
    x/0000000000000028      a floor: the versions below 40 are truncated
    x/~9c41...              a wish of somebody who loses each race, listed with the floors
h<sha256>/
    n                       the key of a folder whose key is too long to be a name
probe                       is there since a client that may write has opened the location: the last name
                            but one
probed                      is there since creations have raced in the bucket, and one of each race won
"""

import re
from collections.abc import Iterable
from hashlib import sha256
from urllib.parse import quote, unquote

from aiopersist.base.errors import Corruption
from aiopersist.storage.objects.bucket import Tagged

SEQNO_MAX = 2**63 - 1
NAME_MAX = 200  # bytes: gateways keep names in file systems, where a name has 255 at most

NUMBER = re.compile("[0-7][0-9a-f]{15}")
VERSIONS = "v/"
FLOORS = "x/"  # behind all versions: a list of the folder passes these first
WISHES = "x/~"  # behind all floors
KEY = "n"
PROBE, PROBED = "probe", "probed"
WHOLE, HASHED = "k", "h"


def folder_of(key: str) -> str:
    """The folder of a key, with the slash."""
    quoted = quoted_key(key)
    return f"{quoted if len(quoted) <= NAME_MAX else HASHED + sha256(key.encode()).hexdigest()}/"


def quoted_key(key: str) -> str:
    """The name of a key's folder if it is short enough. That of a longer key begins with it."""
    return WHOLE + quote(key, safe="")


def is_hashed(folder: str) -> bool:
    return folder.startswith(HASHED)


def key_of(folder: str) -> str:
    """The key of a folder that is not hashed."""
    return unquote(folder.removeprefix(WHOLE))


def version_name(seqno: int) -> str:
    """The name of a version in its folder; the greater the seqno, the less the name."""
    return f"{VERSIONS}{SEQNO_MAX - seqno:016x}"


def version_of(name: str) -> int:
    """The seqno in the name of a version; `Corruption` for another name."""
    return SEQNO_MAX - _number(name, "version")


def floor_name(seqno: int) -> str:
    """The name of a floor in its folder; names rise."""
    return f"{FLOORS}{seqno:016x}"


def floor_of(name: str) -> int:
    """The seqno in the name of a floor; `Corruption` for another name."""
    return _number(name, "floor")


def _number(name: str, kind: str) -> int:
    last = name.rpartition("/")[2]
    if NUMBER.fullmatch(last) is None:
        raise Corruption(f"the object {name!r} is no {kind}: something else has written to this folder")
    return int(last, 16)


def is_wish(name: str) -> bool:
    """Whether what is listed with the floors is a wish."""
    return name.rpartition("/")[2].startswith("~")


def greatest_floor(listed: Iterable[Tagged]) -> int:
    """The greatest of the floors among what is listed with them; 0 if there is none."""
    return max((floor_of(item.name) for item in listed if not is_wish(item.name)), default=0)
