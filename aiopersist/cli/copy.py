"""`aiopersist copy`: backups of shards in another location, and the way back."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from aiopersist.cli.command import CannotBegin, Invocation, Problems
from aiopersist.cli.each import chosen, each, indexed_names
from aiopersist.cli.names import All, SomeShards
from aiopersist.cli.progress import drawn
from aiopersist.cli.shown import counted, shown_frontier
from aiopersist.client.client import Client
from aiopersist.client.open import open as open_client


async def copy(
    run: Invocation,
    shards: SomeShards = None,
    to_location: Annotated[
        str | None, typer.Option(help="A directory, or s3://bucket/prefix; made if it is not there.")
    ] = None,
    to_blob: Annotated[str | None, typer.Option(help="URL of a blob store; with --to-consensus.")] = None,
    to_consensus: Annotated[
        str | None, typer.Option(help="URL of a consensus store; with --to-blob.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", help="The name of the copy of one shard; else its own.")
    ] = None,
    all_: All = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read both, and compare.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Make the copy a shard of its own, for a restored one.")
    ] = False,
) -> None:
    """Copy shards or tables with their history to another location; repeated, bring what is new."""
    if (to_location is None) is (to_blob is None) or (to_blob is None) is not (to_consensus is None):
        raise CannotBegin("say where to: --to-location DIR, or --to-blob URL and --to-consensus URL")
    async with run.writing() as client:
        names = await chosen(client, shards, all_)
        if name is not None and (all_ or len(names) > 1):
            raise CannotBegin("--as names one copy: name one shard")
        async with open_client(to_location, blob=to_blob, consensus=to_consensus, maintenance=False) as other:
            copying = _Copying(client, other, name, verify, detach)
            if all_ or len(names) > 1:
                if all_ and (streams := await indexed_names(client)):
                    run.say(f"left out, since an Indexed cannot be copied: {', '.join(map(repr, streams))}")
                await each(run, names, copying.copied, copying.told, "copying", all_=all_)
            else:
                shard = names[0]  # what it fails with is the message of the command
                result = {"shard": shard, **await drawn(run.err, copying.copied(shard))}
                run.tell(result, f"{shard}: {copying.told(result)}")
    if copying.differing:
        raise Problems("; ".join(copying.differing))


@dataclass(eq=False)
class _Copying:
    """Copies of shards of `client`, and what is said of them."""

    client: Client
    other: Client
    name: str | None
    verify: bool
    detach: bool
    differing: list[str] = field(default_factory=list)
    """The copies that were not found the same."""
    uppers: dict[str, str] = field(default_factory=dict)

    async def copied(self, shard: str) -> dict[str, Any]:
        """Copy it."""
        copied = await self.client.admin.copy_shard(
            shard, self.other, name=self.name, verify=self.verify, detach=self.detach
        )
        self.uppers[shard] = shown_frontier(copied.upper, (await self.client.admin.inspect(shard)).clock)
        if copied.differing:
            times = ", ".join(map(str, copied.differing))
            self.differing.append(f"{shard} and its copy differ at {times}")
        return {**copied._asdict(), "since": copied.since.elements, "upper": copied.upper.elements}

    def told(self, result: dict[str, Any]) -> str:
        """What a line says of it."""
        text = f"{counted(result['updates'], 'update')} copied, up to {self.uppers[result['shard']]}"
        if self.verify:
            compared = len(result["compared"])
            same = compared - len(result["differing"])
            text += f"; the same at {same} of {counted(compared, 'time')}"
        return text
