"""Frozen records with a JSON form, of which the values of the state consist; and the hollow part.

Records are pydantic models, so `psql` and `jq` can read them.
"""

from functools import cache
from math import inf
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from aiopersist.frontier import Antichain


class Record(BaseModel):
    """A frozen value with a JSON form. Unknown fields are refused: a later format has a later number.

    `Record(...)` checks its values. `of` and `replace` do not: they are for values that were checked
    before, on the path of every commit, and cost a fifth of that.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,  # JSON has neither: they would be written as null
        ser_json_bytes="base64",
        val_json_bytes="base64",
    )

    def __eq__(self, other: object) -> bool:
        """Whether `other` is the same kind of record with equal values; `BaseModel` compares as much in many
        steps, and each commit compares a version with what its bytes say."""
        return type(other) is type(self) and self.__dict__ == other.__dict__

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The record with these values and the defaults, unchecked."""
        return _made(cls, {**_defaults(cls), **values}, _names(tuple(values)))

    def replace(self, **values: Any) -> Self:
        """This record with some values replaced, unchecked."""
        named = self.__pydantic_fields_set__
        if not values.keys() <= named:
            named = named | values.keys()
        return _made(type(self), {**self.__dict__, **values}, named)


R = TypeVar("R", bound=Record)


def _made(cls: type[R], values: dict[str, Any], fields_set: set[str]) -> R:
    record = cls.__new__(cls)
    _set_values(record, values)  # what `model_construct` does, without its loop
    _set_fields_set(record, fields_set)
    _set_extra(record, None)
    _set_private(record, None)
    return record


_set_values, _set_fields_set, _set_extra, _set_private = (
    BaseModel.__dict__[name].__set__
    for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


@cache
def _names(names: tuple[str, ...]) -> set[str]:
    """The names as a set that records share: none of them ever changes it, and a set of its own would be half
    of a small record."""
    return set(names)


@cache
def _defaults(cls: type[Record]) -> dict[str, Any]:
    fields = cls.model_fields.items()
    return {name: f.get_default(call_default_factory=True) for name, f in fields if not f.is_required()}


class StoredStats(TypedDict):
    """The statistics of one column; the bounds are values of its type as JSON, or null."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]  # what pydantic reads

    min: Any
    max: Any
    nulls: Annotated[int, Field(strict=True, ge=0)]


class HollowPart(Record):
    """The metadata of a part: where it lies, and how a reader checks it."""

    key: str | None = None
    """Its blob key; `None` for an inline part."""
    inline: bytes | None = None
    """The encoded part, if it is inline."""
    size: int
    """Bytes of the encoded part."""
    rows: int
    goodbytes: int | None = None
    """The goodbytes of its updates: they bound the memory that these take, of which the encoded part may be a
    thousandth. `None` for an inline part, whose encoded size is no smaller."""
    footer_bytes: int = 0
    """The length of the index, which is the end of the blob."""
    checksum: str
    """The checksum of the index, or of all bytes of an inline part."""
    schema_id: int = 0
    key_lower: Any = None
    stats: dict[str, StoredStats] | None = None
    rewrite: Antichain | None = None
    """A reader advances the times of the part to it."""
    truncated: tuple[Antichain, Antichain] | None = None
    """Lower and upper of the append that truncated it: a reader leaves out updates outside of them. The part
    keeps them itself, since its batch may be merged with its neighbours."""


def goodbytes_at_most(part: HollowPart) -> float:
    """The goodbytes of its updates, or more; infinite where the part does not say."""
    return part.size if part.key is None else inf if part.goodbytes is None else part.goodbytes
