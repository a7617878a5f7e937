"""Commands for those who run a location: maintenance on demand, retention, the end of shards."""

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
from aiopersist.cli.show import keeper_text, subscription_cells, subscription_table
from aiopersist.cli.shown import counted, plain_table, safe, shown_age, shown_bytes
from aiopersist.cli.when import duration_of
from aiopersist.client.client import Client
from aiopersist.maintenance.holds import held_back
from aiopersist.maintenance.inspect import Keeper, keeper

SWEEP_SHOWN = 20  # keys


async def fsck(run: Invocation, shards: SomeShards = None, all_: All = False) -> None:
    """Read shards from end to end, and report damage. Without names, all of the location."""
    async with run.reading() as client:
        names = await chosen(client, shards, all_ or not shards)
        if not shards:
            taken = set(names)
            streams = await indexed_names(client)
            names += [found if name in taken else name for name, found in streams.items()]
        damaged = set[str]()

        async def work(name: str) -> dict[str, Any]:
            report = await client.admin.fsck(name)
            if not report.ok:
                damaged.add(name)
            return {"ok": report.ok, **report.model_dump(mode="json")}

        def told(result: dict[str, Any]) -> str:
            read = f"{counted(result['updates'], 'update')} in {counted(result['parts'], 'part')}"
            if result["ok"]:
                return f"sound, {read}"
            return "\n  ".join([f"DAMAGED, {read}", *result["problems"]])

        await each(run, names, work, told, "checking", all_=not shards)
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

        def told(result: dict[str, Any]) -> str:
            sizes = zip(result["batches"], result["bytes"], strict=True)
            merged = " -> ".join(f"{counted(n, 'batch')}, {shown_bytes(size)}" for n, size in sizes)
            return f"{merged}{_but(result)}"

        await each(run, await chosen(client, shards, all_), work, told, "compacting", all_=all_)


async def gc(run: Invocation, shards: SomeShards = None, all_: All = False) -> None:
    """Delete the versions and blobs that no reader can reach."""
    async with run.writing() as client:

        async def work(name: str) -> dict[str, Any]:
            done = await client.admin.force_gc(name)
            left = await client.admin.inspect(name)
            kept = keeper(left)
            return {**done._asdict(), "held": left.live_diffs, "kept": kept and kept._asdict()}

        def told(result: dict[str, Any]) -> str:
            done = ", ".join(counted(result[f"{what}s"], what) for what in ("part", "version", "rollup"))
            kept = keeper_text(Keeper(**result["kept"]) if result["kept"] else None)
            return f"deleted {done}; holds {counted(result['held'], 'version')}{kept}"

        await each(run, await chosen(client, shards, all_), work, told, "collecting", all_=all_)


async def sweep(run: Invocation, yes: Yes = False) -> None:
    """Find the blobs that crashed writers left, and with --yes delete them."""
    async with run.writing() if yes else run.reading() as client:
        found = await drawn(run.err, client.admin.sweep_leaked_blobs(dry_run=not yes))
    if run.as_json:
        run.document(found._asdict())
        return
    what = f"{counted(len(found.keys), 'leaked blob')} of {shown_bytes(found.bytes)}"
    run.out.print(
        f"deleted {what}" if found.deleted else f"{what}{'; --yes deletes them' if found.keys else ''}"
    )
    for key in found.keys[:SWEEP_SHOWN]:
        run.out.print(Text(f"  {key}"), soft_wrap=True)
    if (more := len(found.keys) - SWEEP_SHOWN) > 0:
        run.out.print(f"  and {more:,} more; --json names all")


