"""Which blobs versions name, told from their bytes without building the rest of them: collection reads
every version once, and this costs a fifth.

A part is *live* at a version if a batch of the state there names it. Keys never come back: what was
named once and is not live any more is dropped for good.
"""

from collections.abc import Iterable, Iterator

from pydantic import BaseModel, ValidationError

from aiopersist.state.diff import RollupName, check_format, not_understood
from aiopersist.state.model import State
from aiopersist.state.record import HollowPart

BatchPath = int | tuple[str, str, int]
"""Where a batch is in the state: its ordinal; or its stream, which half of that, and the number there."""


class _PartNames(BaseModel):
    key: str | None = None


class _BatchNames(BaseModel):
    parts: tuple[_PartNames, ...] = ()


class _RollupNames(BaseModel):
    key: str
    checksum: str


class _DropNames(BaseModel):
    batches: tuple[int, ...] = ()


class _ArrangementNames(BaseModel):
    unsealed: dict[int, _BatchNames] = {}
    trace: dict[int, _BatchNames] = {}
    drop_unsealed: tuple[int, ...] = ()
    drop_trace: tuple[int, ...] = ()


class _StreamsNames(BaseModel):
    destroyed: tuple[str, ...] = ()
    arrangements: dict[str, _ArrangementNames] = {}


class _ChangesNames(BaseModel):
    batches: dict[int, _BatchNames] = {}
    rollups: dict[int, _RollupNames] = {}
    streams: _StreamsNames = _StreamsNames()
    drop: _DropNames = _DropNames()

    def set_batches(self) -> Iterator[tuple[BatchPath, _BatchNames]]:
        """What is set, by its place."""
        yield from self.batches.items()
        for name, changes in self.streams.arrangements.items():
            yield from (((name, "unsealed", at), batch) for at, batch in changes.unsealed.items())
            yield from (((name, "trace", at), batch) for at, batch in changes.trace.items())

    def dropped_places(self) -> Iterator[BatchPath]:
        """What is dropped one by one; a stream that is destroyed is dropped whole."""
        yield from self.drop.batches
        for name, changes in self.streams.arrangements.items():
            yield from ((name, "unsealed", at) for at in changes.drop_unsealed)
            yield from ((name, "trace", at) for at in changes.drop_trace)


class Names(BaseModel):
    """What a version says about blobs. Fields of a diff that say something else are skipped."""

    format: int
    rollup: RollupName | None
    changes: _ChangesNames


def decode_names(data: bytes) -> Names:
    """`Corruption` for what is no diff, or of a format that this version does not understand."""
    try:
        names = Names.model_validate_json(data)
    except ValidationError as error:
        raise not_understood("a diff of the state", data, error) from error
    check_format("a diff of the state", names.format)
    return names


class Trail:
    """What a row of versions has named, and what is live at the last of them."""

    def __init__(self, base: State | None = None) -> None:
        """`base` is the state that the row begins at; none at version 0."""
        self._live = {} if base is None else {place: _keys(parts) for place, parts in _batches(base)}
        self.parts: set[str] = {key for keys in self._live.values() for key in keys}
        """Every part that was named."""
        self.rollups: dict[int, RollupName] = {}
        """Every rollup that was named, by its version."""

    def add(self, versions: Iterable[bytes]) -> None:
        """The next ones."""
        for data in versions:
            names = decode_names(data)
            for place in names.changes.dropped_places():
                self._live.pop(place, None)
            for place, batch in names.changes.set_batches():
                self._live[place] = _keys(batch.parts)
                self.parts |= self._live[place]
            if gone := {*names.changes.streams.destroyed}:
                self._live = {place: keys for place, keys in self._live.items() if _stream(place) not in gone}
            for seqno, rollup in names.changes.rollups.items():
                self.rollups[seqno] = RollupName(seqno=seqno, key=rollup.key, checksum=rollup.checksum)
            if names.rollup is not None:
                self.rollups[names.rollup.seqno] = names.rollup

    @property
    def dropped(self) -> set[str]:
        """Parts that were named and are not live."""
        return self.parts.difference(*self._live.values())


def live_parts(state: State) -> set[str]:
    """The keys of all parts that the state names."""
    return _keys(part for _, parts in _batches(state) for part in parts)


def registered(state: State) -> set[str]:
    """Whose blobs may be named, now or later: the registered writers, and the owner of streams."""
    streams = state.streams
    return {*state.writers, streams.owner} if streams is not None else {*state.writers}


def _batches(state: State) -> Iterator[tuple[BatchPath, Iterable[HollowPart]]]:
    for ordinal, batch in state.batches.items():
        yield ordinal, batch.parts
    for name, arrangement in state.streams.arrangements.items() if state.streams is not None else ():
        for at, unsealed in arrangement.unsealed.items():
            yield (name, "unsealed", at), unsealed.parts
        for at, trace in arrangement.trace.items():
            yield (name, "trace", at), trace.parts


def _stream(place: BatchPath) -> str | None:
    return None if isinstance(place, int) else place[0]


def _keys(parts: Iterable[_PartNames | HollowPart]) -> set[str]:
    return {part.key for part in parts if part.key is not None}
