"""What a type checker knows of what is read; `test_types.py` has mypy check it. Nothing of it runs."""

from typing import Any, assert_type

import aiopersist as ap


async def reads(client: ap.Client) -> None:
    schema = ap.Schema(key=str, val=int)
    assert_type(schema, ap.Schema[str, int, int])
    async with client.reader("s", schema) as r, r.snapshot() as s, r.listen() as listen:
        assert_type(await s.rows(), list[tuple[str, int, int]])
        assert_type(await s.rows(columns=["key"]), list[tuple[Any, ...]])
        async for row in s:
            assert_type(row, tuple[str, int, int])
        async for step in listen.steps():
            for update in step.updates:
                assert_type(update.key, str)
                assert_type(update.val, int)
                update.key + 1  # type: ignore[operator]
