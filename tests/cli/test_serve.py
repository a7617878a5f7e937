"""Goal: `aiopersist serve` serves the location until a signal ends it, and says clearly why it cannot."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import aiopersist as ap
from tests.cli.test_commands import COMMAND, in_a_process

GUARD_S = 120
SERVE = [*COMMAND, "serve", "--port", "0", "--json", "--location"]


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    async with ap.open(tmp_path) as client:
        await client.table("stock", str, int).put("pen", 1)
    return tmp_path


@pytest.mark.blocks_loop  # it waits for a process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_a_signal(folder: Path, number: signal.Signals) -> None:
    run = subprocess.Popen([*SERVE, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        address = json.loads(run.stdout.readline())["address"]
        assert address.startswith("http://127.0.0.1:")
        assert "stock" in httpx.get(address, timeout=GUARD_S).text
        stranger = httpx.get(address, headers={"Host": "evil.example"}, timeout=GUARD_S)
        assert stranger.status_code == 421
        run.send_signal(number)
        _, said = run.communicate(timeout=GUARD_S)
        assert (run.returncode, said) == (0, "")
    finally:  # a test that fails must not wait for it
        run.kill()
        run.communicate()


@pytest.mark.blocks_loop  # it waits for a process
async def test_a_port_that_is_taken_is_said(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = in_a_process("serve", "--location", folder, "--port", port)
    assert found.status == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in found.err


def test_without_the_extra_it_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['starlette'] = None\nfrom aiopersist.cli import main; main()"
    command = [sys.executable, "-c", hidden, "serve", "--location", "mem://"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "starlette is not installed: pip install '.[web]' in a clone" in done.stderr
