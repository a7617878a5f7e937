"""Goal: bytes and texts that a store or a user hands over are decoded, or are refused by the errors that are
documented for them, whatever they are; at once, and in memory that is bounded by their size."""

import gzip
import os
import time
import tracemalloc
from collections.abc import Iterator
from random import Random

import pyarrow as pa
import pytest

from aiopersist.state.diff import decode_diff
from aiopersist.state.seal import sealed
from tests.fuzz.apart import fuzz_apart
from tests.fuzz.corpus import SHARD, corpus
from tests.fuzz.decoders import DECODERS, ENVELOPES, FILES
from tests.fuzz.mutate import mutated
from tests.fuzz.pieces import location

pytestmark = pytest.mark.blocks_loop
MANY = int(os.environ.get("AIOPERSIST_TEST_FUZZ", "20000"))
POOLS: list[pa.MemoryPool] = []
FEW, MEASURED = 60, 15
CALL_S = 2.0  # of processor time
TIMES, SPARE_BYTES = 10, 1 << 20  # of the size of the input; for what a call takes, whatever its input is


def values_of(kind: str) -> list[bytes]:
    """The corpus of a decoder; of the body of an envelope, or of a cursor, without what precedes it."""
    name = kind.removesuffix(" body")
    if kind == "rollup text":
        return [gzip.decompress(value) for value in corpus("rollup")]
    if kind == "version":
        diffs = [decode_diff(line) for log in corpus("log") for line in log.split(b"\n")]
        return [sealed(diff, SHARD) for diff in diffs[::5]]
    if kind.endswith(" used"):
        return [value.partition(b"\n")[2] for value in location()[1][kind.removesuffix(" used")]]
    values = list(corpus({"id": "text"}.get(name, name)))
    if kind == name:
        return values
    if name in ENVELOPES:
        return [value.partition(b"\n")[2] for value in values]
    return [_within_cursor(value) for value in values]


def _within_cursor(value: bytes) -> bytes:
    from base64 import urlsafe_b64decode

    text = value.rpartition(b".")[2]
    return urlsafe_b64decode(text + b"=" * (-len(text) % 4))[4:]


def attempt(kind: str, data: bytes) -> bool:
    """Whether it was decoded."""
    decoder = DECODERS[kind]
    began = time.process_time()
    try:
        decoder.decode(data)
    except decoder.errors:
        return False
    except BaseException as error:
        error.add_note(f"{kind}: {data[:2000]!r}")
        raise
    finally:
        took_s = time.process_time() - began
        assert took_s < CALL_S, f"{kind}: {took_s:.1f} s for {data[:2000]!r}"
    return True


def mutations(kind: str, seeds: range) -> Iterator[bytes]:
    values = values_of(kind)
    for seed in seeds:
        yield mutated(Random(seed).choice(values), values, Random(seed))


def fuzz(kind: str, seeds: range) -> int:
    """How many mutations were decoded all the same."""
    if kind in FILES:
        return fuzz_apart(kind, seeds, 10.0 + len(seeds))
    return sum(attempt(kind, data) for data in mutations(kind, seeds))


@pytest.mark.parametrize("kind", DECODERS)
def test_the_corpus_is_read(kind: str) -> None:
    """Goal: what is mutated is sound: else each mutation would be refused at the first look."""
    read = [attempt(kind, data) for data in values_of(kind)]
    assert any(read) if kind in ("id", "url", "name") else all(read)


@pytest.mark.parametrize("kind", DECODERS)
def test_some_mutations(kind: str) -> None:
    fuzz(kind, range(FEW))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", DECODERS)
def test_many_mutations(kind: str) -> None:
    read = fuzz(kind, range(FEW, FEW + MANY))
    print(f"{kind}: {MANY} mutations, of which {read} were decoded")


@pytest.mark.parametrize("kind", [kind for kind in DECODERS if kind not in FILES])
def test_memory_is_bounded_by_the_input(kind: str) -> None:
    for value in values_of(kind):  # what is imported at the first use stays
        attempt(kind, value)
    for data in mutations(kind, range(MEASURED)):
        pool = pa.proxy_memory_pool(pa.default_memory_pool())
        POOLS.append(pool)  # what is in it may live on
        pa.set_memory_pool(pool)
        tracemalloc.start()
        try:
            attempt(kind, data)
            peak = tracemalloc.get_traced_memory()[1] + (pool.max_memory() or 0)
        finally:
            tracemalloc.stop()
            pa.set_memory_pool(pa.default_memory_pool())
        assert peak <= TIMES * len(data) + SPARE_BYTES, f"{peak} bytes for {len(data)}: {data[:500]!r}"
