"""Goal: a line that is no JSON object is refused with its row before Arrow sees it, in each block: Arrow
would end the process."""

import io
from typing import Any

import pyarrow as pa
import pytest

from aiopersist.cli import ndjson
from aiopersist.cli.ndjson import read_ndjson


def read(data: bytes) -> list[dict[str, Any]]:
    _, tables = read_ndjson(io.BytesIO(data), lambda names: {})
    return [row for table in tables for row in table.to_pylist()]


SOUND = [
    pytest.param(b'{"a":1}\r\n{"a":2}\r\n', id="CRLF"),
    pytest.param(b'\n \t\n{"a":1}\n\n\r\n  {"a":2}', id="blank lines"),
    pytest.param(b'\xef\xbb\xbf{"a":1}\n{"a":2}\n', id="a byte order mark"),
]


@pytest.mark.parametrize("block", [8, 1 << 20])
@pytest.mark.parametrize("data", SOUND)
def test_sound_rows(data: bytes, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ndjson, "BLOCK_BYTES", block)
    assert read(data) == [{"a": 1}, {"a": 2}]


def test_brackets_in_texts_are_no_levels() -> None:
    text = '[{"' * 100
    assert read(b'{"a":"%s"}\n' % text.replace('"', '\\"').encode()) == [{"a": text}]


@pytest.mark.parametrize("block", [8, 1 << 20])
@pytest.mark.parametrize(
    "line",
    [b"null", b"  null ", b"[1]", b"1", b"\x00", b"\xef\xbb\xbfnull", b'{"a":1}null', b'{"a":1} {"a":1}'],
)
def test_no_object(line: bytes, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the row is told, whichever block it is in, and whatever its place there."""
    monkeypatch.setattr(ndjson, "BLOCK_BYTES", block)
    for before in range(3):
        data = b'\n{"a":1}' * before + b"\r\n" + line + b'\n{"a":2}\n'
        with pytest.raises(pa.ArrowInvalid, match=rf"^row {before + 1}: "):
            read(data)


@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_levels(begin: bytes, end: bytes) -> None:
    row = b'{"a":1,"b":null}\n'
    assert len(read(row + b'{"b":' + begin * 60 + b"null" + end * 60 + b"}\n")) == 2
    with pytest.raises(pa.ArrowInvalid, match=r"^row 2: "):
        read(row + b'{"b":' + begin * 20_000 + b"null" + end * 20_000 + b"}\n")
