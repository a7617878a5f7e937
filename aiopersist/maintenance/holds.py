"""The holders of a shard's history, old versions and blobs, and the end of a hold."""

from collections.abc import Set
from typing import Literal

from pydantic import BaseModel

from aiopersist.base.frontier import Antichain
from aiopersist.maintenance.inspect import ShardView, lease_end, signer
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.state.command import Command
from aiopersist.state.model import State
from aiopersist.state.reading import ExpireReader, named_reader
from aiopersist.state.retention import ReleaseCritical, first_kept
from aiopersist.state.subscriptions import DropSubscription

HoldKind = Literal["reader", "named", "critical", "subscription", "tag"]


class Holder(BaseModel, frozen=True):
    """A holder of history, of old versions with their data, or of the contents at one time."""

    kind: HoldKind
    """A leased reader, a named hold, a critical since, a subscription, or a tag."""
    id: str
    """The reader's id, or the name of the others; `name[i/n]` for a share."""
    owner: str | None
    """Its client and process, `name/host:pid`, if known."""
    since: Antichain | None
    """It keeps history from here on, a tag only the contents at this time; `None`: it keeps old versions."""
    until: float | None
    """When it expires, or its lease ends unless renewed, in Unix seconds of the consensus store's clock.
    `None`: it stays until somebody ends it."""

    def is_named(self, name: str) -> bool:
        """Whether `name` means it: its id, or `kind:id`. One name may mean all shares."""
        ids = {self.id, self.id.partition("@")[0]} if self.kind == "reader" else {self.id}
        if self.kind == "subscription":
            ids.add(_without_share(self.id))
        return name in ids or name in {f"{self.kind}:{each}" for each in ids}


def holders_of_history(view: ShardView, target: Antichain) -> list[Holder]:
    """The holds that keep since before `target`, the furthest behind first."""
    return [
        Holder(kind=hold.kind, id=hold.id, owner=hold.owner, since=hold.since, until=hold.until)
        for hold in view.holds
        if hold.kind != "retention" and not target <= hold.since
    ]


def holders_of_versions(view: ShardView, seqno: int) -> list[Holder]:
    """The readers that keep a version before `seqno` and its data, the oldest first."""
    held = [(r.seqno_hold, reader, r) for reader, r in view.readers.items() if r.seqno_hold is not None]
    return [
        Holder(kind="reader", id=reader, owner=signer(reader), since=None, until=lease_end(lease))
        for oldest, reader, lease in sorted(held, key=lambda each: each[0])
        if oldest < seqno
    ]


def holders_of_blobs(state: State, blobs: Set[str]) -> list[Holder]:
    """The tags that keep some of these blobs."""
    return [
        Holder(kind="tag", id=name, owner=None, since=tag.as_of, until=tag.expires_at)
        for name, tag in state.tags.items()
        if not tag.keys.isdisjoint(blobs)
    ]


def held_back(view: ShardView) -> list[Holder]:
    """The holds that keep since before the target of the policy; none without a policy."""
    target = _target(view)
    return [] if target is None else holders_of_history(view, target)


def _target(view: ShardView) -> Antichain | None:
    policy, upper = view.retention, view.upper.elements
    if policy is None or len(upper) != 1 or not isinstance(upper[0], int) or not upper[0]:
        return None
    first = first_kept(policy, upper[0], view.now, is_wall=view.clock == "wall")
    return policy.hold if first is None else Antichain(first)


def _without_share(id: str) -> str:
    name, bracket, share = id.rpartition("[")
    return name if bracket and share.endswith("]") else id


async def end_hold(shard: Shard, view: ShardView, kind: str, id: str) -> None:
    """End the hold that `view` shows. `OpaqueMismatch` if another owner has since taken over or ended a named
    hold or a critical since. One commit."""
    await commit(shard.register, _ending(view, kind, id))


def _ending(view: ShardView, kind: str, id: str) -> Command:
    if kind == "critical":
        return ReleaseCritical(id, view.critical[id].opaque)
    if kind == "subscription":
        return DropSubscription(_without_share(id))
    reader = named_reader(id) if kind == "named" else id
    return ExpireReader(reader, view.readers[reader].owner)
