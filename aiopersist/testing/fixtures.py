"""Fixtures that are coroutines, in test classes to inherit from, whichever mode pytest-asyncio is in."""

from inspect import isasyncgenfunction, unwrap
from typing import Any

import pytest_asyncio


class TakesHandles:
    """A subclass gives the fixture `handles` as an async generator, by `@pytest.fixture` or
    `@pytest_asyncio.fixture`: strict mode runs the latter alone, so the former is marked as one."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        given: Any = vars(cls).get("handles")
        function = None if given is None else unwrap(given)
        if isasyncgenfunction(function) and not hasattr(function, "_loop_scope"):  # which the latter sets
            pytest_asyncio.fixture(function)
