"""Goal: a version carries the proof that its bytes are the written ones, and those of its shard; versions
without a proof, as earlier releases wrote them, are read; and a release that knows of no proof reads it."""

import json
import random
from collections import Counter

import pytest

import aiopersist as ap
from aiopersist.state import diff as diffs
from aiopersist.state.seal import PLAIN_CHARS, decode_version, sealed
from aiopersist.state.trail import Trail, decode_names
from tests.state.commands_kit import created
from tests.state.values import SHARD
from tests.support.callbacks import calls

TOKEN = "0123456789abcdef" * 2
DECODE_CALLS = 25  # Python's and C's
OTHER = SHARD[:-1] + ("0" if SHARD[-1] != "0" else "1")


def written(commit: str = TOKEN) -> tuple[diffs.Diff, bytes]:
    first = diffs.decode_diff(created().versions[0])
    data = sealed(first.replace(commit=commit), SHARD)
    return diffs.decode_diff(data), data


def test_a_sealed_version_reads_as_it_is() -> None:
    diff, data = written()
    assert decode_version(data, SHARD) == diffs.decode_diff(data) == diff
    assert diffs.decode_commit(data) == diff.commit
    assert diff.commit.startswith(TOKEN + ".")
    assert diffs.read_back(data, diff) == diff


def test_every_flipped_bit_is_told() -> None:
    """Goal: none is read as another version; one in the commit id that is left is told as well."""
    _, data = written()
    for at in range(len(data)):
        for bit in range(8):
            damaged = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            with pytest.raises(ap.Corruption):
                decode_version(damaged, SHARD)


def test_other_damage_is_told() -> None:
    """Goal: or it has cut the commit id alone: then the contents are the written ones, and the next version
    does not follow."""
    diff, data = written()
    dice = random.Random(1)
    for length in range(len(data)):
        with pytest.raises(ap.Corruption):
            decode_version(data[:length], SHARD)
    for _ in range(2000):
        begin, end = sorted(dice.choices(range(len(data) + 1), k=2))
        damaged = data[:begin] + dice.randbytes(dice.randrange(40)) + data[end:]
        damaged = data[:begin] + dice.randbytes(dice.randrange(40)) + data[end:]
        try:
            found = decode_version(damaged, SHARD)
        except ap.Corruption:
            continue
        assert found.replace(commit=diff.commit) == diff
        assert damaged == data or len(found.commit) <= PLAIN_CHARS


def test_a_version_of_another_shard_is_told() -> None:
    _, data = written()
    with pytest.raises(ap.Corruption, match="another shard"):
        decode_version(data, OTHER)
    with pytest.raises(ap.Corruption, match="another shard"):
        Trail().add([data], OTHER)
    Trail().add([data], SHARD)


def test_another_number_in_a_version_is_told_before_a_collection_deletes_by_it() -> None:
    _, data = written()
    with pytest.raises(ap.Corruption, match="checksum"):
        Trail().add([data.replace(b'"seqno":0', b'"seqno":1', 1)], SHARD)


@pytest.mark.parametrize("commit", ["e83cb58e-d7b2-4871-8230-27846ea03e54", TOKEN, "c"])
def test_a_version_of_an_earlier_release_is_read(commit: str) -> None:
    diff = diffs.decode_diff(created().versions[0]).replace(commit=commit)
    assert decode_version(diffs.encode_diff(diff), SHARD) == diff


def test_the_checksum_is_that_of_all_other_bytes() -> None:
    """Goal: the format is what the docs say: whoever reads a version elsewhere can prove it."""
    from zlib import crc32

    _, data = written()
    digits = json.loads(data)["commit"].rpartition(".")[2]
    plain = data.replace(f".{digits}".encode(), b"", 1)
    assert f"{crc32(SHARD.encode() + plain):08x}" == digits


def test_the_names_of_a_version_are_decoded_without_work_for_what_is_not_there() -> None:
    """Goal: a collection decodes every version, and most name nothing: no default is copied for them."""
    _, data = written()
    decode_names(data, SHARD)
    spent = Counter[str]()
    with calls(lambda: spent.update(["call"])):
        decode_names(data, SHARD)
    assert spent["call"] <= DECODE_CALLS
