"""A browser without scripts: requests to the inspector in this process, and what pages say."""

import html
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

import aiopersist as ap
from aiopersist.web import inspector

BASE = "http://localhost/"


@asynccontextmanager
async def pages(client: ap.Client, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Requests to the inspector of that client."""
    transport = httpx.ASGITransport(app=inspector(client, **options))
    async with httpx.AsyncClient(transport=transport, base_url=BASE) as http:
        yield http


def words(page: httpx.Response | str) -> str:
    """The text of a page, without its tags."""
    source = page if isinstance(page, str) else page.text
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", source)).split())


def links(page: httpx.Response) -> list[str]:
    """The addresses that a page leads to."""
    return [html.unescape(found) for found in re.findall(r'href="([^"]*)"', page.text)]
