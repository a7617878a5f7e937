"""Goal: an enrolment that is repeated, and whose first sending arrives after changes were made, leaves the
opener as it is, in each backend. Seed 21547 of the worlds found that it did not: the next change was
`Corruption`."""

import pytest

import aiopersist as ap
from tests.stash.attack import keys, put
from tests.support.internals import session_of


@pytest.mark.parametrize("exclusive", [True, False], ids=["owned", "shared"])
async def test_what_arrives_late_changes_nothing(url: str, exclusive: bool) -> None:
    async with ap.stash.open(url, exclusive=exclusive) as stash:
        session = session_of(stash)
        opener, token = session.writing(), session._token
        c = await stash.collection("c", str, int)
        await put(stash, c, ["before"])
        assert session._token != token
        nonce = opener.fence.nonce if exclusive else None
        assert await session.store.take(opener.id, token, nonce) == opener.fence
        await put(stash, c, ["between"])
        await session.store.enroll(opener.id, token)
        await put(stash, c, ["after"])
        assert await keys(stash, c) == ["after", "before", "between"]
