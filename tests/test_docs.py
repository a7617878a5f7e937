"""The examples of the pages work."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples import ROOT, needs_spark, pages, program

pytest.importorskip("aiopersist.client.client")


@pytest.fixture
def no_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Providers of OpenTelemetry that a test sets are those of the process until its end."""
    import opentelemetry.metrics._internal as metrics
    from opentelemetry import trace
    from opentelemetry.util._once import Once

    for api, name in ((trace, "TRACER"), (metrics, "METER")):
        monkeypatch.setattr(api, f"_{name}_PROVIDER", None)
        monkeypatch.setattr(api, f"_{name}_PROVIDER_SET_ONCE", Once())


@pytest.mark.blocks_loop  # with its imports
@pytest.mark.parametrize("name", [name for name, code in pages().items() if not needs_spark(code)])
async def test_the_examples_of_a_page_run(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_providers: None,
    request: pytest.FixtureRequest,
) -> None:
    if "APP_BUCKET" in pages()[name]:  # its server may be found below the present folder
        monkeypatch.setenv("APP_BUCKET", request.getfixturevalue("best_s3_url"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APP_STASH", f"sqlite://{tmp_path}/app.db")  # what pages want to be given
    monkeypatch.setenv("AIOPERSIST_LOCATION", f"{tmp_path}/app-data")
    module: dict[str, Any] = {"__name__": name}
    exec(compile(program(pages()[name]), name, "exec"), module)
    await module["page"]()


def test_links_between_pages_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+\.md)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).is_file(), f"{path.name} links {target}"
