"""Goal: an operator sees which process has a hold."""

import os
import re
import socket

import pytest

import aiopersist as ap
from aiopersist.base.runtime import Runtime


class Named(Runtime):
    """A process with a name that a state could not hold as it is."""

    def process(self) -> str:
        return "höst with spaces\n@:1" + "x" * 200


async def owners(client: ap.Client) -> dict[str, str | None]:
    return {hold.kind: hold.owner for hold in (await client.admin.inspect("s")).holds}


async def test_who_has_a_hold() -> None:
    """Goal: readers, named holds and subscriptions name their client and process; a critical since has no
    process, and a subscription that was closed has none any more."""
    process = f"{socket.gethostname()}:{os.getpid()}"
    assert re.fullmatch(r"[A-Za-z0-9._:/-]{1,64}", process), "this host has a name that is cut"
    async with (
        ap.open("mem://", settings=ap.Settings(client_name="orders")) as client,
        client.writer("s", ap.Schema(str, int)) as writer,
        client.reader("s", hold=0),
        client.reader("s", hold_name="etl"),
        client.critical_since("s", "pipeline"),
    ):
        await writer.write([("a", 1)])
        async with client.subscription("s", name="bill") as bill:
            assert (await client.admin.subscriptions("s"))["bill"].owner == bill._consumer.owner
            mine = f"orders/{process}"
            assert await owners(client) == {
                "reader": mine, "named": mine, "critical": None, "subscription": mine,
            }  # fmt: skip
        assert (await owners(client))["subscription"] is None


@pytest.mark.parametrize("name", ["", "an app, with @ and \x00"])
async def test_a_signature_is_short_and_plain(name: str) -> None:
    """Goal: whatever the host and the client are named, an id stays printable, and at most 64 longer."""
    async with (
        ap.open("mem://", settings=ap.Settings(client_name=name), runtime=Named()) as client,
        client.writer("s", ap.Schema(str, int)),
        client.reader("s", hold=0),
    ):
        owner = (await owners(client))["reader"]
        assert owner is not None
        assert re.fullmatch(r"[A-Za-z0-9._:/-]{1,64}", owner)
