"""How the driver sends a request: once, to the server that was named.

Its HTTP client would send a request again whose connection ends without an answer, also a put; and the second
answer says nothing about what the first copy has done. It would follow redirects as well, with the data, and
take the answer of whoever is there for the store's.
"""

from typing import Any

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession

from aiopersist.storage.objects.answers import ForeignAnswer, has_request_id


class OnceSession(AIOHTTPSession):  # type: ignore[misc]  # the driver has no types
    """See the header."""

    async def _get_session(self, proxy_url: str | None) -> "_SendsOnce":
        return _SendsOnce(await super()._get_session(proxy_url))


class _SendsOnce:
    """An HTTP client that sends each request once."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        session._retry_connection = False
        self._session = session

    async def request(self, method: str, **options: Any) -> aiohttp.ClientResponse:
        """The answer. `ForeignAnswer` for a redirect that is not of a store: the driver looks for the region
        of a bucket where a store redirects, and sends the request again."""
        answer = await self._session.request(method, allow_redirects=False, **options)
        headers = {name.lower(): value for name, value in answer.headers.items()}
        if 300 <= answer.status < 400 and not has_request_id(headers):
            answer.close()
            raise ForeignAnswer(f"a redirect: {answer.status}")
        return answer
