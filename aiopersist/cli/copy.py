"""`aiopersist copy`: a backup of a shard in another location, and the way back."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from aiopersist.cli.command import CannotBegin, Invocation, Problems
from aiopersist.cli.names import ShardName
from aiopersist.cli.progress import drawn
from aiopersist.cli.shown import counted, shown_frontier
from aiopersist.opening import open as open_client
from aiopersist.state.model import Clock

if TYPE_CHECKING:
    from aiopersist.backup import Copied


async def copy(
    run: Invocation,
    shard: ShardName,
    to_location: Annotated[
        str | None, typer.Option(help="A directory, or s3://bucket/prefix; made if it is not there.")
    ] = None,
    to_blob: Annotated[str | None, typer.Option(help="URL of a blob store; with --to-consensus.")] = None,
    to_consensus: Annotated[
        str | None, typer.Option(help="URL of a consensus store; with --to-blob.")
    ] = None,
    name: Annotated[str | None, typer.Option("--as", help="The name of the copy; else its own.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read both, and compare.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Make the copy a shard of its own, for a restored one.")
    ] = False,
) -> None:
    """Copy a shard or table with its history to another location; repeated, bring what is new."""
    if (to_location is None) is (to_blob is None) or (to_blob is None) is not (to_consensus is None):
        raise CannotBegin("say where to: --to-location DIR, or --to-blob URL and --to-consensus URL")
    async with (
        run.writing() as client,
        open_client(to_location, blob=to_blob, consensus=to_consensus, maintenance=False) as other,
    ):
        work = client.copy_shard(shard, other, name=name, verify=verify, detach=detach)
        copied = await drawn(run.err, work)
        clock = (await client.inspect(shard)).clock
    _tell(run, shard, copied, verify, clock)
    if copied.differing:
        times = ", ".join(map(str, copied.differing))
        raise Problems(f"{shard} and its copy differ at {times}")


def _tell(run: Invocation, shard: str, copied: "Copied", verify: bool, clock: Clock) -> None:
    if run.as_json:
        frontiers = {"since": copied.since.elements, "upper": copied.upper.elements}
        run.document({"shard": shard, **copied._asdict(), **frontiers})
        return
    text = f"{shard}: {counted(copied.updates, 'update')} copied, up to {shown_frontier(copied.upper, clock)}"
    if verify:
        same = len(copied.compared) - len(copied.differing)
        text += f"; the same at {same} of {counted(len(copied.compared), 'time')}"
    run.out.print(Text(text), soft_wrap=True)
