"""Which blobs versions name, told from their bytes without building the rest of them: collection reads
every version once, and this costs a fifth.

A part is *live* at a version if a batch of the state there names it. Keys never come back: what was
named once and is not live any more is dropped for good.
"""

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ValidationError

from aiopersist.state.diff import RollupName, check_format, not_understood
from aiopersist.state.model import HollowBatch


class _Part(BaseModel):
    key: str | None = None


class _Batch(BaseModel):
    parts: tuple[_Part, ...] = ()


class _Rollup(BaseModel):
    key: str
    checksum: str


class _Drop(BaseModel):
    batches: tuple[int, ...] = ()


class _Changes(BaseModel):
    batches: dict[int, _Batch] = {}
    rollups: dict[int, _Rollup] = {}
    drop: _Drop = _Drop()


class Names(BaseModel):
    """What a version says about blobs. Fields of a diff that say something else are skipped."""

    format: int
    rollup: RollupName | None
    changes: _Changes


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

    def __init__(self, batches: Mapping[int, HollowBatch] | None = None) -> None:
        """`batches` of the state that the row begins at; none at version 0."""
        self._live = {ordinal: part_keys([batch]) for ordinal, batch in (batches or {}).items()}
        self.parts: set[str] = {key for keys in self._live.values() for key in keys}
        """Every part that was named."""
        self.rollups: dict[int, RollupName] = {}
        """Every rollup that was named, by its version."""

    def add(self, versions: Iterable[bytes]) -> None:
        """The next ones."""
        for data in versions:
            names = decode_names(data)
            for ordinal in names.changes.drop.batches:
                self._live.pop(ordinal, None)
            for ordinal, batch in names.changes.batches.items():
                self._live[ordinal] = {part.key for part in batch.parts if part.key is not None}
                self.parts |= self._live[ordinal]
            for seqno, rollup in names.changes.rollups.items():
                self.rollups[seqno] = RollupName(seqno=seqno, key=rollup.key, checksum=rollup.checksum)
            if names.rollup is not None:
                self.rollups[names.rollup.seqno] = names.rollup

    @property
    def dropped(self) -> set[str]:
        """Parts that were named and are not live."""
        return self.parts.difference(*self._live.values())


def part_keys(batches: Iterable[HollowBatch]) -> set[str]:
    """The keys of the parts that these batches name."""
    return {part.key for batch in batches for part in batch.parts if part.key is not None}
