"""Schemas and types that many tests write."""

from enum import Enum

from pydantic import BaseModel

import aiopersist as ap

INT_MAX = 2**63 - 1


SCHEMA = ap.Schema(key=str, val=int)


Writer = ap.WriteHandle[str, int]


PRODUCT = ap.Schema(key=str, val=int, time=2)


KIND = ap.UsageKind


class Colour(Enum):
    RED = 1
    BLUE = 2


NAN = float("nan")


class V1(BaseModel):
    name: str


class V2(BaseModel):
    name: str
    age: int | None = None


class Key(BaseModel, frozen=True):
    region: str
    number: int | None


class Val(BaseModel):
    amount: int | None
    number: float


ROWS = [("a", 1, 0, 1)]


Row = tuple[str, int, int, int]
