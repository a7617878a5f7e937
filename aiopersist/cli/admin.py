"""Commands for operators: maintenance on demand, retention, dropping shards and subscriptions."""

import re
from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.text import Text

from aiopersist.cli.command import CannotBegin, Invocation, Problems, Yes
from aiopersist.cli.each import chosen, each, indexed_names
from aiopersist.cli.holds import held_json, held_lines
from aiopersist.cli.names import All, AnyShard, ShardName, SomeShards
from aiopersist.cli.progress import drawn
from aiopersist.cli.show import subscription_cells, subscription_table
from aiopersist.cli.shown import counted, plain_table, safe, shown_age, shown_bytes
from aiopersist.cli.when import duration_of
from aiopersist.client.client import Client
from aiopersist.maintenance.holds import held_back
from aiopersist.maintenance.inspect import Keeper, keeper
from aiopersist.web.holds import keeper_text

SWEEP_SHOWN = 20  # keys


async def fsck(run: Invocation, shards: SomeShards = None, all_: All = False) -> None:
    """Read shards completely and report damage; without names, the whole location."""
    async with run.reading() as client:
        names = await chosen(client, shards, all_ or not shards)
        if not shards:
            shard_names = set(names)
            streams = await indexed_names(client)
            names += [indexed_id if name in shard_names else name for name, indexed_id in streams.items()]
        damaged = set[str]()

        async def work(name: str) -> dict[str, Any]:
            report = await client.admin.fsck(name)
            if not report.ok:
                damaged.add(name)
            return {"ok": report.ok, **report.model_dump(mode="json")}

        def text_of(result: dict[str, Any]) -> str:
            read = f"{counted(result['updates'], 'update')} in {counted(result['parts'], 'part')}"
            if result["ok"]:
                return f"sound, {read}"
            return "\n  ".join([f"DAMAGED, {read}", *result["problems"]])

        await each(run, names, work, text_of, "checking", all_=not shards)
    if damaged:
        raise Problems(f"{len(damaged)} of {len(names)} shards are damaged")


async def compact(run: Invocation, shards: SomeShards = None, all_: All = False) -> None:
    """Merge each shard into one batch, in bounded memory."""
    async with run.writing() as client:

        async def work(name: str) -> dict[str, Any]:
            before = await client.admin.inspect(name)
            await client.admin.force_compaction(name)
            after = await client.admin.inspect(name)
            return {
                "batches": [len(before.batches), len(after.batches)],
                "bytes": [_bytes(before), _bytes(after)],
                "held_by": held_json(held_back(after), after),
            }

        def text_of(result: dict[str, Any]) -> str:
            sizes = zip(result["batches"], result["bytes"], strict=True)
            merged = " -> ".join(f"{counted(n, 'batch')}, {shown_bytes(size)}" for n, size in sizes)
            return f"{merged}{_but(result)}"

        await each(run, await chosen(client, shards, all_), work, text_of, "compacting", all_=all_)


async def gc(run: Invocation, shards: SomeShards = None, all_: All = False) -> None:
    """Delete versions and blobs that no reader needs."""
    async with run.writing() as client:

        async def work(name: str) -> dict[str, Any]:
            done = await client.admin.force_gc(name)
            view = await client.admin.inspect(name)
            kept = keeper(view)
            return {**done._asdict(), "held": view.live_diffs, "kept": kept and kept._asdict()}

        def text_of(result: dict[str, Any]) -> str:
            done = ", ".join(counted(result[f"{what}s"], what) for what in ("part", "version", "rollup"))
            kept = keeper_text(Keeper(**result["kept"]) if result["kept"] else None, "; ")
            return f"deleted {done}; holds {counted(result['held'], 'version')}{kept}"

        await each(run, await chosen(client, shards, all_), work, text_of, "collecting", all_=all_)


async def sweep(run: Invocation, yes: Yes = False) -> None:
    """Find blobs that crashed writers left behind; with --yes, delete them."""
    async with run.writing() if yes else run.reading() as client:
        leaked = await drawn(run.err, client.admin.sweep_leaked_blobs(dry_run=not yes))
    if run.as_json:
        run.document(leaked._asdict())
        return
    what = f"{counted(len(leaked.keys), 'leaked blob')} of {shown_bytes(leaked.bytes)}"
    run.out.print(
        f"deleted {what}" if leaked.deleted else f"{what}{'; --yes deletes them' if leaked.keys else ''}"
    )
    for key in leaked.keys[:SWEEP_SHOWN]:
        run.out.print(Text(f"  {key}"), soft_wrap=True)
    if (more := len(leaked.keys) - SWEEP_SHOWN) > 0:
        run.out.print(f"  and {more:,} more; --json names all")


async def usage(run: Invocation) -> None:
    """Show how many bytes the blob store has and how many are needed."""
    async with run.reading() as client:
        sizes = await drawn(run.err, client.admin.usage())
    if run.as_json:
        run.document(sizes._asdict())
        return
    table = plain_table("BYTES", "", "", right=("BYTES",))
    table.add_row(shown_bytes(sizes.total), "total", "all blobs")
    table.add_row(
        shown_bytes(sizes.referenced), "referenced", "named by a held version; the rest waits for a sweep"
    )
    table.add_row(
        shown_bytes(sizes.current),
        "current",
        "named by the newest versions; the rest waits for gc and for readers of old versions",
    )
    table.add_row(shown_bytes(sizes.tagged), "tagged", "of these, kept by tags alone")
    table.add_row(shown_bytes(sizes.live), "live", "parts of the newest versions: the data")
    run.out.print(table)


