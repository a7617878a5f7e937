"""Files: the folder goes with its volume, or another one takes its place."""

import os
import shutil
from pathlib import Path

import pytest

from aiopersist.base.errors import StorageUnavailable
from aiopersist.storage.files.blob import FilesBlob


@pytest.mark.parametrize("is_there", [False, True], ids=["gone", "empty"])
@pytest.mark.parametrize("wrote", [False, True], ids=["that read", "that wrote"])
async def test_a_folder_that_goes_with_its_blobs(tmp_path: Path, is_there: bool, wrote: bool) -> None:
    """Goal: while a volume is not mounted, nothing is written to its place, where the volume would hide it
    when it is back, and no blob is said to be missing."""
    root, volume = tmp_path / "root", tmp_path / "volume"
    await FilesBlob(root).set("a/1", b"x")
    blob = FilesBlob(root)
    await (blob.set("b/1", b"x") if wrote else blob.get("a/1"))
    root.rename(volume)
    if is_there:
        root.mkdir()

    async def listed() -> list[str]:
        return [key async for key, _ in blob.list("a/")]

    for _ in range(2):
        for call in (blob.set("c/1", b"x"), blob.get("a/1"), blob.delete(["a/1"]), listed()):
            with pytest.raises(StorageUnavailable) as caught:
                await call
            assert caught.value.retry
    assert not is_there or os.listdir(root) == []
    volume.rename(root)
    await blob.set("c/1", b"x")
    assert await blob.get("a/1") == b"x"
    assert await listed() == ["a/1"]
    await blob.aclose()


async def test_a_folder_that_another_one_replaces(tmp_path: Path) -> None:
    """Goal: after the blobs were copied elsewhere and the copy took their place, nothing is written to the
    old folder, which its owner may delete."""
    root = tmp_path / "root"
    blob = FilesBlob(root)
    await blob.set("a/1", b"x")
    root.rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", root)
    await blob.set("a/2", b"x")
    assert await blob.get("a/2") == b"x"
    assert os.listdir(tmp_path / "old/a") == ["1"]
    await blob.aclose()
