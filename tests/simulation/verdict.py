"""The observations of a game, and whether one list of updates explains all of them.

The outcome of an append is not known where its process was killed, or its lease ran out before anyone
could tell. So there may be more than one list; one of them must explain every snapshot, every listener,
and the contents at the end.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import aiopersist as ap
from aiopersist.testing.model import Model, gathered, passed

LISTS_MAX = 200


@dataclass(eq=False)
class Piece:
    """One append: `[lower, upper)`, or, as of `write`, one time that is not known before."""

    rows: list[Any]
    lower: ap.Antichain | None = None
    upper: ap.Antichain | None = None
    happened: bool | None = None
    """`None`: no caller was told."""

    def at(self, time: int) -> None:
        """It happened, at this time."""
        self.lower, self.upper, self.happened = ap.Antichain(time), ap.Antichain(time + 1), True
        self.rows = [(k, v, time, d) for k, v, _, d in self.rows]

    def may_begin(self, lower: ap.Antichain) -> bool:
        if self.lower is None:
            return self.happened is None
        return self.happened is not False and self.lower == lower != self.upper


@dataclass(eq=False)
class Told:
    """What one follower was told, over all its lives."""

    faithful: str = ""
    """How it holds on to what it was not told yet: "named", "critical", or not at all."""
    name: str = ""
    snapshot: bool = False
    as_of: Any = None
    begin: ap.Antichain | None = None
    frontier: ap.Antichain | None = None
    cursor: str = ""
    seen: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Seen:
    """Everything that is to be explained."""

    pieces: list[Piece] = field(default_factory=list)
    snapshots: list[tuple[Any, list[Any]]] = field(default_factory=list)
    follows: list[Told] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Promises that were broken, such as a refusal without its reason."""

    def promise(self, kept: bool, what: object) -> None:
        if not kept:
            self.broken.append(f"{what!r}: {what}")

    def check(self, models: Iterator[Model]) -> None:
        """That one of the lists explains it; the first failure if none does."""
        assert not self.broken, self.broken
        failures: list[AssertionError] = []
        for model in islice(models, LISTS_MAX):
            try:
                return self._check(model)
            except AssertionError as failure:
                failures.append(failure)
        assert failures, "no list of appends leads to the upper"
        failures[0].add_note(f"none of {len(failures)} lists of updates explains it")
        raise failures[0]

    def _check(self, model: Model) -> None:
        for as_of, seen in self.snapshots:
            assert seen == model.contents(as_of), f"contents at {as_of}"
        for told in self.follows:
            if told.begin is not None:
                _check_told(told, model)


def _check_told(told: Told, model: Model) -> None:
    assert told.begin is not None and told.frontier is not None
    as_of, frontier, begin = told.as_of, told.frontier.elements, told.begin.elements
    ahead = all(not passed(begin, e) for e in frontier)
    assert ahead or told.snapshot, told
    expected: Counter[Any] = Counter()
    if not told.snapshot:
        expected = model.changes(as_of, lower=begin, upper=frontier)
    elif told.frontier != told.begin:
        expected = model.changes(as_of, upper=frontier)
        expected.update({(k, v, as_of): d for k, v, d in model.contents(as_of)})
    seen = gathered(told.seen)
    missing, beyond = expected - seen, seen - expected
    assert seen == expected, f"{missing=} {beyond=} as_of {as_of} {told.begin}..{told.frontier}"


def lists(pieces: list[Piece], least: ap.Antichain, upper: ap.Antichain) -> Iterator[Model]:
    """Every row of appends from `least` to `upper` in which all are that surely happened."""
    sure = sum(piece.happened is True and piece.lower != piece.upper for piece in pieces)
    for row in _rows(pieces, least, upper):
        if sum(piece.happened is True for piece, _, _ in row) == sure:
            model = Model(least.elements)
            for piece, lower, up in row:
                (time,) = lower.elements if piece.lower is None else (None,)
                rows = piece.rows if time is None else [(k, v, time, d) for k, v, _, d in piece.rows]
                model.append(rows, lower.elements, up.elements)
            yield model


def _rows(
    pieces: list[Piece], at: ap.Antichain, upper: ap.Antichain
) -> Iterator[list[tuple[Piece, ap.Antichain, ap.Antichain]]]:
    if at == upper:
        yield []
        return
    may = [piece for piece in pieces if piece.may_begin(at)]
    for piece in [piece for piece in may if piece.happened] or may:
        up = ap.Antichain(at.elements[0] + 1) if piece.upper is None else piece.upper  # type: ignore[operator]
        if up <= upper:
            for rest in _rows([other for other in pieces if other is not piece], up, upper):
                yield [(piece, at, up), *rest]
