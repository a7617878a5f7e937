"""What all values of the state are made of: frozen records with a JSON form; and the hollow part.

Records can be read with `psql` and `jq`, since they are pydantic models.
"""

from functools import cache
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from aiopersist.frontier import Antichain


class Record(BaseModel):
    """A frozen value with a JSON form. Unknown fields are refused: a later format says so first.

    `Record(...)` checks its values. `of` and `replace` do not: they are for values that were checked
    before, on the path of every commit, where they cost a fifth.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,  # JSON has neither: they would be written as null
        ser_json_bytes="base64",
        val_json_bytes="base64",
    )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The record of these values and the defaults, unchecked."""
        return _made(cls, {**_defaults(cls), **values}, set(values))

    def replace(self, **values: Any) -> Self:
        """This record with some values replaced, unchecked."""
        return _made(type(self), {**self.__dict__, **values}, self.__pydantic_fields_set__ | values.keys())


R = TypeVar("R", bound=Record)


def _made(cls: type[R], values: dict[str, Any], fields_set: set[str]) -> R:
    record = cls.__new__(cls)
    object.__setattr__(record, "__dict__", values)  # what `model_construct` does, without its loop
    object.__setattr__(record, "__pydantic_fields_set__", fields_set)
    object.__setattr__(record, "__pydantic_extra__", None)
    object.__setattr__(record, "__pydantic_private__", None)
    return record


@cache
def _defaults(cls: type[Record]) -> dict[str, Any]:
    return {name: field.default for name, field in cls.model_fields.items() if not field.is_required()}


class HollowPart(Record):
    """The metadata of a part: where it lies, and what proves that what lies there is ours."""

    key: str | None = None
    """Its blob key; `None` for an inline part."""
    inline: bytes | None = None
    """The part itself, if it is inline."""
    size: int
    """Bytes as encoded."""
    rows: int
    goodbytes: int | None = None
    """Of its updates, which bounds the memory that they take: encoded they may be a thousandth. Not said of
    an inline part, which is no smaller."""
    footer_bytes: int = 0
    """Length of the end of the blob that holds the index."""
    checksum: str
    """Of the index, or of all the bytes of an inline part."""
    schema_id: int = 0
    key_lower: Any = None
    stats: dict[str, Any] | None = None
    rewrite: Antichain | None = None
    """Times are advanced to it when the part is read."""
    truncated: tuple[Antichain, Antichain] | None = None
    """Lower and upper of the append that cut it: updates outside of them are left out when it is read.
    They are the part's own, since its batch may become one with its neighbours."""
