"""A real browser, and a server of the inspector that it visits.

The server runs in a thread with an event loop of its own, as the tests of a browser are no coroutines.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, Request, sync_playwright

import aiopersist as ap
from aiopersist.web.serve import application, bound

T = TypeVar("T")

NAMES = ("chromium", "chromium-browser", "google-chrome")
REQUIRED = os.environ.get("AIOPERSIST_TEST_REQUIRE_BROWSER") == "1"
WAIT_MS = 30_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """The Chromium of this machine; skips the tests if there is none, unless one is required."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        if REQUIRED:
            pytest.fail(
                "AIOPERSIST_TEST_REQUIRE_BROWSER=1, and there is no Chromium: apt-get install chromium"
            )
        pytest.skip("there is no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Served:
    """An inspector of a location in memory, at `address`."""

    def __init__(self, *, write: bool = False) -> None:
        self._ready = threading.Event()
        self._write = write
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="inspector")

    def __enter__(self) -> "Served":
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop of the server."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _serve(self) -> None:
        async with ap.open("mem://", maintenance=False) as client:
            with bound("127.0.0.1", 0) as listening:
                self.client = client
                self._loop = asyncio.get_running_loop()
                self.address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
                app = application(client, "127.0.0.1", None, write=self._write)
                config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
                self._server = uvicorn.Server(config)
                self._ready.set()
                await self._server.serve([listening])


@dataclass
class Visitor:
    """A window of the browser, and what went wrong in it."""

    page: Page
    address: str
    elsewhere: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", self._requested)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("dialog", self._asked)
        self.page.set_default_timeout(WAIT_MS)

    def open(self, where: str) -> Page:
        """The page at a relative address."""
        self.page.goto(self.address + where)
        return self.page

    def _requested(self, request: Request) -> None:
        if not request.url.startswith((self.address, "data:", "about:")):
            self.elsewhere.append(request.url)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning") and "status of 4" not in message.text:
            self.faults.append(f"{message.type}: {message.text}")

    def _asked(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()


@contextmanager
def visiting(browser: Browser, address: str, **options: Any) -> Iterator[Visitor]:
    """A fresh window. At its end nothing has gone wrong in it, and it has asked no other host."""
    context = browser.new_context(**options)
    visitor = Visitor(context.new_page(), address)
    yield visitor
    context.close()
    assert visitor.elsewhere == []
    assert visitor.faults == []
