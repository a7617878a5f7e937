"""Goal: a cursor that no feed gave is refused as what it is, however well it is made."""

import aiopersist as ap
from aiopersist.read.cursor import text_of, values_of
from tests.support.shards import refused
from tests.table.test_feed import enter

BEHIND, WITHIN = ["shard", "frontier", "as_of", "snapshot", "seqno", "commit"], ["shard", "as_of", "key"]
WITHIN += ["is_key_done", "past", "rows", "schema_id", "chosen"]
HUGE, ODD = 2**70, [float("inf"), float("nan"), 2**70, -1, 1.5, True, "x", [1], {"x": 1}, [[1, 2]], []]
MADE_UP = [
    *(({"seqno": value}, BEHIND) for value in (*ODD, None)),
    *(
        ({"frontier": value}, BEHIND)
        for value in ([1.5], [True], [None], 3, {"a": 1}, [[1, 2]], [HUGE], [-1])
    ),
    *(({"as_of": value, "snapshot": 1}, BEHIND) for value in (*ODD, None)),
    *(({"as_of": value}, BEHIND) for value in (*ODD, HUGE)),
    *(({"snapshot": value}, BEHIND) for value in (2, True, None, "1", [1])),
    *(({"commit": value}, BEHIND) for value in ({"x": 1}, None, 7, "", "0" * 41, "é")),
    *(({"version": value}, BEHIND) for value in (1.0, True, 2)),
    *(({"key": value}, WITHIN) for value in ("x", "[1]", "NaN", "1e999", "", "1,2", "{}", 7, "[" * 9999)),
    *(({name: value}, WITHIN) for name in ("as_of", "past", "rows") for value in (*ODD, None)),
    *(({"is_key_done": value}, WITHIN) for value in (0, 1, "true", None)),
    *(({"schema_id": value}, WITHIN) for value in ("0", 0.0, True)),
    *(({"chosen": value}, WITHIN) for value in (None, 1, {"x": 1})),
    *(({"version": value}, WITHIN) for value in (3.0, True, 1)),
]


async def test_made_up_cursors_are_refused(quiet: ap.Client) -> None:
    """Goal: cursors have no secret, so anybody can make one whose checksum is right. One that no feed gives
    is `INVALID_CURSOR`: no assertion, no alarm; and no subscription keeps it as its position."""
    table = quiet.table("t", int, int)
    await table.put(1, 1)
    async with table.changes() as feed:
        within = feed.cursor
        behind = (await anext(feed)).cursor
    for changed, names in MADE_UP:
        form, good = ("contents.", within) if names is WITHIN else ("", behind)
        values = dict(zip(["version", *names], values_of(good.removeprefix(form)), strict=True)) | changed
        bad = form + text_of([*values.values()])
        for opening in (table.changes(cursor=bad), table.subscription("sub", resume=bad)):
            assert await refused(enter(opening)) is ap.UsageKind.INVALID_CURSOR, changed
    assert not await quiet.subscriptions("t")
