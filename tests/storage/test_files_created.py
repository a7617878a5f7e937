"""Files: a value that is written only if there is none."""

import errno
import os
from pathlib import Path

import pytest

from aiopersist.base.errors import Unsupported
from aiopersist.storage.files.blob import FilesBlob


async def test_a_value_is_created_by_a_second_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = FilesBlob(tmp_path)
    assert await blob.create("a/b", b"1")
    assert not await blob.create("a/b", b"2")
    assert await blob.get("a/b") == b"1"
    for key in ("a", "a/b/c"):
        with pytest.raises(Unsupported, match="folder of another key"):
            await blob.create(key, b"3")

    def refused(*names: object, **options: object) -> None:
        raise OSError(errno.EPERM, "no second names here")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(Unsupported, match="no hard links"):
        await blob.create("a/c", b"4")
    assert await blob.get("a/c") is None
    assert os.listdir(tmp_path / "tmp") == []
