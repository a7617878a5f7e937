"""pyarrow and polars, imported when first used: they cost 0.3 s and 0.5 s, `import aiopersist` may not.

Each name stands for its module. After the first use it holds all that the module holds, so that a
look-up costs what it costs on the module itself. Modules that annotate with these names need
`from __future__ import annotations`, or the annotation would import them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


class _Module:
    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, attribute: str) -> Any:
        module = import_module(self.__dict__["_name"])
        self.__dict__.update({k: v for k, v in vars(module).items() if not k.startswith("__")})
        return getattr(module, attribute)


def import_arrow() -> None:
    """Import what every handle needs: done on a thread before the event loop meets it."""
    for name in ("pyarrow", "pyarrow.compute", "pyarrow.ipc"):
        import_module(name)


if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs
    import pyarrow.compute as pc  # type: ignore[import-untyped]
    import pyarrow.dataset as ds  # type: ignore[import-untyped]
    import pyarrow.fs as fs  # type: ignore[import-untyped]
    import pyarrow.ipc as ipc  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]
else:
    pa = _Module("pyarrow")
    pc = _Module("pyarrow.compute")
    ds = _Module("pyarrow.dataset")
    fs = _Module("pyarrow.fs")
    ipc = _Module("pyarrow.ipc")
    pq = _Module("pyarrow.parquet")
    pl = _Module("polars")

__all__ = ["ds", "import_arrow", "fs", "ipc", "pa", "pc", "pl", "pq"]
