"""pyarrow and polars, imported at the first use: `import aiopersist` must not take their 0.3 s and 0.5 s.

Each name stands for its module. At the first use it copies all names of the module, so later look-ups cost as
little as on the module itself. A module that annotates with these names needs
`from __future__ import annotations`; else the annotation imports them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from threading import Event, local
from typing import TYPE_CHECKING, Any

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.base.runtime import FORK_ADVICE
from aiopersist.base.threads import kept_from_forks


class _Module:
    """A module that is imported at the first look-up."""

    def __init__(self, name: str) -> None:
        self.__dict__.update(_name=name, _is_lost=False)

    def __getattr__(self, attribute: str) -> Any:
        if self.__dict__["_is_lost"]:
            raise InvalidUsage(
                UsageKind.WRONG_LOOP, f"{self.__dict__['_name']} was imported before a fork: {FORK_ADVICE}"
            )
        with kept_from_forks():
            module = import_module(self.__dict__["_name"])
        self.__dict__.update({k: v for k, v in vars(module).items() if not k.startswith("__")})
        return getattr(module, attribute)


ARROW = ("pyarrow", "pyarrow.compute", "pyarrow.ipc")
PARQUET = ("pyarrow.parquet",)


def are_imported(names: Iterable[str]) -> bool:
    return all(name in sys.modules for name in names)


def import_all(names: Iterable[str]) -> None:
    """Import modules. Run it on a thread, before the event loop needs them. After a fork during an import,
    Python keeps the lock of that module for ever in the child."""
    with kept_from_forks():
        for name in names:
            import_module(name)


def arrow_is_imported() -> bool:
    return are_imported(ARROW)


def import_arrow() -> None:
    """Import the modules that every handle needs."""
    import_all(ARROW)


_warm = Event()


def is_warm() -> bool:
    """Whether `warm_up` has run."""
    return _warm.is_set()


def warm_up() -> None:
    """Convert one value. At the first value pyarrow imports pandas, if it is installed, which takes a second.
    Run it on a thread: other conversions continue meanwhile."""
    with kept_from_forks():
        pa.scalar(0)
    _warm.set()


_here = local()


def avoid_polars() -> None:
    """This thread serves callers that may be all threads of polars, so a call would wait for ever."""
    _here.avoids_polars = True


def avoids_polars() -> bool:
    """Whether this thread may not call polars."""
    return getattr(_here, "avoids_polars", False)


def _lose_polars() -> None:
    if "polars" in sys.modules:
        pl.__dict__.clear()
        pl.__dict__.update(_name="polars", _is_lost=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lose_polars)


def import_polars() -> None:
    """Import polars, which sorts many updates, before a caller waits for it."""
    import_all(["polars"])


if TYPE_CHECKING:
    import numpy as np
    import polars as pl
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs
    import pyarrow.compute as pc  # type: ignore[import-untyped]
    import pyarrow.dataset as ds  # type: ignore[import-untyped]
    import pyarrow.fs as fs  # type: ignore[import-untyped]
    import pyarrow.ipc as ipc  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]
else:
    np = _Module("numpy")
    pa = _Module("pyarrow")
    pc = _Module("pyarrow.compute")
    ds = _Module("pyarrow.dataset")
    fs = _Module("pyarrow.fs")
    ipc = _Module("pyarrow.ipc")
    pq = _Module("pyarrow.parquet")
    pl = _Module("polars")

__all__ = [
    "PARQUET",
    "are_imported",
    "avoid_polars",
    "avoids_polars",
    "arrow_is_imported",
    "ds",
    "fs",
    "import_all",
    "import_arrow",
    "import_polars",
    "ipc",
    "is_warm",
    "np",
    "pa",
    "pc",
    "pl",
    "pq",
    "warm_up",
]
