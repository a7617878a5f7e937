"""What of the library worlds reach: pairs of a command and its outcome, how appends end, and the conditions
of the commit loop, of settling and of appends that went both ways."""

import ast
import asyncio
import dis
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from aiopersist.shard import commit
from aiopersist.shard.attempt import Attempt
from aiopersist.state.writing import AppendHollow
from aiopersist.write import append, pending, session

MODULES = (commit, append, session, pending)
TOOL = 4  # of `sys.monitoring`; no other tool that Python names has it
MONITORED_FROM, MONITORED_UNTIL = (3, 12), (3, 14)  # Pythons that tell both ways of a condition by one event
Way = tuple[int, int]
"""From a condition to what follows it, as offsets in a code."""


@dataclass
class Covered:
    """See the header."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    appends: Counter[str] = field(default_factory=Counter)
    """How those of one shard ended."""
    branches: dict[CodeType, set[Way]] = field(default_factory=lambda: defaultdict(set))
    """The ways that conditions went; none where Python does not tell (`MONITORED_FROM`)."""

    @property
    def missing(self) -> dict[str, list[str]]:
        """The conditions that went one way only in all worlds, by module."""
        return {one.__name__: missing(one, self.branches) for one in MODULES}


@contextmanager
def watched() -> Iterator[Covered]:
    """What is reached from here to the end."""
    covered = Covered()
    with pytest.MonkeyPatch.context() as patch, _branches(covered.branches):
        _note_commands(patch, covered.outcomes)
        _note_appends(patch, covered.appends)
        yield covered


def _note_commands(patch: pytest.MonkeyPatch, outcomes: Counter[tuple[str, str]]) -> None:
    plan = Attempt.plan

    def noted(attempt: Attempt, now: float) -> bool:
        refused = plan(attempt, now)
        what = "keep" if attempt.diff is None else "commit"
        what = type(attempt.error).__name__ if refused else what
        outcomes[type(attempt.command).__name__, what] += 1
        return refused

    patch.setattr(Attempt, "plan", noted)


def _note_appends(patch: pytest.MonkeyPatch, appends: Counter[str]) -> None:
    """Each end of an append, and what was settled of it."""
    write, look, settle, full = commit._write, commit._look_at_all, session.settle, pending.must_flush

    def is_append(attempts: Any) -> bool:
        return len(attempts) == 1 and isinstance(attempts[0].command, AppendHollow)

    async def noted_write(attempts: Any, **how: Any) -> bool:
        if not is_append(attempts):
            return await write(attempts, **how)
        try:
            ours = await write(attempts, **how)
        except (Exception, asyncio.CancelledError) as error:
            appends[type(error).__name__] += 1
            raise
        appends["won" if ours else "lost"] += 1
        return ours

    async def noted_look(attempts: Any, cause: Any) -> bool | None:
        decided = await look(attempts, cause)
        if is_append(attempts):
            appends[f"no answer, then {LOOKED[decided]}"] += 1
        return decided

    async def noted_settle(slot: Any) -> Any:
        attempt = await settle(slot)
        if attempt is not None and is_append([attempt]):
            appends["settled: happened" if attempt.happened else "settled: did not happen"] += 1
        return attempt

    def noted_flush(shard: Any) -> bool:
        appends["no room"] += (is_full := full(shard))
        return is_full

    patch.setattr(commit, "_write", noted_write)
    patch.setattr(commit, "_look_at_all", noted_look)
    patch.setattr(session, "settle", noted_settle)
    patch.setattr(pending, "must_flush", noted_flush)


LOOKED = {True: "it is there", False: "it is not", None: "it is vacant"}


@contextmanager
def _branches(found: dict[CodeType, set[Way]]) -> Iterator[None]:
    if not MONITORED_FROM <= sys.version_info < MONITORED_UNTIL:
        yield
        return
    monitoring = sys.monitoring
    tests = {code: dict(tests_of(code)) for one in MODULES for code in codes_of(one)}

    def went(code: CodeType, at: int, to: int) -> Any:
        if at in tests[code]:
            found[code].add((at, to))
        return None if len({way for way in found[code] if way[0] == at}) < 2 else monitoring.DISABLE

    monitoring.use_tool_id(TOOL, "worlds")
    monitoring.register_callback(TOOL, monitoring.events.BRANCH, went)
    for code in tests:
        monitoring.set_local_events(TOOL, code, monitoring.events.BRANCH)
    try:
        yield
    finally:
        monitoring.free_tool_id(TOOL)


def codes_of(module: ModuleType) -> list[CodeType]:
    """Of the functions and methods of the module, with those inside of them."""
    mine = [one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__]
    functions = [*mine, *(f for one in mine if isinstance(one, type) for f in vars(one).values())]
    functions = [getattr(f, "fget", getattr(f, "__func__", f)) for f in functions]
    found = [f.__code__ for f in functions if hasattr(f, "__code__")]
    found = [code for code in found if code.co_filename == module.__file__]  # not what a dataclass adds
    for code in found:  # grows
        found += [const for const in code.co_consts if isinstance(const, CodeType)]
    return found


def tests_of(code: CodeType) -> Iterator[tuple[int, int]]:
    """The instructions that go one of two ways by the condition of an `if` or a `while`; their lines."""
    lines = conditions(code.co_filename)
    for at in dis.get_instructions(code):
        if at.opname.startswith("POP_JUMP") and at.line_number in lines:
            yield at.offset, at.line_number


@cache
def conditions(file: str) -> set[int]:
    """The lines of a file on which conditions stand."""
    nodes = ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
    tests = [node.test for node in nodes if isinstance(node, ast.If | ast.While | ast.IfExp)]
    return {line for test in tests for line in range(test.lineno, (test.end_lineno or test.lineno) + 1)}


def missing(module: ModuleType, found: Mapping[CodeType, set[Way]]) -> list[str]:
    """The conditions of the module that always went one way, or were never reached, by line."""
    wrong: list[tuple[int, str]] = []
    for code in codes_of(module):
        for at, line in tests_of(code):
            ways = len({to for where, to in found.get(code, ()) if where == at})
            if ways < 2:
                wrong.append((line, f"{line} {'one way' if ways else 'never'}"))
    return [text for _, text in sorted(wrong)]
