"""`aiopersist copy`: backups of shards in another location, and their restore."""

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
        str | None, typer.Option(help="A directory or a bucket (s3://, az://, gs://); created if missing.")
    ] = None,
    to_blob: Annotated[str | None, typer.Option(help="URL of a blob store; needs --to-consensus.")] = None,
    to_consensus: Annotated[
        str | None, typer.Option(help="URL of a consensus store; needs --to-blob.")
    ] = None,
    name: Annotated[str | None, typer.Option("--as", help="The name of the copy, for one shard.")] = None,
    all_: All = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read and compare both.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Make the copy independent, to restore a shard.")
    ] = False,
) -> None:
    """Copy shards or tables with their history to another location; run again, copy what is new."""
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
                await each(run, names, copying.copied, copying.text_of, "copying", all_=all_)
            else:
                shard = names[0]  # its error becomes the message of the command
                result = {"shard": shard, **await drawn(run.err, copying.copied(shard))}
                run.tell(result, f"{shard}: {copying.text_of(result)}")
    if copying.differing:
        raise Problems("; ".join(copying.differing))


@dataclass(eq=False)
class _Copying:
    """Copies of shards of `client`, and the texts of results."""

    client: Client
    other: Client
    name: str | None
    verify: bool
    detach: bool
    differing: list[str] = field(default_factory=list)
    """Messages about copies that differ."""
    uppers: dict[str, str] = field(default_factory=dict)

    async def copied(self, shard: str) -> dict[str, Any]:
        """Copy a shard."""
        copied = await self.client.admin.copy_shard(
            shard, self.other, name=self.name, verify=self.verify, detach=self.detach
        )
        self.uppers[shard] = shown_frontier(copied.upper, (await self.client.admin.inspect(shard)).clock)
        if copied.differing:
            times = ", ".join(map(str, copied.differing))
            self.differing.append(f"{shard} and its copy differ at {times}")
        return {**copied._asdict(), "since": copied.since.elements, "upper": copied.upper.elements}

    def text_of(self, result: dict[str, Any]) -> str:
        """The text of a result."""
        text = f"{counted(result['updates'], 'update')} copied, up to {self.uppers[result['shard']]}"
        if self.verify:
            compared = len(result["compared"])
            same = compared - len(result["differing"])
            text += f"; equal at {same} of {counted(compared, 'time')}"
        return text
