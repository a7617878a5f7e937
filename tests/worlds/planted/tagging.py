"""Bugs of tags. Worlds have them from `TAGS_FROM` on."""

from typing import Any

import pytest

from aiopersist.gc import rollup, sweep
from aiopersist.maintenance import tags
from aiopersist.state import drops, tagging, trail
from aiopersist.state.names import current_parts
from tests.worlds.everything import TAGS_FROM
from tests.worlds.planted import Bug


def _is_of_a_tag(path: Any) -> bool:
    return not isinstance(path, int) and path[1] == "tag"


def a_collection_that_ignores_tags(patch: pytest.MonkeyPatch) -> None:
    """What compactions have replaced is deleted, though a tag names it."""
    gone = drops._gone

    def replaced(self: Any) -> set[str]:
        live = [keys for path, keys in self._live.items() if not _is_of_a_tag(path)]
        return set(self.parts.difference(*live)) - {key for key in self.parts if key.endswith(".rollup")}

    patch.setattr(drops, "_gone", lambda before, after: gone(before.replace(tags={}), after))
    patch.setattr(trail.Trail, "dropped", property(replaced))


def a_tag_of_what_was_replaced(patch: pytest.MonkeyPatch) -> None:
    """It is added though the newest version has no longer all its parts."""

    class Everything:
        issuperset = staticmethod(lambda keys: True)

    patch.setattr(tagging, "live_parts", lambda state: Everything)


def a_sweep_that_ignores_tags(patch: pytest.MonkeyPatch) -> None:
    """Rollups of tags, and what compactions have replaced, are leaks once their writers have ended."""
    add = trail.Trail.add

    def without(self: Any, *args: Any) -> None:
        add(self, *args)
        named = [keys for path, keys in self._live.items() if _is_of_a_tag(path)]
        self.parts -= set().union(*named)

    patch.setattr(trail.Trail, "add", without)
    patch.setattr(sweep, "live_parts", current_parts)


def a_rollup_that_forgets_tags(patch: pytest.MonkeyPatch) -> None:
    encode = rollup.encode_rollup
    patch.setattr(rollup, "encode_rollup", lambda state: encode(state.replace(tags={})))


def a_tag_without_its_last_batch(patch: pytest.MonkeyPatch) -> None:
    """The updates at its own time are left out."""
    tagged = tags.tagged
    patch.setattr(tags, "tagged", lambda state, as_of: tagged(state, as_of - 1))


BUGS = [
    Bug("tags", plant, "tagger", TAGS_FROM)
    for plant in (
        a_collection_that_ignores_tags,
        a_tag_of_what_was_replaced,
        a_sweep_that_ignores_tags,
        a_rollup_that_forgets_tags,
        a_tag_without_its_last_batch,
    )
]
