"""Goal: what mutations have found stays mended: each of these raised an error that nobody documents."""

import gzip
import json
from collections.abc import Callable

import pytest

from tests.fuzz.corpus import corpus
from tests.fuzz.test_fuzz import attempt

DEEP = b"[" * 100_000


def a_version_that_drops_what_is_not_there() -> bytes:
    """`KeyError`"""
    first, second, *_ = corpus("log")[0].split(b"\n")
    found = json.loads(second)
    found["changes"]["drop"] = {"batches": [99]}
    return b"\n".join([first, json.dumps(found).encode()])


def a_frontier_that_is_no_list() -> bytes:
    """`TypeError`"""
    found = json.loads(corpus("log")[0].split(b"\n")[0])
    found["changes"]["upper"] = 1
    return json.dumps(found).encode()


def ids_that_are_no_map() -> bytes:
    """`TypeError`"""
    found = json.loads(gzip.decompress(corpus("rollup")[0]).split(b"\n")[0])
    found["format"] = 3
    found["state"]["once"] = 5
    return json.dumps(found).encode()


def codecs_that_are_cut() -> bytes:
    """`ArrowInvalid`"""
    key, val = json.loads(corpus("stash_codecs")[0])
    record = json.loads(key)
    record["arrow"] = record["arrow"][:-8]
    return json.dumps([json.dumps(record), val]).encode()


FOUND: dict[str, tuple[str, bytes | Callable[[], bytes]]] = {
    "zlib.error": ("rollup", b"\x1f\x8b\x08\0\0\0\0\0\x04\xff" + b"\xff" * 40),
    "drop": ("log", a_version_that_drops_what_is_not_there),
    "frontier": ("log", a_frontier_that_is_no_list),
    "ids": ("rollup text", ids_that_are_no_map),
    "codecs": ("stash_codecs", codecs_that_are_cut),
    "OverflowError": ("stash_rows", rb'[["\"a\""], ["92233720368547758082"], [0], [1]]'),
    "more vals than keys": ("stash_rows", rb'[["\"a\"", "\"b\""], ["1,2", "3"], [0, 1], [1, 1]]'),
    "UnicodeDecodeError": ("identity", b"\xff"),
    "UnicodeEncodeError": ("url", b"/data\xaforders"),
    "depth of a cursor": ("cursor body", DEEP),
    "depth of a place": ("place body", DEEP),
    "depth of a trail": ("trail body", DEEP),
    "depth of a name": ("name", b'{"shard": ' + DEEP),
    "depth of a trace": ("batch", b"aiopersist-batch 2 0\n" + DEEP),
    "digits": ("where", b"val.amount > " + b"1" * 5000),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_refused(name: str) -> None:
    kind, data = FOUND[name]
    assert not attempt(kind, data if isinstance(data, bytes) else data())
