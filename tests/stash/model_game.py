"""What the calls of a game share: openers, collections, and what the model says is there."""

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiopersist.stash import StashError
from tests.data import data_oracle as oracle
from tests.stash.model_values import KINDS, canonical
from tests.stash.stash_model import Model


class Handle(NamedTuple):
    name: str
    types: str
    id: int
    real: Any


@dataclass
class Content:
    """What is there; a draft has its own."""

    model: Any


@dataclass
class Opener:
    stash: Any
    mode: str
    content: Content
    fenced: bool = False
    known: dict[int, Handle] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        return self.content.model


class Act(NamedTuple):
    """A call on the model and on a stash."""

    what: str
    model: Callable[[Any], Any]
    real: Callable[[Any], Awaitable[Any]]
    writes: bool = True


class MigrationFailed(Exception):
    pass


def fault(error: Exception) -> str:
    if isinstance(error, StashError) and error.is_unrecoverable:
        return "fenced"
    return type(error).__name__


class Game:
    """One game of `test_model.py`."""

    def __init__(self, seed: int, url: str) -> None:
        self.rng = random.Random(seed)
        self.url = url
        self.counts: Counter[str] = Counter()
        self.content = Content(Model(KINDS, oracle.rank, canonical))
        self.openers: list[Opener] = []
        self.handles: list[Handle] = []
        self.held: list[Any] = []
        """Batches that are appended later."""
        self.lives = AsyncExitStack()

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def fits(self, h: Handle, opener: Opener) -> bool:
        c = opener.model.collections.get(h.name)
        return c is not None and (c.id, c.types) == (h.id, h.types)
