"""Modules that take long to import."""

from importlib import import_module

MODULES = ["pandas", "polars", "pyarrow.parquet", "pyarrow.compute", "asyncpg", "aiobotocore.session"]
MODULES += ["obstore", "fastapi", "httpx"]


def import_heavy() -> None:
    """Import them before any loop runs: the first test that needs one would seem to block its loop."""
    for name in MODULES:
        import_module(name)
    import_module("polars").DataFrame({"a": [[1]]}).sort("a")  # its threads start with the first use