async def usage(run: Invocation) -> None:
    """Show how many bytes the blob store has, and how many of them are needed."""
    async with run.reading() as client:
        found = await drawn(run.err, client.admin.usage())
    if run.as_json:
        run.document(found._asdict())
        return
    table = plain_table("BYTES", "", "", right=("BYTES",))
    table.add_row(shown_bytes(found.total), "total", "all blobs")
    table.add_row(
        shown_bytes(found.referenced), "referenced", "that a held version names; the rest waits for a sweep"
    )
    table.add_row(
        shown_bytes(found.current),
        "current",
        "that the newest versions name; the rest waits for gc, and for readers of old versions",
    )
    table.add_row(shown_bytes(found.live), "live", "parts of the newest versions: the data itself")
    run.out.print(table)


async def retain(
    run: Invocation,
    keep: Annotated[str, typer.Option(help="1000 (times), 12h, 7d, or all; s, min, h, d, w.")],
    shards: SomeShards = None,
    all_: All = False,
) -> None:
    """Say how much history maintenance keeps."""
    policy = kept(keep)
    async with run.writing() as client:

        async def work(name: str) -> dict[str, Any]:
            await client.admin.retain(name, policy)
            view = await client.admin.inspect(name)
            return {"keep": keep, "held_by": held_json(held_back(view), view)}

        def told(result: dict[str, Any]) -> str:
            return f"keeps {keep}{_but(result)}"

        await each(run, await chosen(client, shards, all_), work, told, "retaining", all_=all_)


def _but(result: dict[str, Any]) -> str:
    """Who keeps more history than the policy does."""
    lines = held_lines(result["held_by"])
    return f"; history is held longer:{lines}" if lines else ""


def kept(text: str) -> int | timedelta | None:
    """What `--keep` says."""
    if text == "all":
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    found = duration_of(text)
    if found is None:
        raise CannotBegin(f"--keep {text!r} is none of 1000 (times), 90s, 30min, 12h, 7d, 2w, all")
    return found


async def finalize(run: Invocation, shards: SomeShards = None, all_: All = False, yes: Yes = False) -> None:
    """End shards whose since and upper are empty; their data is deleted. Names stay taken."""
    await _end(run, shards, all_, yes, "finalize")


async def drop(run: Invocation, shards: SomeShards = None, all_: All = False, yes: Yes = False) -> None:
    """Delete shards with all their data, and free their names."""
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

        def told(result: dict[str, Any]) -> str:
            what = f"{counted(result['updates'], 'update')}, {shown_bytes(result['bytes'])}"
            if not yes and not result["allowed"]:
                return f"its since or upper is not empty: finalize would refuse; drop deletes {what}"
            return f"{call} {'deleted' if yes else 'would delete'} {what}"

        names = await chosen(client, shards, all_)
        await each(run, names, work, told, f"{call}: {'' if yes else 'looking'}", all_=all_)
    if not yes and names:
        run.say(f"nothing was changed: say --yes to {call} {counted(len(names), 'shard')}")


def _bytes(view: Any) -> int:
    return int(view.blob_bytes + view.inline_bytes)


async def subscriptions(run: Invocation, shard: AnyShard = None) -> None:
    """Show the consumers of a shard, or of all: where they stand, how far behind, what is kept for them."""
    async with run.reading() as client:
        found = [s for s in await client.admin.overview() if s.subscriptions] if shard is None else []
        views = [(s.name, await client.admin.inspect(s.shard_id)) for s in found]
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
    """Drop a subscription: its position is lost, and nothing is kept for it any more."""
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
        run.say("nothing was changed: say --yes to forget it")


async def _shares(client: Client, shard: str, name: str) -> list[str]:
    there = await client.admin.subscriptions(shard)
    found = [
        known for known in there if known == name or re.fullmatch(rf"{re.escape(name)}\[\d+/\d+\]", known)
    ]
    if not found:
        others = ", ".join(map(repr, there)) or "none"
        holds = (await client.admin.inspect(shard)).holds
        is_hold = any(hold.kind in ("named", "critical") and hold.id == name for hold in holds)
        hint = "; it is a hold: aiopersist release ends it" if is_hold else ""
        raise Problems(f"{shard!r} has no subscription {name!r}; it has {others}{hint}")
    return found
