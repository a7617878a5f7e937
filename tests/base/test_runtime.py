"""Goal: tokens are unique, also those of processes that were forked."""

import subprocess
import sys

from aiopersist.base.runtime import SYSTEM, TOKENS_AT_ONCE

FORKS = """
import os
from aiopersist.base.runtime import SYSTEM
SYSTEM.token()
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, SYSTEM.token().encode())
    os._exit(0)
print(os.read(read, 32).decode(), SYSTEM.token())
"""


def test_tokens_are_unique() -> None:
    tokens = [SYSTEM.token() for _ in range(3 * TOKENS_AT_ONCE)]
    assert len({*tokens}) == len(tokens)
    assert all(len(token) == 32 and int(token, 16) >= 0 for token in tokens)


def test_a_forked_process_has_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    theirs, ours = done.stdout.split()
    assert theirs != ours
