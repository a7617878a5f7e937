"""Bytes that are not ours; see `test_commands.py`."""

import json
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.state import diff as diffs
from aiopersist.state import rollup_file
from aiopersist.state.model import FORMAT
from aiopersist.state.writing import RegisterWriter
from tests.state.commands_kit import LEASE_S, created


def _changed(data: bytes, **values: Any) -> bytes:
    return json.dumps({**json.loads(data), **values}).encode()


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"format": FORMAT + 1}, id="same_fields"),
        pytest.param({"format": FORMAT + 1, "novelty": 1}, id="more_fields"),
    ],
)
def test_a_later_format_is_refused(values: dict[str, Any]) -> None:
    """Goal: of diffs and of rollups, with an error that says what to do."""
    import gzip

    history = created()
    with pytest.raises(ap.Corruption, match="upgrade"):
        diffs.decode_diff(_changed(history.versions[0], **values))
    data = gzip.compress(_changed(gzip.decompress(rollup_file.encode_rollup(history.live)), **values))
    with pytest.raises(ap.Corruption, match="upgrade"):
        rollup_file.decode_rollup(data, rollup_file.checksum_of(data))


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b"\xff\xfe", b"null", b'{"format":1}', b'{"format":"9"}', b"\x1f\x8b"]
)
def test_garbage_is_corruption(data: bytes) -> None:
    """Goal: and nothing to upgrade for."""
    with pytest.raises(ap.Corruption, match="not readable"):
        diffs.decode_diff(data)
    with pytest.raises(ap.Corruption, match="not readable"):
        rollup_file.decode_rollup(data, rollup_file.checksum_of(data))


def test_a_rollup_of_other_bytes_is_corruption() -> None:
    history = created()
    data = rollup_file.encode_rollup(history.live)
    with pytest.raises(ap.Corruption):
        rollup_file.decode_rollup(data[:-1], rollup_file.checksum_of(data))
    with pytest.raises(ap.Corruption):
        rollup_file.decode_rollup(data, "0" * 32)


def test_a_version_of_another_history_is_corruption() -> None:
    """Goal: after a restore: the number is right, the commit id of the version before is not."""
    one, two = created(), created()
    for history in (one, two):
        history.run(RegisterWriter("w1", LEASE_S))
    foreign = diffs.decode_diff(two.versions[1]).replace(prev="another")
    with pytest.raises(ap.Corruption):
        diffs.apply(foreign, one.states[0])
    with pytest.raises(ap.Corruption):
        diffs.apply(diffs.decode_diff(one.versions[1]), None)  # a gap
    with pytest.raises(ap.Corruption):
        diffs.apply(diffs.decode_diff(one.versions[1]), one.states[1])  # again
