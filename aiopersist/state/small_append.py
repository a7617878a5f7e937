"""The version that a small append makes, in one step.

Most versions of a busy shard are alike: a registered writer appends one inline part at the upper. The
general way makes such a version of a command, a diff, the state after it, the bytes of the diff, and the
diff that these bytes say. Here it takes a third of the time: the state and the bytes are made side by side.

- `None` wherever a rule bears that is not looked at here: the general way (`AppendHollow`) decides then, and
  has the refusals.
- What is made is what the general way makes: `tests/state/test_small_append.py` makes both, of the states of
  random lives.
- The general way reads the bytes back before they are sent, since a command may hold a value that JSON cannot
  say. Here each value is a text, an int or a float; a float that is not finite is left to the general way.
"""

from base64 import urlsafe_b64encode
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

from pydantic_core import to_json

from aiopersist.frontier import Antichain
from aiopersist.state.command import Commit, Context, Keep, are_leases_in_order
from aiopersist.state.diff import latest_rollup
from aiopersist.state.model import FORMAT_OF_MOST, Clock, HollowBatch, Level, State
from aiopersist.state.record import HollowPart
from aiopersist.state.seal import with_seal
from aiopersist.state.spine import Spine, changed_levels, dropped_levels
from aiopersist.state.writing import AppendHollow, token_is_there


class Version(NamedTuple):
    """A version that is ready to be written."""

    after: State
    commit: str
    data: bytes


@dataclass(slots=True, eq=False)
class SmallAppend:
    """Append one inline part with updates in `[lower, upper)`, at a shard's int times."""

    writer: str
    token: str
    part: HollowPart
    lower: Antichain
    upper: Antichain
    inline_bytes_max: int

    @property
    def in_general(self) -> AppendHollow:
        """The command that it stands for."""
        batch = HollowBatch.of(
            lower=self.lower, upper=self.upper, since=_MINIMUM, parts=(self.part,), runs=()
        )
        return AppendHollow(self.writer, self.token, batch, {}, self.inline_bytes_max)

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        return self.in_general(state, context)

    def happened(self, state: State) -> bool | None:
        return token_is_there(state, self.writer, self.token)

    def version(self, state: State | None, now: float, token: str) -> Version | None:
        """The version after `state`, with a commit id that begins with `token`; see the header."""
        if state is None or not self._is_plain(state, now):
            return None
        seqno, part = state.seqno + 1, self.part
        spine = Spine.of(state.levels, state.fuel)
        spine.insert(seqno, part.rows)
        levels, gone = changed_levels(state, spine)["levels"], list(dropped_levels(state, spine))
        data = self._bytes(state, seqno, now, token, _spine(levels, spine.fuel, gone))
        if data is None:
            return None
        commit, data = with_seal(data, token, state.shard)
        record = state.writers[self.writer].replace(heartbeat=now, token=self.token, upper=self.upper)
        batch = HollowBatch.of(lower=self.lower, upper=self.upper, since=_MINIMUM, parts=(part,), runs=())
        after = state.replace(
            seqno=seqno,
            commit=commit,
            at=now,
            upper=self.upper,
            writers={**state.writers, self.writer: record},
            batches={**state.batches, seqno: batch},
            levels={at: level for at, level in (state.levels | levels).items() if at in spine.levels},
            fuel=spine.fuel,
            inline_bytes=state.inline_bytes + part.size,
        )
        return Version(after, commit, data)

    def _is_plain(self, state: State, now: float) -> bool:
        """Whether no rule bears on it but those that are kept here."""
        return (
            self.lower == state.upper
            and self.lower < self.upper
            and self.writer in state.writers
            and state.clock is Clock.LOGICAL
            and not (state.finalized or state.subscriptions or state.streams)
            and bool(state.levels or not state.batches)
            and state.inline_bytes + self.part.size < self.inline_bytes_max
            and are_leases_in_order(state, now, self.writer)
        )

    def _bytes(
        self, state: State, seqno: int, now: float, commit: str, spine: dict[str, Any]
    ) -> bytes | None:
        """The diff as JSON, with these changes of the spine; `None` if JSON cannot say it."""
        upper, named = list(self.upper.elements), latest_rollup(state.rollups)
        lease_s = state.writers[self.writer].lease_s
        if not (isfinite(now) and isfinite(lease_s)):
            return None
        writer = {"heartbeat": now, "lease_s": lease_s, "token": self.token, "upper": upper}
        diff = {
            "format": FORMAT_OF_MOST,
            "seqno": seqno,
            "commit": commit,
            "prev": state.commit,
            "at": now,
            "rollup": named and {"seqno": named.seqno, "key": named.key, "checksum": named.checksum},
            "changes": {
                "upper": upper,
                "writers": {self.writer: writer},
                "batches": {str(seqno): self._batch()},
                **spine,
            },
        }
        return to_json(diff)

    def _batch(self) -> dict[str, Any]:
        """The batch as JSON."""
        part = self.part
        assert part.inline is not None
        inline = {
            "inline": urlsafe_b64encode(part.inline).decode(),
            "size": part.size,
            "rows": part.rows,
            "checksum": part.checksum,
            "schema_id": part.schema_id,
        }
        lower, upper, since = (list(f.elements) for f in (self.lower, self.upper, _MINIMUM))
        return {"lower": lower, "upper": upper, "since": since, "parts": [inline], "runs": []}


_MINIMUM = Antichain(0)


def _spine(levels: dict[int, Level], fuel: int, gone: list[int]) -> dict[str, Any]:
    """The changes of the spine as JSON."""
    changes: dict[str, Any] = {
        "levels": {str(at): _level(level) for at, level in levels.items()},
        "fuel": fuel,
    }
    return changes | {"drop": {"levels": gone}} if gone else changes


def _level(level: Level) -> dict[str, Any]:
    found: dict[str, Any] = {
        "batches": [{"first": b.first, "last": b.last, "len": b.len} for b in level.batches]
    }
    if level.due is not None:
        found["due"] = level.due
    return found
