"""Commands of copies. A copy is a shard with the copied history of another shard, its *source*.

The *mark* of a copy is a critical reader whose id names the source. It holds the history of the copy, and its
opaque is a digest of the copy's upper. Each append of a copier moves both in its own version. So the opaque
fits the upper only while nobody but copiers has written: no other shard is taken for a copy.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from msgspec import Struct

from aiopersist.base.errors import Error, IncompatibleSchema, InvalidUsage, OpaqueMismatch, UsageKind
from aiopersist.base.frontier import Antichain
from aiopersist.state.command import Commit, Context, Keep, commit, live, meet_of_holds
from aiopersist.state.diff import Changes
from aiopersist.state.model import CriticalReader, Mark, State
from aiopersist.state.writing import AppendHollow


def mark_of(source: str) -> str:
    """The id of the critical reader that marks a copy of the shard `source`."""
    return f"copy of {source}"


def opaque_of(upper: Antichain) -> int:
    """The opaque of the mark of a copy with that upper."""
    return int.from_bytes(sha256(repr(upper).encode()).digest()[:8]) >> 1  # of 63 bits


def is_copy(state: State, source: str) -> bool:
    """Whether the shard is a copy of `source` that only copiers have written."""
    mark = state.critical.get(mark_of(source))
    return mark is not None and mark.opaque == opaque_of(state.upper)


class CreateCopy(Struct, frozen=True):
    """Create a shard as an empty copy of `source` (the state of another shard), unless it exists."""

    shard: str
    source: State
    minimum: Antichain

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is not None:
            return Keep()
        least, source = self.minimum, self.source
        kind = source.kind
        if (policy := source.retention.get(0)) is not None:
            marks = () if source.is_wall or policy.seconds is None else (Mark(at=context.now, upper=least),)
            kind["retention"] = {0: policy.replace(hold=least, marks=marks)}
        mark = CriticalReader(since=least, opaque=opaque_of(least))
        critical = {mark_of(source.shard): mark}
        schemas = dict(source.schemas)
        return Commit(
            Changes(shard=self.shard, since=least, upper=least, schemas=schemas, critical=critical, **kind)
        )


class CopySchemas(Struct, frozen=True):
    """Add the schemas that the source has gained."""

    schemas: Mapping[int, Mapping[str, Any]]

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if any(present != self.schemas.get(number) for number, present in state.schemas.items()):
            return Keep(error=IncompatibleSchema("the schemas of the copy are not those of its source"))
        new = {number: dict(schema) for number, schema in self.schemas.items() if number not in state.schemas}
        return commit(state, context, schemas=new) if new else Keep()


class CopyMark(Struct, frozen=True):
    """What an append changes in a copy: the mark moves forward to `since`. If the updates are correct only
    from `since` on (`is_exact` is false), the shard's since must move, too."""

    reader: str
    since: Antichain
    is_exact: bool

    def refusal(self, state: State) -> Error | None:
        """The error if the shard is no longer the copy that the copier saw."""
        mark, expected = state.critical.get(self.reader), opaque_of(state.upper)
        if mark is not None and mark.opaque == expected:
            return None
        return OpaqueMismatch(expected, mark.opaque if mark else None)

    def moved(self, state: State, upper: Antichain) -> dict[str, Any]:
        """The records of a copy at `upper`: the mark, and the policy, which keeps no more than the source."""
        since = state.critical[self.reader].since.join(self.since)
        policies = {
            at: policy.replace(hold=policy.hold.join(since)) for at, policy in state.retention.items()
        }
        mark = state.critical[self.reader].replace(since=since, opaque=opaque_of(upper))
        return {"critical": {self.reader: mark}, "retention": policies}

    def added(self, state: State, upper: Antichain, done: Commit) -> Commit | Keep:
        """`done` (an append up to `upper`) with the mark moved."""
        changes, records = done.changes, self.moved(state, upper)
        held = {**records, "subscriptions": changes.subscriptions}
        since = state.since.join(meet_of_holds(state, changes.drop.get("readers", ()), held))
        if not self.is_exact and not self.since <= since:
            text = (
                f"a hold keeps the copy's history at {since}, which the source has given up: its since is "
                f"{self.since}. End the hold, then copy again"
            )
            return Keep(error=InvalidUsage(UsageKind.INVALID_COPY, text, since=since))
        if since != state.since:
            records["since"] = since
        return Commit(
            changes.replace(**{name: value for name, value in records.items() if value}), done.result
        )


class MoveCopy(Struct, frozen=True):
    """Move the since of a complete copy, as far as holds allow."""

    mark: CopyMark

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if (refusal := self.mark.refusal(state)) is not None:
            return Keep(error=refusal)
        records = self.mark.moved(state, state.upper)
        if self.happened(state) and records["retention"] == state.retention:
            return Keep()
        return commit(state, context, moved=True, **records)

    def happened(self, state: State) -> bool:
        """The mark never goes back, whichever copier moved it."""
        mark = state.critical.get(self.mark.reader)
        return mark is not None and self.mark.since <= mark.since


class AppendCopied(AppendHollow, frozen=True):
    """An append of a copier; `OpaqueMismatch` if anyone else has written."""

    mark: CopyMark | None = None

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        assert self.mark is not None
        if (refusal := self.mark.refusal(live(state))) is not None:
            return Keep(error=refusal)
        done = AppendHollow.__call__(self, state, context)  # `super()` does not know a class with slots
        return done if isinstance(done, Keep) else self.mark.added(live(state), self.batch.upper, done)
