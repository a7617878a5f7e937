"""Goal: what is read has the types of the schema, to a type checker too."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_read_has_the_types_of_the_schema() -> None:
    """Goal: an error that is expected is one: `--strict` tells a `type: ignore` that is not needed."""
    file = Path(__file__).with_name("typed.py")
    command = [sys.executable, "-m", "mypy", "--strict", str(file)]
    done = subprocess.run(command, cwd=file.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
