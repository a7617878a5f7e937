"""Looks at many keys: one list passes the folders of several.

The folders are sorted. A list begins at the first one; where a page ends within a long folder, the next one
begins at its floors, and after them at the next folder that is wanted. So each folder is passed as by a list
of its own: its newest version first, its floors after all its versions. A page that passes a folder or two
costs more than a list of that folder alone: then the others are left to their own lists.
"""

from collections.abc import Sequence
from os.path import commonprefix
from typing import NamedTuple

from aiopersist.storage.objects.bucket import Bucket, Tagged
from aiopersist.storage.objects.names import FLOORS, VERSIONS

TOGETHER_MIN = 4  # keys; fewer are looked at one by one
TOGETHER_MAX = 128  # folders of one chain of lists: several chains go on at once
PAGE = 1000  # names in an answer
WORTH = 3  # folders that a page must pass


class Passed(NamedTuple):
    """What lists have shown of a folder."""

    newest: Tagged | None
    """The newest version."""
    behind: list[Tagged]
    """Floors and wishes, all of them."""


async def passed(bucket: Bucket, folders: Sequence[str]) -> dict[str, Passed]:
    """What lists show of these folders, which are sorted; some may be missing."""
    remaining, by_folder = iter(folders), dict[str, list[Tagged]]()
    complete = dict[str, Passed]()
    prefix = commonprefix([folders[0], folders[-1]])  # noqa: RUF071  # of names, which are no paths
    current: str | None = next(remaining)
    after = current or ""
    while current is not None:
        page = await bucket.find(prefix, after=after, limit=PAGE)
        for listed in page:
            by_folder.setdefault(listed.name.partition("/")[0] + "/", []).append(listed)
        ends_in = page[-1].name.partition("/")[0] + "/" if len(page) == PAGE else None
        before = len(complete)
        while current is not None and (ends_in is None or current < ends_in):
            complete[current] = _passed(current, by_folder.pop(current, []))
            current = next(remaining, None)
        if current is None or len(complete) - before < WORTH:
            break
        after = max(page[-1].name, current + FLOORS) if current == ends_in else current
        by_folder = {current: by_folder.get(current, [])}
    return complete


def _passed(folder: str, listed: list[Tagged]) -> Passed:
    newest = next((each for each in listed if each.name.startswith(folder + VERSIONS)), None)
    return Passed(newest, [each for each in listed if each.name.startswith(folder + FLOORS)])
