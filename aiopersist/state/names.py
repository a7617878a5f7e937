"""The blobs of the parts that a state names, and the writers whose blobs it may name."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from aiopersist.state.model import State
from aiopersist.state.record import HollowPart

BatchPath = int | tuple[str, str, int]
"""The place of a batch in the state: its ordinal; or its stream, the half of that, and its key."""


class _Keyed(Protocol):
    @property
    def key(self) -> str | None: ...


def live_parts(state: State) -> set[str]:
    """The keys of all parts that the state names."""
    return keys_of(part for _, parts in batches_of(state) for part in parts)


def registered(state: State) -> set[str]:
    """The writers whose blobs may be named, now or later: the registered ones, and the owner of streams."""
    streams = state.streams
    return {*state.writers, streams.owner} if streams is not None else {*state.writers}


def batches_of(state: State) -> Iterator[tuple[BatchPath, Iterable[HollowPart]]]:
    """The parts of all batches, by path."""
    for ordinal, batch in state.batches.items():
        yield ordinal, batch.parts
    for name, arrangement in state.streams.arrangements.items() if state.streams is not None else ():
        for at, unsealed in arrangement.unsealed.items():
            yield (name, "unsealed", at), unsealed.parts
        for at, trace in arrangement.trace.items():
            yield (name, "trace", at), trace.parts


def keys_of(parts: Iterable[_Keyed]) -> set[str]:
    """The keys of the blobs of `parts`."""
    return {part.key for part in parts if part.key is not None}
