"""The public names and signatures are those of `public_api.txt`, so that a change of the interface is seen.

`python -m tests.test_public_api` writes the file anew.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "public_api.txt"
MODULES = (
    "aiopersist",
    "aiopersist.backup",
    "aiopersist.fastapi",
    "aiopersist.stash",
    "aiopersist.indexed",
    "aiopersist.measure",
    "aiopersist.testing.application",
    "aiopersist.testing.faults",
    "aiopersist.testing.proxy",
    "aiopersist.testing.servers",
    "aiopersist.testing.simulation",
    "aiopersist.testing.stash",
    "aiopersist.testing.storage",
    "aiopersist.web",
)


def names(module: Any) -> list[str]:
    """What a module offers: its `__all__`, or what it defines itself."""
    listed = getattr(module, "__all__", None)
    own = (n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__)
    return sorted(listed if listed is not None else (n for n in own if not n.startswith("_")))


def signature(value: Any) -> str:
    """Parameters, defaults and types, without the modules that types are defined in. None of an enum: it is
    of Python, and differs between its versions; the members are listed."""
    if isinstance(value, EnumType):
        return ""
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    text = re.sub(
        r"\b(?:aiopersist|collections|typing|datetime|pydantic|asyncio|os|enum)(?:\.\w+)*\.(?=\w)", "", text
    )
    return re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "...", text).replace("'", "").replace('"', "")


def members(owner: type) -> Iterator[str]:
    """The public methods and properties that a class of the library has, inherited ones included."""
    found = {
        name: value
        for base in reversed(owner.__mro__)
        if base.__module__.startswith("aiopersist")
        for name, value in vars(base).items()
        if not name.startswith("_") and not name.startswith("model_")
    }
    for name, value in sorted(found.items()):
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(plain):
            yield f"    {'async ' * inspect.iscoroutinefunction(plain)}{name}{signature(plain)}"
        elif isinstance(plain, property):
            yield f"    {name}: property{signature(plain.fget)[6:]}"
        else:
            yield f"    {name}"


def described() -> str:
    lines = []
    for module in map(importlib.import_module, MODULES):
        lines.append(module.__name__)
        for name in names(module):
            value = getattr(module, name)
            lines.append(f"  {name}{signature(value) if callable(value) else ''}")
            if inspect.isclass(value):
                lines.extend(members(value))
    return "\n".join(lines) + "\n"


def test_the_interface_is_as_it_is_written_down() -> None:
    assert described() == FILE.read_text(encoding="utf-8")


def test_a_changed_signature_is_seen() -> None:
    def before(a: int, *, b: str = "x") -> None: ...
    def after(a: int, *, b: str = "y") -> None: ...

    assert signature(before) == "(a: int, *, b: str = x) -> None"
    assert signature(before) != signature(after)


if __name__ == "__main__":
    FILE.write_text(described(), encoding="utf-8")
