"""The examples of the pages work."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples import ROOT, needs_spark, pages, program

pytest.importorskip("aiopersist.client")


@pytest.mark.blocks_loop  # with its imports
@pytest.mark.parametrize("name", [name for name, code in pages().items() if not needs_spark(code)])
async def test_the_examples_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APP_STASH", f"sqlite://{tmp_path}/app.db")  # what a page wants to be given
    module: dict[str, Any] = {"__name__": name}
    exec(compile(program(pages()[name]), name, "exec"), module)
    await module["page"]()


def test_every_option_of_the_command_is_documented() -> None:
    import typer.main

    from aiopersist.cli.app import app

    _, *sections = (ROOT / "docs/cli.md").read_text(encoding="utf-8").split("\n## aiopersist ")
    texts = {name: text for name, _, text in (section.partition("\n") for section in sections)}
    command = typer.main.get_command(app)
    for name, sub in getattr(command, "commands", {}).items():
        assert name in texts, f"docs/cli.md has no heading `## aiopersist {name}`"
        for option in sub.params:
            for spelled in option.opts:
                assert f"`{spelled}" in texts[name] or f"`{spelled.upper()}`" in texts[name], (name, spelled)


def test_links_between_pages_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+\.md)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).is_file(), f"{path.name} links {target}"
