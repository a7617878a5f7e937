"""The clock of a server, as the header `Date` of its answers tells it.

The driver shows no headers. So the server is asked by a request of its own, without credentials and without a
name of an object: every answer has the header, a refusal as well. It costs one request, in a worker thread,
and takes the proxy of the environment as the driver does.
"""

from email.message import Message
from http.client import HTTPException
from typing import IO
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from anyio import to_thread

from aiopersist.errors import StorageUnavailable

TIMEOUT_S = 10.0


class _Stays(HTTPRedirectHandler):
    """Follows no redirect: another server has another clock."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return


async def date_of(url: str, scheme: str) -> str:
    """The `Date` of the server's answer to a request for `url`."""
    return await to_thread.run_sync(_ask, url, scheme, abandon_on_cancel=True)


def _ask(url: str, scheme: str) -> str:
    try:
        with build_opener(_Stays).open(Request(url, method="HEAD"), timeout=TIMEOUT_S) as answer:
            date = answer.headers["Date"]
    except HTTPError as refused:
        refused.close()
        date = refused.headers["Date"]
    except (OSError, HTTPException) as error:
        raise StorageUnavailable(f"{scheme}: clock: {type(error).__name__}") from error
    if not date:
        raise StorageUnavailable(f"{scheme}: clock: the answers have no Date", retry=False)
    return str(date)
