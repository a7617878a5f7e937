"""The blobs of the parts and tags that a state names, and the writers whose blobs it may name."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from aiopersist.state.model import State

NamingPath = int | tuple[str, str, int]
"""The place of a batch or a tag in the state, which names parts: the ordinal of a batch; or its stream, the
half of that, and its key; or the name of a tag, `tag` and 0. A shard with streams has no tags."""


class _Keyed(Protocol):
    @property
    def key(self) -> str | None: ...


def live_parts(state: State) -> set[str]:
    """The keys of all blobs that the state names, but for the latest rollups: those of parts and of tags."""
    return {key for _, keys in named_by(state) for key in keys}


def current_parts(state: State) -> set[str]:
    """The keys of the parts that the newest contents need: tags may need others."""
    return keys_of(state.parts)


def registered(state: State) -> set[str]:
    """The writers whose blobs may be named, now or later: the registered ones, and the owner of streams."""
    streams = state.streams
    return {*state.writers, streams.owner} if streams is not None else {*state.writers}


def named_by(state: State) -> Iterator[tuple[NamingPath, set[str]]]:
    """The blobs that each batch and each tag names, by path."""
    for ordinal, batch in state.batches.items():
        yield ordinal, keys_of(batch.parts)
    for name, arrangement in state.streams.arrangements.items() if state.streams is not None else ():
        for at, unsealed in arrangement.unsealed.items():
            yield (name, "unsealed", at), keys_of(unsealed.parts)
        for at, trace in arrangement.trace.items():
            yield (name, "trace", at), keys_of(trace.parts)
    for name, tag in state.tags.items():
        yield path_of_tag(name), tag.keys


def path_of_tag(name: str) -> NamingPath:
    return name, "tag", 0


def keys_of(parts: Iterable[_Keyed]) -> set[str]:
    """The keys of the blobs of `parts`."""
    return {part.key for part in parts if part.key is not None}
