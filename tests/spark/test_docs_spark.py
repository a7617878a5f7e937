"""The examples of the page about Spark work."""

from pathlib import Path
from typing import Any

import pytest

from tests.examples import needs_spark, pages, program


@pytest.mark.blocks_loop  # a driver's calls do
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name, code in pages().items() if needs_spark(code)])
async def test_the_examples_run(
    spark: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module: dict[str, Any] = {"__name__": name}
    exec(compile(program(pages()[name]), name, "exec"), module)
    await module["page"]()
