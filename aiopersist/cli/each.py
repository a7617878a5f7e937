"""Runs a command for several shards, one after the other, and reports failures."""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from rich.text import Text

from aiopersist.base.errors import Error, ShardFinalized, StorageUnavailable, UnknownShard
from aiopersist.cli.command import CannotBegin, Invocation, Problems
from aiopersist.cli.progress import bar, drawn_in
from aiopersist.cli.shown import safe
from aiopersist.client.client import Client
from aiopersist.shard import catalog
from aiopersist.shard.catalog import IndexedId


async def chosen(client: Client, shards: list[str] | None, all_: bool) -> list[str]:
    """The shards that the user named, or all of the location."""
    if bool(shards) is all_:
        raise CannotBegin(
            "name shards, or use --all" if all_ is False else "name shards or use --all, not both"
        )
    return list(await client.list_shards()) if all_ else list(dict.fromkeys(shards or ()))


async def indexed_names(client: Client) -> dict[str, IndexedId]:
    """The ids of all `Indexed` of the location by name; a shard may have the same name."""
    return await catalog.names(client._stack, IndexedId)


async def each(
    run: Invocation,
    names: Iterable[str],
    work: Callable[[str], Coroutine[Any, Any, dict[str, Any]]],
    text_of: Callable[[dict[str, Any]], str],
    doing: str,
    *,
    all_: bool,
) -> None:
    """Do `work` for each shard, and write its result as a line, in JSON or by `text_of`. After a failure it
    continues with the next shard, and raises `Problems` at the end. A store that does not answer stops it.
    `all_`: the user named no shards, so a shard that has ended is no failure."""
    named, failures = list(names), 0
    with bar(run.err) as progress:
        # on one terminal, the bar and the lines must come from one console
        out = run.err if run.out.is_terminal and run.err.is_terminal else run.out
        task = progress.add_task(doing, total=len(named))
        for name in named:
            try:
                result = {"shard": name, **await drawn_in(progress, work(name), name)}
            except StorageUnavailable:
                raise
            except Error as error:
                if all_ and isinstance(error, ShardFinalized | UnknownShard):
                    result = {"shard": name, "ended": True}
                else:
                    failures += 1
                    result = {"shard": name, "error": f"{type(error).__name__}: {error}"}
            if run.as_json:
                run.line(result)
            else:
                text = "has ended: nothing to do" if "ended" in result else result.get("error")
                text = text or text_of(result)
                out.print(safe(name) + Text(f": {text}"), soft_wrap=True)
            progress.advance(task)
    if failures:
        raise Problems(f"{failures} of {len(named)} shards failed")
