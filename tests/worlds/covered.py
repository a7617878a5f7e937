"""What of the library worlds reach: pairs of a command and its outcome, and the lines of the commit loop."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

from aiopersist.shard import commit
from aiopersist.state.small_append import SmallAppend

TOOL = 4  # of `sys.monitoring`; no other tool that Python names has it
LINES_FROM = (3, 12)  # the first Python that has `sys.monitoring`


@dataclass
class Covered:
    """See the header."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    lines: set[int] = field(default_factory=set)
    """Of `shard/commit.py`; none before Python 3.12."""

    @property
    def missing(self) -> set[int]:
        """The lines that no world has reached."""
        return lines_of(commit) - self.lines


@contextmanager
def watched() -> Iterator[Covered]:
    """What is reached from here to the end."""
    covered, run, version = Covered(), commit._run, SmallAppend.version

    def noted_small(append: SmallAppend, *args: Any) -> Any:
        result = version(append, *args)
        covered.outcomes["SmallAppend", "the general way" if result is None else "commit"] += 1
        return result

    def noted(intent: Any, now: float, attempts: list[Any], diffs: list[Any]) -> Any:
        before = len(attempts)
        result = run(intent, now, attempts, diffs)
        refusal = isinstance(result, commit._Rejection)
        what = type(result.error).__name__ if refusal else "commit" if len(attempts) > before else "keep"
        covered.outcomes[type(intent.command).__name__, what] += 1
        return result

    commit._run = noted
    SmallAppend.version = noted_small  # type: ignore[method-assign]
    try:
        with _lines(covered.lines):
            yield covered
    finally:
        commit._run = run
        SmallAppend.version = version  # type: ignore[method-assign]


@contextmanager
def _lines(found: set[int]) -> Iterator[None]:
    if sys.version_info < LINES_FROM:
        yield
        return
    monitoring = sys.monitoring

    def line(code: CodeType, number: int) -> Any:
        found.add(number)
        return monitoring.DISABLE

    monitoring.use_tool_id(TOOL, "worlds")
    monitoring.register_callback(TOOL, monitoring.events.LINE, line)
    for code in codes_of(commit):
        monitoring.set_local_events(TOOL, code, monitoring.events.LINE)
    try:
        yield
    finally:
        monitoring.free_tool_id(TOOL)


def codes_of(module: ModuleType) -> list[CodeType]:
    """Of the functions of the module, with those inside of them."""
    functions = [f for f in vars(module).values() if getattr(f, "__module__", "") == module.__name__]
    found = [f.__code__ for f in functions if hasattr(f, "__code__")]
    for code in found:  # grows
        found += [const for const in code.co_consts if isinstance(const, CodeType)]
    return found


def lines_of(module: ModuleType) -> set[int]:
    """The lines of code in the functions of the module, without their heads."""
    found: set[int] = set()
    for code in codes_of(module):
        found |= {line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno}
    return found
