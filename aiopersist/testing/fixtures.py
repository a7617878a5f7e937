"""Async fixtures in test classes to inherit from, in either mode of pytest-asyncio."""

from inspect import isasyncgenfunction, unwrap
from typing import Any

import pytest_asyncio


class TakesHandles:
    """A subclass defines the fixture `handles` as an async generator, by `@pytest.fixture` or
    `@pytest_asyncio.fixture`. Strict mode runs only the latter, so the former is marked as one."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        fixture: Any = vars(cls).get("handles")
        function = None if fixture is None else unwrap(fixture)
        if isasyncgenfunction(function) and not hasattr(function, "_loop_scope"):  # the mark of the latter
            pytest_asyncio.fixture(function)