async def retain(
    run: Invocation,
    keep: Annotated[str, typer.Option(help="1000 (times), 12h, 7d or all. Units: s, min, h, d, w.")],
    shards: SomeShards = None,
    all_: All = False,
) -> None:
    """Set how much history maintenance keeps."""
    policy = policy_of(keep)
    async with run.writing() as client:

        async def work(name: str) -> dict[str, Any]:
            await client.admin.retain(name, policy)
            view = await client.admin.inspect(name)
            return {"keep": keep, "held_by": held_json(held_back(view), view)}

        def text_of(result: dict[str, Any]) -> str:
            return f"keeps {keep}{_but(result)}"

        await each(run, await chosen(client, shards, all_), work, text_of, "retaining", all_=all_)


def _but(result: dict[str, Any]) -> str:
    """Who keeps more history than the policy."""
    lines = held_lines(result["held_by"])
    return f"; history is held longer:{lines}" if lines else ""


def policy_of(text: str) -> int | timedelta | None:
    """The policy in the text of `--keep`."""
    if text == "all":
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    duration = duration_of(text)
    if duration is None:
        raise CannotBegin(f"--keep {text!r} is no policy: say 1000 (times), 90s, 30min, 12h, 7d, 2w or all")
    return duration


async def finalize(run: Invocation, shards: SomeShards = None, all_: All = False, yes: Yes = False) -> None:
    """End shards with an empty since and upper: delete their data, but keep their names reserved."""
    await _end(run, shards, all_, yes, "finalize")


async def drop(run: Invocation, shards: SomeShards = None, all_: All = False, yes: Yes = False) -> None:
    """Delete shards with all data and free their names."""
    await _end(run, shards, all_, yes, "drop")


async def _end(run: Invocation, shards: list[str] | None, all_: bool, yes: bool, call: str) -> None:
    async with run.writing() if yes else run.reading() as client:

        async def work(name: str) -> dict[str, Any]:
            view = await client.admin.inspect(name)
            if yes:
                await getattr(client, call)(name)
            updates = sum(batch.len for batch in view.batches)
            updates += sum(stream.updates for stream in (view.streams or {}).values())
            allowed = call == "drop" or not (view.since.elements or view.upper.elements)
            return {"done": yes, "updates": updates, "bytes": _bytes(view), "allowed": allowed}

        def text_of(result: dict[str, Any]) -> str:
            what = f"{counted(result['updates'], 'update')}, {shown_bytes(result['bytes'])}"
            if not yes and not result["allowed"]:
                return f"finalize would refuse, since its since or upper is not empty; drop deletes {what}"
            return f"{call} {'deleted' if yes else 'would delete'} {what}"

        names = await chosen(client, shards, all_)
        await each(run, names, work, text_of, f"{call}: {'' if yes else 'looking'}", all_=all_)
    if not yes and names:
        run.say(f"nothing was changed: add --yes to {call} {counted(len(names), 'shard')}")


def _bytes(view: Any) -> int:
    return int(view.blob_bytes + view.inline_bytes)


async def subscriptions(run: Invocation, shard: AnyShard = None) -> None:
    """Show the subscriptions of a shard, or of all: position, lag, and bytes kept for them."""
    async with run.reading() as client:
        shards = [s for s in await client.admin.overview() if s.subscriptions] if shard is None else []
        views = [(s.name, await client.admin.inspect(s.shard_id)) for s in shards]
        if shard is not None:
            views = [(shard, await client.admin.inspect(shard))]
    rows = [(name, view, sub, row) for name, view in views for sub, row in view.subscriptions.items()]
    if run.as_json:
        dumped = {
            name: {sub: row.model_dump(mode="json") for sub, row in view.subscriptions.items()}
            for name, view in views
        }
        run.document(dumped if shard is None else dumped[shard])
        return
    table = subscription_table("  SHARD")
    for name, view, sub, row in rows:
        table.add_row(Text("  ") + safe(name), *subscription_cells(sub, row, view))
    run.out.print(table if rows else "no subscriptions")


async def forget(
    run: Invocation,
    shard: ShardName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the subscription.")],
    yes: Yes = False,
) -> None:
    """Drop a subscription: its position is lost, and no history is kept for it."""
    async with run.writing() if yes else run.reading() as client:
        shares = await _shares(client, shard, name)
        view = await client.admin.inspect(shard)
        if yes:
            await client.admin.drop_subscription(shard, name)
    rows = {share: view.subscriptions[share] for share in shares}
    if run.as_json:
        run.document(
            {"done": yes, "subscriptions": {n: row.model_dump(mode="json") for n, row in rows.items()}}
        )
        return
    for share, row in rows.items():
        last = "never" if row.last_ack is None else f"{shown_age(view.now - row.last_ack)} ago"
        behind, keeps = counted(row.lag_updates, "update"), shown_bytes(row.held_bytes)
        what = f"at most {behind} behind, last ack {last}, keeps {keeps}"
        run.out.print(safe(share), "is forgotten:" if yes else "would be forgotten:", what, soft_wrap=True)
    if not yes:
        run.say("nothing was changed: add --yes to forget it")


async def _shares(client: Client, shard: str, name: str) -> list[str]:
    names = await client.admin.subscriptions(shard)
    matches = [own for own in names if own == name or re.fullmatch(rf"{re.escape(name)}\[\d+/\d+\]", own)]
    if not matches:
        others = ", ".join(map(repr, names)) or "none"
        holds = (await client.admin.inspect(shard)).holds
        is_hold = any(hold.kind in ("named", "critical") and hold.id == name for hold in holds)
        hint = "; this is a hold: aiopersist release ends it" if is_hold else ""
        raise Problems(f"{shard!r} has no subscription {name!r}; it has {others}{hint}")
    return matches
