"""What of the library worlds reach: pairs of a command and its outcome, how the short way of small appends
ends, and the lines of the commit loop and of the short way."""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

import pytest

from aiopersist.shard import commit
from aiopersist.state.small_append import SmallAppend
from aiopersist.write import session, small

MODULES = (commit, small)
TOOL = 4  # of `sys.monitoring`; no other tool that Python names has it
LINES_FROM = (3, 12)  # the first Python that has `sys.monitoring`


@dataclass
class Covered:
    """See the header."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    short: Counter[str] = field(default_factory=Counter)
    """How small appends ended."""
    lines: dict[str, set[int]] = field(default_factory=lambda: {one.__name__: set() for one in MODULES})
    """By module; none before Python 3.12."""

    @property
    def missing(self) -> dict[str, list[int]]:
        """The lines that no world has reached, by module."""
        return {one.__name__: sorted(lines_of(one) - self.lines[one.__name__]) for one in MODULES}


@contextmanager
def watched() -> Iterator[Covered]:
    """What is reached from here to the end."""
    covered = Covered()
    with pytest.MonkeyPatch.context() as patch, _lines(covered.lines):
        _note_commands(patch, covered.outcomes)
        _note_small(patch, covered.short)
        yield covered


def _note_commands(patch: pytest.MonkeyPatch, outcomes: Counter[tuple[str, str]]) -> None:
    run, version = commit._run, SmallAppend.version

    def noted_small(append: SmallAppend, *args: Any) -> Any:
        result = version(append, *args)
        outcomes["SmallAppend", "the general way" if result is None else "commit"] += 1
        return result

    def noted(intent: Any, now: float, attempts: list[Any], diffs: list[Any]) -> Any:
        before = len(attempts)
        result = run(intent, now, attempts, diffs)
        refusal = isinstance(result, commit._Rejection)
        what = type(result.error).__name__ if refusal else "commit" if len(attempts) > before else "keep"
        outcomes[type(intent.command).__name__, what] += 1
        return result

    patch.setattr(commit, "_run", noted)
    patch.setattr(SmallAppend, "version", noted_small)


def _note_small(patch: pytest.MonkeyPatch, short: Counter[str]) -> None:
    """Each end of the short way, what was settled of it, and why it was left."""
    write, look, settle = commit._write, commit._look_at_all, session.settle
    version, must_flush = SmallAppend.version, small.must_flush

    def is_small(attempts: Any) -> bool:
        return isinstance(attempts[0].command, SmallAppend)

    async def noted_write(attempts: Any) -> bool:
        if not is_small(attempts):
            return await write(attempts)
        try:
            ours = await write(attempts)
        except (Exception, asyncio.CancelledError) as error:
            short[type(error).__name__] += 1
            raise
        short["won" if ours else "lost"] += 1
        return ours

    async def noted_look(attempts: Any, cause: Any) -> bool | None:
        decided = await look(attempts, cause)
        if is_small(attempts):
            short[f"no answer, then {LOOKED[decided]}"] += 1
        return decided

    async def noted_settle(slot: Any) -> Any:
        attempt = await settle(slot)
        if attempt is not None and is_small([attempt]):
            short["settled: happened" if attempt.happened else "settled: did not happen"] += 1
        return attempt

    def noted_version(append: SmallAppend, state: Any, now: float, token: str) -> Any:
        result = version(append, state, now, token)
        if result is None:
            short["left: another upper" if state.upper != append.lower else "left: another rule"] += 1
        return result

    def noted_flush(shard: Any) -> bool:
        full = must_flush(shard)
        short["left: no room"] += full
        return full

    patch.setattr(commit, "_write", noted_write)
    patch.setattr(commit, "_look_at_all", noted_look)
    patch.setattr(session, "settle", noted_settle)
    patch.setattr(SmallAppend, "version", noted_version)
    patch.setattr(small, "must_flush", noted_flush)


LOOKED = {True: "it is there", False: "it is not", None: "it is vacant"}


@contextmanager
def _lines(found: dict[str, set[int]]) -> Iterator[None]:
    if sys.version_info < LINES_FROM:
        yield
        return
    monitoring = sys.monitoring
    names = {code: one.__name__ for one in MODULES for code in codes_of(one)}

    def line(code: CodeType, number: int) -> Any:
        found[names[code]].add(number)
        return monitoring.DISABLE

    monitoring.use_tool_id(TOOL, "worlds")
    monitoring.register_callback(TOOL, monitoring.events.LINE, line)
    for code in names:
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
