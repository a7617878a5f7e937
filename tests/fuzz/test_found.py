"""Goal: what mutations have found stays mended: each of these raised an error that nobody documents."""

import gzip
import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from tests.fuzz.apart import attempt_apart
from tests.fuzz.corpus import corpus
from tests.fuzz.decoders import DECODERS, FILES
from tests.fuzz.test_fuzz import attempt, values_of

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


def texts_beyond_their_bytes() -> bytes:
    """Kernels of Arrow read them all the same."""
    offsets = pa.py_buffer(array("i", [0, 1 << 30, 2]))
    texts = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ab")])
    batch = pa.record_batch({"key": [1, 2], "val": texts})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


def a_first_version_without_a_since() -> bytes:
    """`PydanticSerializationError`"""
    found = json.loads(corpus("log")[0].split(b"\n")[0])
    del found["changes"]["since"]
    return json.dumps(found).encode()


def a_schema_that_is_damaged() -> bytes:
    """`OSError`"""
    record = json.loads(corpus("schema")[0])
    arrow = bytearray(b64decode(record["arrow"]))
    arrow[8:12] = b"\xff" * 4
    return json.dumps({**record, "arrow": b64encode(arrow).decode()}).encode()


def times_without_end() -> bytes:
    """`OverflowError`"""
    return json.dumps({**json.loads(corpus("schema")[0]), "time": 2**63}).encode()


def stats_with(column: str, **values: object) -> bytes:
    part = json.loads(corpus("stats")[0])
    part["stats"][column].update(values)
    return json.dumps(part).encode()


def piece_with(**values: object) -> Callable[[], bytes]:
    """Of a read, with other values of its first part in a blob."""

    def changed() -> bytes:
        found = json.loads(values_of("piece used")[0])
        parts = [part for batch in found["piece"]["runs"] for part in batch["parts"] if part.get("key")]
        parts[0].update(values)
        return json.dumps(found).encode()

    return changed


def time_of_a_piece() -> bytes:
    """`InvalidUsage`, as if the caller had said it"""
    found = json.loads(values_of("piece used")[0])
    return json.dumps({**found, "range": {**found["range"], "as_of": [0]}}).encode()


def end_of_a_compaction() -> bytes:
    """`InvalidUsage`, too"""
    return json.dumps({**json.loads(values_of("compaction used")[0]), "since": []}).encode()


FOUND: dict[str, tuple[str, bytes | Callable[[], bytes]]] = {
    "zlib.error": ("rollup", b"\x1f\x8b\x08\0\0\0\0\0\x04\xff" + b"\xff" * 40),
    "drop": ("log", a_version_that_drops_what_is_not_there),
    "frontier": ("log", a_frontier_that_is_no_list),
    "ids": ("rollup text", ids_that_are_no_map),
    "codecs": ("stash_codecs", codecs_that_are_cut),
    "AssertionError": ("piece used", piece_with(key=None)),
    "ZeroDivisionError": ("piece used", piece_with(goodbytes=0)),
    "a time": ("piece used", time_of_a_piece),
    "an end": ("compaction used", end_of_a_compaction),
    "since": ("log", a_first_version_without_a_since),
    "schema": ("schema", a_schema_that_is_damaged),
    "length of times": ("schema", times_without_end),
    "KeyError of a bound": ("stats", lambda: corpus("stats")[0].replace(b',"nulls":0', b"")),
    "TypeError of a bound": ("stats", lambda: stats_with("val.amount", min=1, max=[])),
    "InvalidOperation of a bound": ("stats", lambda: stats_with("val.price", min="", max="1")),
    "OverflowError of a bound": ("stats", lambda: stats_with("val.at", min=10**30)),
    "OverflowError": ("stash_rows", rb'[["\"a\""], ["92233720368547758082"], [0], [1]]'),
    "more vals than keys": ("stash_rows", rb'[["\"a\"", "\"b\""], ["1,2", "3"], [0, 1], [1, 1]]'),
    "a text as a time": ("stash_rows", rb'[["\"a\""], ["1"], ["x"], [1]]'),
    "UnicodeDecodeError": ("identity", b"\xff"),
    "UnicodeEncodeError": ("url", b"/data\xaforders"),
    "depth of a cursor": ("cursor body", DEEP),
    "depth of a place": ("place body", DEEP),
    "depth of a trail": ("trail body", DEEP),
    "depth of a name": ("name", b'{"shard": ' + DEEP),
    "depth of a trace": ("batch", b"aiopersist-batch 2 0\n" + DEEP),
    "digits": ("where", b"val.amount > " + b"1" * 5000),
    "a null first": ("file ndjson", b'null\n{"key":"a","val":1}\n'),
    "a null behind a mark": ("file ndjson", b'\xef\xbb\xbf\n \r\nnull\n{"key":"a","val":1}\n'),
    "depth of a row": ("file ndjson", b'{"key":"a","val":' + DEEP + b"]" * len(DEEP) + b"}\n"),
    "texts beyond their bytes": ("file arrow", texts_beyond_their_bytes),
}


def test_a_piece_says_how_many_rows_it_has() -> None:
    """`OverflowError`. It is read all the same: the part itself knows better."""
    assert attempt("piece used", piece_with(rows=2**63)())


def test_the_page_counts_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    assert f"of {len(DECODERS)} kinds" in text
    assert f"found {len(FOUND)} faults" in text


@pytest.mark.parametrize("name", FOUND)
def test_it_is_refused(name: str) -> None:
    kind, data = FOUND[name]
    trial = attempt_apart if kind in FILES else attempt
    assert not trial(kind, data if isinstance(data, bytes) else data())
