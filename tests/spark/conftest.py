"""A real Spark session, one per run: it takes seconds to start. Where there is no PySpark or no Java these
tests are skipped, and say so; `AIOPERSIST_TEST_REQUIRE_SPARK=1` makes that a failure."""

import importlib.util
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MISSING = [
    what
    for what, there in (
        ("pyspark", importlib.util.find_spec("pyspark") is not None),
        ("java", shutil.which("java") is not None or "JAVA_HOME" in os.environ),
    )
    if not there
]
CONFIG = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "Europe/Berlin",  # what is stored must not depend on it
    "spark.task.maxFailures": "4",
    "spark.log.level": "ERROR",
}

WARM = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(Path(__file__).parent / "warm"), os.environ.get("PYTHONPATH")])
    ),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OPENBLAS_NUM_THREADS": "1",
}
"""What the session's workers are started with: see `warm/sitecustomize.py`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test is the first waits for the session, which has taken 40 s on a machine that was busy."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


def need_spark() -> None:
    """Skip, or fail where these tests are wanted."""
    if not MISSING:
        return
    if os.environ.get("AIOPERSIST_TEST_REQUIRE_SPARK") == "1":
        pytest.fail(f"{MISSING} is not here, and these tests are required")
    pytest.skip(f"{MISSING} is not here")


def configured(builder: Any) -> Any:
    """With the settings of all our sessions."""
    for name, value in CONFIG.items():
        builder = builder.config(name, value)
    return builder


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two tasks at once, each with a failed attempt or three to spare (`local[2,4]`)."""
    need_spark()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = configured(SparkSession.builder.master("local[2,4]").appName("tests"))
    warehouse = str(tmp_path_factory.mktemp("warehouse"))
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in WARM.items():
            patch.setenv(variable, value)
        session = builder.config("spark.sql.warehouse.dir", warehouse).getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def place(tmp_path: Path) -> str:
    """An empty location: a directory."""
    return str(tmp_path / "shards")


@pytest.fixture
def sc(spark: Any, place: str) -> Iterator[Any]:
    """The engine at that place."""
    from aiopersist.spark import connect

    with connect(spark, place) as client:
        yield client


@pytest.fixture
def name() -> str:
    """Of a shard."""
    return f"shard-{uuid.uuid4().hex[:8]}"
