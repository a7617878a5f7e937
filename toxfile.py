"""What tox cannot find by itself.

- Interpreters that pyenv has installed but not selected: its shims for them fail, so the folders of
  the interpreters themselves go to the end of the `PATH`.
- The newest Python that is here: its environment runs everything. Of the others less is asked: that it
  installs there, and does what it is for.
"""

import os
import shutil
import sys
from pathlib import Path

MINORS = range(14, 10, -1)


def add_pyenv_to_path() -> None:
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [
        str(p.parent) for minor in MINORS for p in root.glob(f"versions/3.{minor}.*/bin/python3.{minor}")
    ]
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *found])


def newest() -> str:
    """As the name of an environment: `py313`. The Python that runs tox is there in any case."""
    folders = [p for p in os.environ["PATH"].split(os.pathsep) if Path(p).name != "shims"]
    here = [minor for minor in MINORS if shutil.which(f"python3.{minor}", path=os.pathsep.join(folders))]
    return f"py3{max([*here, sys.version_info.minor])}"


SAME = "tests/worlds/test_worlds.py::test_a_seed_gives_the_same_world_in_any_process"
OTHERS = (
    f"tests/state tests/test_package.py tests/storage/test_s3.py {SAME} tests/client/test_client.py "
    "tests/batches/test_batches.py tests/batches/test_s3.py tests/maintenance/test_maintenance.py "
    "tests/maintenance/test_retention_policies.py"
)

add_pyenv_to_path()
os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")  # a Python that is not here is skipped, not fetched
for minor in MINORS:
    os.environ[f"AIOPERSIST_SELECT_py3{minor}"] = f'{OTHERS} -m "not slow and not long"'
os.environ[f"AIOPERSIST_SELECT_{newest()}"] = 'tests benches -n 5 -m "not long"'  # they wait, too
os.environ[f"AIOPERSIST_QUICK_{newest()}"] = "0"
