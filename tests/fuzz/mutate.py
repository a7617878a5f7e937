"""Seeded mutations of bytes: of any, and of JSON by its structure."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

TOKENS = [
    *(
        b"\x00",
        b"\xff",
        b"\xed\xa0\x80",
        b"\n",
        b"{}",
        b"[]",
        b"null",
        b"true",
        b'""',
        b'"',
        b"\\",
        b"'",
        b"`",
    ),
    *(b"-1", b"0", b"1e400", b"NaN", b"Infinity", b"9" * 30, b"9223372036854775808", b"1" * 5000),
    *(
        b"[" * 3000,
        b"[" * 100_000,
        b'{"a":' * 3000,
        b"(" * 3000,
        b"not " * 1500,
        b"%00",
        b"%ff",
        b"../",
        b"?",
        b"&",
        b"=",
    ),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**63, -(2**63), 10**30, 1.5, 1e308, -0.0),
    *(
        "",
        "a",
        "-1",
        "0",
        "\x00",
        "é" * 50,
        "x" * 5000,
        [],
        {},
        [[]],
        [0],
        [None],
        {"": None},
        {"0": {}},
        "AA==",
    ),
]


def mutated(data: bytes, others: Sequence[bytes], dice: Random) -> bytes:
    """`data`, changed in one to four ways."""
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        way = dice.choice(WAYS)
        data = way(data, others, dice)
    return data


def _flip(data: bytes, others: Sequence[bytes], dice: Random) -> bytes:
    if not data:
        return data
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]


def _set(data: bytes, others: Sequence[bytes], dice: Random) -> bytes:
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.randbytes(1) + data[at + 1 :]


def _cut(data: bytes, others: Sequence[bytes], dice: Random) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


def _without(data: bytes, others: Sequence[bytes], dice: Random) -> bytes:
    begin, end = _slice(data, dice)
    return data[:begin] + data[end:]


def _twice(data: bytes, others: Sequence[bytes], dice: Random) -> bytes:
    begin, end = _slice(data, dice)
    return data[:end] + data[begin:end] * dice.choice([1, 1, 50]) + data[end:]


def _insert(data: bytes, others: Sequence[bytes], dice: Random) -> bytes:
    begin, end = _slice(data, dice)
    return data[:begin] + dice.choice(TOKENS) + data[dice.choice([begin, end]) :]


def _splice(data: bytes, others: Sequence[bytes], dice: Random) -> bytes:
    other = dice.choice(others)
    return data[: dice.randrange(len(data) + 1)] + other[dice.randrange(len(other) + 1) :]


def _json(data: bytes, others: Sequence[bytes], dice: Random) -> bytes:
    """Another value at some place of a line that is JSON, as all values but parts and rollups have."""
    lines = data.split(b"\n")
    at = dice.randrange(len(lines))
    try:
        found = json.loads(lines[at])
    except (ValueError, RecursionError):
        return _flip(data, others, dice)
    lines[at] = json.dumps(_changed(found, dice), separators=(",", ":")).encode()
    return b"\n".join(lines)


def _changed(value: Any, dice: Random) -> Any:
    places: list[Callable[[Any], None]] = []
    values: list[Any] = []
    _walk(value, places, values)
    if not places:
        return dice.choice(VALUES)
    dice.choice(places)(dice.choice([dice.choice(VALUES), dice.choice(values)]))
    return value


def _walk(value: Any, places: list[Callable[[Any], None]], values: list[Any]) -> None:
    """All places that may get another value, and all values that are somewhere."""
    if isinstance(value, dict):
        for key, below in list(value.items()):
            places.append(lambda new, key=key: value.__setitem__(key, new))  # type: ignore[misc]
            places.append(lambda new, key=key: value.__setitem__(str(new)[:40], value.pop(key, None)))  # type: ignore[misc]
            places.append(lambda new, key=key: value.pop(key, None))  # type: ignore[misc]
            values.append(json.loads(json.dumps(below)))
            _walk(below, places, values)
    elif isinstance(value, list):
        for at, below in enumerate(value):
            places.append(lambda new, at=at: value.__setitem__(at, new))  # type: ignore[misc]
            places.append(lambda new, at=at: value.insert(at, new))  # type: ignore[misc]
            values.append(json.loads(json.dumps(below)))
            _walk(below, places, values)


def _slice(data: bytes, dice: Random) -> tuple[int, int]:
    begin = dice.randrange(len(data) + 1)
    return begin, min(len(data), begin + dice.choice([1, 2, 4, 16, 64, 1000]))


WAYS = [_flip, _set, _cut, _without, _twice, _insert, _insert, _splice, _json, _json, _json]
