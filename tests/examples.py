"""The examples of the README and the docs: one program per page, which a test runs and `tox -e types`
checks."""

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> dict[str, str]:
    """The code of each page that has any, its blocks in order."""
    found = {}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks: list[str] = BLOCK.findall(path.read_text(encoding="utf-8"))
        if blocks:
            name = path.relative_to(ROOT).with_suffix("").as_posix()
            found[re.sub(r"\W", "_", name).lower()] = "\n".join(blocks)
    return found


def needs_spark(code: str) -> bool:
    """Whether a page is for an environment with PySpark, which is large."""
    return "pyspark" in code


def program(code: str) -> str:
    """The page as a module: its code may wait at the top, a module may not. One that does not wait is a
    module already."""
    if not waits(code):
        return f"{code}\n\nasync def page() -> None:\n    pass\n"
    lines = code.splitlines()
    imports = "\n".join(line for line in lines if re.match(r"(import|from) ", line))
    rest = "\n".join(line for line in lines if not re.match(r"(import|from) ", line))
    return f"{imports}\n\n\nasync def page() -> None:\n{textwrap.indent(rest, '    ')}\n"


def waits(code: str) -> bool:
    """Whether it waits at the top."""
    try:
        compile(code, "page", "exec")
    except SyntaxError:
        return True
    return False


def main(folder: Path) -> None:
    """Write them there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, code in pages().items():
        head = "# pyright: reportMissingImports=false\n" if needs_spark(code) else ""
        (folder / f"{name}.py").write_text(head + program(code), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
