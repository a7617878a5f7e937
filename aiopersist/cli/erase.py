"""`aiopersist erase`: removes rows from everywhere in the stores."""

from typing import Annotated, Any

import typer

from aiopersist.cli.cat import Where, condition_of
from aiopersist.cli.command import CannotBegin, Invocation, Problems, Yes
from aiopersist.cli.holds import held_json, held_lines
from aiopersist.cli.names import ShardName
from aiopersist.cli.progress import drawn
from aiopersist.cli.shown import counted, shown_time
from aiopersist.cli.tables import key_of, opened_table
from aiopersist.cli.when import duration_of
from aiopersist.erase.erasure import Erasure
from aiopersist.erase.search import Remnant
from aiopersist.state.model import Clock

SHOWN = 20  # places
PLACES = {
    "version": "version",
    "leftover": "remains of version",
    "part": "part",
    "rollup": "rollup",
    "position": "the position of subscription",
    "publication": "maybe, until it is published again, or no more:",
    "unread": "maybe, since it cannot be read:",
}


async def erase(
    run: Invocation,
    table: ShardName,
    keys: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="A key, as for get; repeatable.")
    ] = None,
    where: Where = None,
    wait: Annotated[str, typer.Option(help="How long to wait for holds to end: 0s, 90s, 30min.")] = "10min",
    end_hold: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A hold, subscription or tag to end if it keeps the rows."),
    ] = None,
    yes: Yes = False,
) -> None:
    """Erase rows of a table from its contents, its history and everything else in its stores."""
    for_at_most = duration_of(wait)
    if for_at_most is None:
        raise CannotBegin(f"--wait {wait!r} is no duration: say 0s, 90s, 30min or 12h")
    if not keys and where is None:
        raise CannotBegin("say which rows: --keys KEY, or --where EXPR")
    async with run.writing() if yes else run.reading() as client:
        handle, schema = await opened_table(client, table)
        chosen_keys = None if not keys else [key_of(text, schema) for text in keys]
        work = client.admin.erase(
            handle,
            chosen_keys,
            condition_of(where, schema),
            wait=for_at_most,
            end_holds=end_hold or (),
            dry_run=not yes,
        )
        erased = await drawn(run.err, work)
        held = held_json(erased.holders, await client.admin.inspect(table))
    result = {"table": table, "dry_run": not yes, **erased.model_dump(mode="json"), "holders": held}
    run.tell(result, f"{table}: {_text_of(erased, held, yes)}")
    if not erased.done:
        hint = "its stores still have such rows" if yes else "nothing was changed: add --yes to erase them"
        raise Problems(f"{table}: {hint}")


def _text_of(erased: Erasure, held: list[dict[str, Any]], yes: bool) -> str:
    rows = counted(erased.deleted if yes else erased.present, "row")
    since = f"since is {shown_time(erased.since.time, Clock.WALL)}"
    if erased.done:
        note = "; the database may keep deleted bytes until a vacuum, and copies keep the rows"
        return f"{rows} deleted; no version, part, rollup or tag has any, {since}{note if yes else ''}"
    lines = [f"{rows} {'deleted' if yes else 'in the contents'}, {since}"]
    if yes and erased.present:
        lines.append(f"{counted(erased.present, 'row')} in the contents: written again after the deletion")
    lines += [f"still in {_place(remnant)}" for remnant in erased.remnants[:SHOWN]]
    if (more := len(erased.remnants) - SHOWN) > 0:
        lines.append(f"and in {more:,} more places; --json names all")
    return "\n  ".join(lines) + held_lines(held)


def _place(remnant: Remnant) -> str:
    rows = f": {counted(remnant.rows, 'row')}" if remnant.rows else ""
    return f"{PLACES[remnant.kind]} {remnant.name}{rows}"
