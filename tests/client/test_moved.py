"""Goal: a program that calls a client by the names of version 0.1 runs as before."""

import inspect
import warnings

import pytest

import aiopersist as ap
from aiopersist.client.moved import MovedCalls
from tests.support.schemas import SCHEMA

CALLS = [name for name in vars(MovedCalls) if not name.startswith("_")]


@pytest.mark.parametrize("name", CALLS)
def test_an_old_name_has_the_signature_of_the_new_one(name: str) -> None:
    old = getattr(ap.Client, name)
    new = getattr(ap.Admin, name, None) or getattr(ap.Workers, name)
    assert inspect.signature(old) == inspect.signature(new)
    assert inspect.iscoroutinefunction(old) == inspect.iscoroutinefunction(new)
    assert "Deprecated since 0.2: call `client." in (old.__doc__ or "")


async def test_old_names_do_what_the_new_ones_do() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with ap.open("mem://", maintenance=False) as client:
            async with client.writer("t", SCHEMA) as w:
                await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
            await client.retain("t", 1)
            assert (await client.inspect("t")).retention == (await client.admin.inspect("t")).retention
            async with client.shared_read("t") as read:
                (piece,) = await read.pieces(1)
                rows = [batch.to_pylist() async for batch in client.read_piece(piece)]
            assert rows == [[{"key": "a", "val": 1, "diff": 1}]]
            await client.drop("t")
            with pytest.raises(ap.UnknownShard):
                await client.fsck("t")
