"""Whether what processes were told and what is there agree."""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiopersist as ap
from tests.endurance.faults import Window
from tests.endurance.notes import KINDS, Note
from tests.endurance.publications import left_by_publications, wrong_publications
from tests.endurance.tags import wrong_tags
from tests.endurance.worker import ACCOUNTS, BALANCE, LOG

LONGEST = 5


@dataclass
class Verdict:
    """The figures of a run."""

    operations: Counter[str] = field(default_factory=Counter)
    """Those that callers were told of, by kind."""
    lost: list[str] = field(default_factory=list)
    """Told, and not there."""
    doubled: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Calls of processes that live, or with an id, of which nobody learned what became."""
    told_unknown: int = 0
    """How often a call raised `Indeterminate`; each was settled, or made again with its id."""
    failed: Counter[str] = field(default_factory=Counter)
    """Errors that callers got and answered by a repetition, by type."""
    killed_in: int = 0
    """Appends without an id during which their process was killed: nobody is left who could be told."""
    forks: Counter[str] = field(default_factory=Counter)
    """Children of a fork, by what they were to do; each was refused, or not, as it must be."""
    wrong: list[str] = field(default_factory=list)
    """Other contradictions."""
    longest: list[tuple[float, str]] = field(default_factory=list)
    """The longest times in which nobody committed, in seconds, and the faults meanwhile."""

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.doubled or self.unknown or self.wrong)


def told_by(notes: Sequence[Note], windows: Sequence[Window]) -> Verdict:
    """What the notes of all processes say by themselves."""
    found = Verdict()
    for note in notes:
        if note.what == "told" and note.kind in KINDS:
            found.operations[note.kind] += 1
        elif note.what == "unknown":
            found.told_unknown += 1
        elif note.what == "failed":
            found.failed[note.text.partition(":")[0]] += 1
        elif note.kind == "fork":
            found.forks[note.text] += 1
    acks = sorted(note.at for note in notes if note.what == "told" and note.kind in KINDS)
    for before, after in pairwise(acks):
        during = [window.kind for window in windows if window.began < after and window.ended > before]
        found.longest.append((round(after - before, 1), ", ".join(during) or "no fault"))
    found.longest = sorted(found.longest, reverse=True)[:LONGEST]
    return found


async def judged(client: ap.Client, notes: Sequence[Note], found: Verdict) -> Verdict:
    """Compare them with what is there at the end."""
    began = {(note.kind, note.op) for note in notes if note.what == "began"}
    told = {(note.kind, note.op) for note in notes if note.what == "told"}
    async with client.reader("log", LOG) as reader, reader.snapshot() as snapshot:
        rows = await snapshot.rows()
    there = {key.rstrip("x"): (val, diff) for key, val, diff in rows}
    found.doubled += [f"{key[:60]}: {rest}" for key, *rest in rows if rest != [1, 1]]
    for kind in ("write", "append"):
        found.lost += [op for of, op in told if of == kind and op not in there]
    known = {op for kind, op in began if kind != "local"}
    found.wrong += [f"{key} is there, and nobody wrote it" for key in there if key not in known]
    for kind, op in began - told:
        if kind in ("append", "local"):
            found.killed_in += 1
        else:
            found.unknown.append(f"{kind} {op}")
    await _counts(client, told, found)
    delivered = await client.table("delivered", str, int).get("all")
    if delivered != len(rows):
        found.wrong.append(f"a subscription delivered {delivered} of {len(rows)} rows")
    found.wrong += [problem async for problem in _problems(client)]
    found.wrong += [problem async for problem in wrong_tags(client, LOG, notes)]
    found.wrong += [problem async for problem in wrong_publications(client, notes)]
    found.wrong += [problem async for problem in left_by_publications(client)]
    return found


async def _problems(client: ap.Client) -> AsyncIterator[str]:
    for shard in [summary.name or str(summary.shard_id) for summary in await client.admin.overview()]:
        report = await client.admin.fsck(shard)
        for problem in report.problems:
            yield f"{shard}: {problem}"


async def judged_directory(client: ap.Client, notes: Sequence[Note], found: Verdict) -> None:
    """Compare with the directory that processes share, and from which their children are kept."""
    there = {key async for key, _ in client.table("local", str, int).items()}
    found.lost += [note.op for note in notes if note[1:3] == ("told", "local") and note.op not in there]
    began = {note.op for note in notes if note.kind == "local"}
    found.wrong += [f"{key} is in the directory, and no parent put it" for key in there - began]
    found.wrong += [f"the directory: {problem}" async for problem in _problems(client)]


async def _counts(client: ap.Client, told: Iterable[tuple[str, str]], found: Verdict) -> None:
    accounts = dict([entry async for entry in client.table("accounts", str, int).items()])
    if sum(accounts.values()) != ACCOUNTS * BALANCE:
        found.wrong.append(f"the balances are {accounts}")
    expected: Counter[Any] = Counter()
    for kind, op in told:
        if kind == "count":
            expected[op[0]] += 1
        elif kind == "transfer":
            expected["transfers"] += 1
    counters = dict([entry async for entry in client.table("counters", str, int).items()])
    for name in expected | counters:
        there, want = counters.get(name, 0), expected[name]
        if there < want:
            found.lost.append(f"{want - there} of {want} counted as {name}")
        elif there > want:
            found.doubled.append(f"{there - want} counted beyond {want} as {name}")
