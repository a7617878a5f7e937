"""The clock of a server, as the header `Date` of its answers tells it.

The driver shows no headers. So the server is asked by a request of its own, without credentials and without a
name of an object: every answer has the header, a refusal as well. An answer that is not the store's own tells
another clock: it has neither the id of a request nor what a store writes. It costs one request, in a worker
thread, and takes the proxy of the environment as the driver does.
"""

from email.message import Message
from http.client import HTTPException
from typing import IO
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from anyio import to_thread

from aiopersist.base.errors import StorageUnavailable
from aiopersist.storage.objects.answers import code_in, has_request_id, is_result

TIMEOUT_S = 10.0
BODY_BYTES = 64 * 1024
LISTS = "/?comp=list"  # of Azure: a request that each store understands, and refuses as its own


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
        try:
            answer = build_opener(_Stays).open(Request(url + LISTS), timeout=TIMEOUT_S)
        except HTTPError as refused:
            answer = refused
        with answer:
            body = answer.read(BODY_BYTES).decode(errors="replace")
    except (OSError, HTTPException) as error:
        raise StorageUnavailable(f"{scheme}: clock: {type(error).__name__}") from error
    headers = {name.lower(): value for name, value in answer.headers.items()}
    if not (has_request_id(headers) or code_in(body) or is_result(body)):
        raise StorageUnavailable(f"{scheme}: clock: the answer, {answer.status}, is not the store's")
    date = headers.get("date")
    if not date:
        raise StorageUnavailable(f"{scheme}: clock: the answers have no Date", retry=False)
    return str(date)
