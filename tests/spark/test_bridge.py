"""Goal: the bridge opens a client once, closes it when its last user is done, and never while others use
it."""

from collections.abc import Iterator
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.spark.bridge import Bridge
from aiopersist.spark.location import SparkLocation


@pytest.fixture
def found(place: str) -> Iterator[tuple[Bridge, SparkLocation]]:
    bridge = Bridge()
    yield bridge, SparkLocation.of(place, None, None, None)
    bridge.close_all()


def is_open(bridge: Bridge, client: ap.Client) -> bool:
    try:
        bridge.run(client.list_shards)
    except ap.InvalidUsage as error:
        if error.kind != ap.UsageKind.CLOSED:
            raise
        return False
    return True


def test_the_last_user_closes_it(found: tuple[Bridge, SparkLocation]) -> None:
    bridge, place = found
    first, second = (bridge.acquire(place, maintenance=False) for _ in range(2))
    assert first is second
    bridge.release(place, maintenance=False)
    assert is_open(bridge, first)
    bridge.release(place, maintenance=False)
    assert not is_open(bridge, first)
    assert is_open(bridge, bridge.acquire(place, maintenance=False))


def test_hooks_of_the_same_process_keep_theirs(found: tuple[Bridge, SparkLocation]) -> None:
    bridge, place = found
    mine = bridge.acquire(place, maintenance=False)
    assert bridge.client(place) is mine
    bridge.release(place, maintenance=False)
    assert is_open(bridge, mine)


def test_what_cannot_be_opened_is_tried_anew(found: tuple[Bridge, SparkLocation], monkeypatch: Any) -> None:
    bridge, place = found
    monkeypatch.setenv("AIOPERSIST_BLOB_TARGET_SIZE", "x")
    for _ in range(2):
        with pytest.raises(Exception, match=r"(?i)blob_target_size"):
            bridge.acquire(place, maintenance=False)
    monkeypatch.delenv("AIOPERSIST_BLOB_TARGET_SIZE")
    opened = bridge.acquire(place, maintenance=False)
    bridge.release(place, maintenance=False)
    assert not is_open(bridge, opened)
