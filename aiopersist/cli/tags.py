"""`aiopersist tag`, `tags` and `untag`: contents that stay, whatever becomes of the history."""

from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from aiopersist.base.errors import UnknownTag
from aiopersist.cli.cat import AsOf
from aiopersist.cli.command import CannotBegin, Invocation, Yes
from aiopersist.cli.names import AnyShard, ShardName
from aiopersist.cli.shown import counted, plain_table, safe, shown_age, shown_bytes, shown_time
from aiopersist.cli.when import as_of_option, complete_times, duration_of
from aiopersist.maintenance.inspect import ShardView
from aiopersist.maintenance.tags import TagView
from aiopersist.web.words import expiry_text

TagName = Annotated[str, typer.Argument(metavar="NAME", help="The name of the tag.")]


async def tag(
    run: Invocation,
    shard: ShardName,
    name: TagName,
    as_of: AsOf = None,
    expires: Annotated[
        str | None, typer.Option(help="Drop it after 12h, 30d or 8w; by default never.")
    ] = None,
) -> None:
    """Keep the contents as of a time under a name, whatever becomes of the history."""
    time, lasts = as_of_option(as_of), _expires_option(expires)
    async with run.writing() as client:
        with complete_times(shard, time):
            added = await client.tag(shard, name, time, expires=lasts)
        view = await client.admin.inspect(shard)
    result = {"shard": shard, "tag": name, **added.model_dump(mode="json")}
    run.tell(result, f"{safe(shard)}: tag {safe(name)} keeps {_contents(added, view)}")


def _expires_option(text: str | None) -> timedelta | None:
    """The duration in the text of `--expires`."""
    duration = None if text is None else duration_of(text)
    if text is not None and not duration:
        raise CannotBegin(f"--expires {text!r} is no duration: say 90s, 30min, 12h, 30d or 8w")
    return duration


async def tags(run: Invocation, shard: AnyShard = None) -> None:
    """Show the tags of a shard, or of all: time, age, expiry, and the bytes of their parts."""
    async with run.reading() as client:
        if shard is None:
            names = {line.name: line.shard_id for line in await client.admin.overview() if line.tags}
        else:
            names = {shard: shard}
        views = {name: await client.admin.inspect(shard_id) for name, shard_id in names.items()}
    if run.as_json:
        dumped = {
            name: {key: row.model_dump(mode="json") for key, row in view.tags.items()}
            for name, view in views.items()
        }
        run.document(dumped if shard is None else dumped[shard])
        return
    table = tag_table("  SHARD")
    for name, view in views.items():
        for key, row in view.tags.items():
            table.add_row(Text("  ") + safe(name), *tag_cells(key, row, view))
    run.out.print(table if table.row_count else "no tags")


async def untag(run: Invocation, shard: ShardName, name: TagName, yes: Yes = False) -> None:
    """Drop a tag: its contents are lost, unless the history still has them."""
    async with run.writing() if yes else run.reading() as client:
        view = await client.admin.inspect(shard)
        if name not in view.tags:
            raise _unknown(shard, name, view)
        if yes:
            await client.untag(shard, name)
    row, does = view.tags[name], "is dropped: it kept" if yes else "would be dropped: it keeps"
    result = {"done": yes, "shard": shard, "tag": name, **row.model_dump(mode="json")}
    run.tell(result, f"{safe(shard)}: tag {safe(name)} {does} {_contents(row, view)}")
    if not yes:
        run.say("nothing was changed: add --yes to drop it")


def _unknown(shard: str, name: str, view: ShardView) -> UnknownTag:
    """With the label that the errors of `client.untag` have."""
    error = UnknownTag(name, shard_id=view.shard_id)
    error.label = f"shard {shard!r}"
    return error


def _contents(row: TagView, view: ShardView) -> str:
    parts = f"{counted(row.parts, 'part')} of {shown_bytes(row.blob_bytes)}"
    return f"the contents at {shown_time(row.as_of, view.clock)}, {parts}"


def tag_table(*before: str) -> Table:
    """A table of tags, with `before` as its first columns."""
    columns = (*before, "  NAME", "AS OF", "ADDED", "EXPIRES", "PARTS", "BYTES")
    return plain_table(*columns, right=("PARTS", "BYTES"))


def tag_cells(name: str, row: TagView, view: ShardView) -> list[Any]:
    """A tag as cells of that table."""
    return [
        Text("  ") + safe(name),
        shown_time(row.as_of, view.clock),
        f"{shown_age(view.now - row.added_at)} ago",
        expiry_text(row.expires_at, view.now),
        f"{row.parts:,}",
        shown_bytes(row.blob_bytes),
    ]
