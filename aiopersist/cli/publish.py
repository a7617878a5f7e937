"""`aiopersist publish` and `unpublish`: shards as Iceberg tables, once or again and again."""

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Self

import typer

from aiopersist.cli.cat import AsOf
from aiopersist.cli.command import CannotBegin, Invocation
from aiopersist.cli.names import ShardName
from aiopersist.cli.progress import drawn
from aiopersist.cli.shown import counted, shown_bytes
from aiopersist.cli.when import as_of_option, complete_times, duration_of
from aiopersist.client.client import Client
from aiopersist.iceberg.publish import Published

KEEP = 3  # versions, as `Client.publish` keeps by default


async def publish(
    run: Invocation,
    shard: ShardName,
    as_of: AsOf = None,
    keep: Annotated[int, typer.Option(min=1, help="Versions that stay readable.")] = KEEP,
) -> None:
    """Publish a shard or table as an Iceberg table, which other engines read, without a copy of its data."""
    time = as_of_option(as_of)
    async with run.writing() as client:
        with complete_times(shard, time):
            published = await drawn(run.err, client.publish(shard, as_of=time, keep=keep))
    _tell(run, published)


async def unpublish(run: Invocation, shard: ShardName) -> None:
    """End the publication of a shard or table: delete the files of its Iceberg table, and no part."""
    async with run.writing() as client:
        files = await client.unpublish(shard)
    text = f"deleted {counted(files, 'file')}" if files else "was not published"
    run.tell({"shard": shard, "files": files}, f"{shard}: {text}")


def _tell(run: Invocation, published: Published) -> None:
    rows, files = counted(published.rows, "row"), counted(published.data_files, "file")
    written = f"{shown_bytes(published.bytes_written)} written" if published.bytes_written else "nothing new"
    text = f"{published.shard}: version {published.version} has {rows} in {files}, {written}"
    run.tell_one(published._asdict(), f"{text}\n  {published.metadata}")


@dataclass(eq=False)
class RepeatedPublications:
    """Publications that `aiopersist maintain` repeats."""

    every_s: dict[str, float]
    """By the name of a shard."""
    _due: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, options: list[str] | None) -> Self:
        """Those of the options `--publish SHARD=EVERY`."""
        every_s = {}
        for option in options or ():
            shard, _, every = option.rpartition("=")
            duration = duration_of(every)
            if not shard or duration is None or not duration:
                raise CannotBegin(f"--publish {option!r}: say which shard and how often: stock=10min")
            every_s[shard] = duration.total_seconds()
        return cls(every_s)

    async def publish_due(self, client: Client, run: Invocation) -> list[str]:
        """Publish the shards whose time has come. Returns those that could not be published."""
        now, failed = asyncio.get_running_loop().time(), list[str]()
        for shard, every_s in self.every_s.items():
            if now < self._due.get(shard, now):
                continue
            self._due[shard] = now + every_s
            try:
                published = await client.publish(shard)
            except Exception as error:  # the others are published; this one the next time
                reason = f"{type(error).__name__}: {error}"
                failed.append(shard)
                result = {"done": "publication", "shard": shard, "error": reason}
                run.tell_one(result, f"{shard} could not be published: {reason}")
            else:
                if published.bytes_written:
                    _tell(run, published)
        return failed
