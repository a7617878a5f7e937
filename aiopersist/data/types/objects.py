"""Codecs of Python types that Arrow lacks: they convert to a type that Arrow has, and back."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any
from uuid import UUID

from aiopersist.base.errors import Unsupported
from aiopersist.data.arrays import bool_scalar
from aiopersist.data.lazy import pa, pc
from aiopersist.data.refusal import Refusal, short, unexpected
from aiopersist.data.types.codec import NONE, BuiltIn


class Uuids(BuiltIn):
    """UUIDs as their 16 bytes."""

    name = "uuid"

    def __init__(self) -> None:
        self.arrow_type = pa.binary(16)

    def build(self, values: Sequence[Any], types: set[type]) -> pa.Array:
        _refuse_others(values, types, UUID, "UUID")
        return pa.array([None if v is None else v.bytes for v in values], self.arrow_type)

    def decode(self, array: pa.Array) -> list[Any]:
        return [None if v is None else UUID(bytes=v) for v in array.to_pylist()]


class Enums(BuiltIn):
    """Members of an `Enum` as their names."""

    def __init__(self, cls: type[Enum]) -> None:
        self.cls = cls
        self.name = cls.__name__
        self.arrow_type = pa.string()

    def build(self, values: Sequence[Any], types: set[type]) -> pa.Array:
        _refuse_others(values, types, self.cls, self.name)
        names = [None if v is None else v._name_ for v in values]  # a class may have a `name` of its own
        for unnamed in set(names) - self.cls.__members__.keys() - {None}:  # a combination of flags
            raise Refusal(names.index(unnamed), f"{short(unnamed)} is no member of {self.name}")
        return pa.array(names, self.arrow_type)

    def check_stored(self, array: pa.Array) -> None:
        """Refuses aliases: rows write the member's own name, and an alias would be another value."""
        names = pa.array(list(self._own()), pa.string())
        is_member = pc.or_(pc.is_null(array), pc.is_in(array, value_set=names))
        row = pc.index(is_member, bool_scalar(False)).as_py()
        if row >= 0:
            raise Refusal(row, f"{short(array[row].as_py())} is no member of {self.name}")

    def decode(self, array: pa.Array) -> list[Any]:
        members = self._own()
        try:
            return [None if v is None else members[v] for v in array.to_pylist()]
        except KeyError as e:  # another version of the program has other members
            raise Unsupported(f"{e} is {self._fault(e.args[0])}") from e

    def _fault(self, name: str) -> str:
        if (member := self.cls.__members__.get(name)) is None:
            return f"no member of {self.name}: read it as text"
        text = f"an alias of {member._name_} in {self.name}, and rows write the member's name"
        return f"{text}: make {name} the member, and {member._name_} its alias"

    def _own(self) -> dict[str, Enum]:
        """The members by their own names."""
        return {name: member for name, member in self.cls.__members__.items() if member._name_ == name}


def _refuse_others(values: Sequence[Any], types: set[type], cls: type, name: str) -> None:
    if types <= {cls, NONE}:
        return
    for row, value in enumerate(values):
        if value is not None and not isinstance(value, cls):
            raise Refusal(row, unexpected(value, name))
