"""Other processes; see `test_shared_compaction.py`."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from tests.maintenance.shared_compaction_kit import BLOBS, filled, is_one_run, is_the_model

pytestmark = pytest.mark.usefixtures("started_postgres")


WORKER = """
import asyncio, os, signal, sys
import aiopersist as ap

blob, consensus, dies = *sys.argv[1:3], sys.argv[3] == "dies"
LIMITS = ap.Settings(inline_writes_single_max_bytes=0, blob_target_size=1500, row_group_bytes=400)


async def main():
    pieces = [bytes.fromhex(line) for line in sys.stdin.read().split()]
    async with ap.open(blob=blob, consensus=consensus, settings=LIMITS, maintenance=False) as client:
        for piece in pieces:
            result = await client.workers.compact_piece(piece)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            print(result.hex(), flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_processes_share_it_and_one_is_killed(tmp_path: Path) -> None:
    """Goal: its pieces are done again by another; what it left is swept."""
    urls = f"file://{tmp_path}/blob?fsync=off", f"sqlite://{tmp_path}/state.db"

    def start(pieces: list[bytes], name: str) -> Any:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *urls, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return process, asyncio.to_thread(process.communicate, "\n".join(p.hex() for p in pieces))

    async with ap.open(
        blob=urls[0], consensus=urls[1], settings=ap.Settings(**BLOBS), maintenance=False
    ) as client:
        model = await filled(client)
        async with client.workers.shared_compaction("t") as compaction:
            pieces = await compaction.pieces(4)
            (killed, dying), (_, working) = start(pieces[:2], "dies"), start(pieces[2:], "works")
            (_, _), (out, _) = await asyncio.gather(dying, working)
            assert killed.returncode < 0
            results = [bytes.fromhex(line) for line in out.split()]
            with pytest.raises(ap.InvalidUpdate):
                await compaction.apply(results)
            results += [await client.workers.compact_piece(piece) for piece in pieces[:2]]
            assert await compaction.apply(results)
            assert not (await client.admin.sweep_leaked_blobs()).keys  # its writer is still there
        leaked = (await client.admin.sweep_leaked_blobs(dry_run=False)).keys
        assert any(key.endswith(".parquet") for key in leaked)
        await is_one_run(client)
        await is_the_model(client, model)
