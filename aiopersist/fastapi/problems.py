"""Which status each error is, and what a client is told of it.

`ROWS` is the only table. A body is a problem of RFC 9457 whose `detail` is where clients of FastAPI look for
it. Texts are fixed: messages of errors name keys that others wrote, and where the stores are. Only a refused
value comes back, in the words of the error, to the client that sent it. What has no row for clients is a bug
or a matter for operators: the error goes on, and the server logs it and answers 500.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from aiopersist.base import errors
from aiopersist.base.errors import Error, InvalidUsage, UsageKind

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 5
DETAIL_CHARS_MAX = 500


@dataclass(frozen=True, slots=True)
class Problem:
    """What a client is told."""

    status: HTTPStatus
    detail: str
    error: str = ""
    """The name of the error's class."""

    def body(self) -> dict[str, Any]:
        """As RFC 9457 writes it; `error` is a member of our own."""
        body = {"type": "about:blank", "title": self.status.phrase, "status": int(self.status)}
        return {**body, "detail": self.detail, **({"error": self.error} if self.error else {})}


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """A row of the table."""

    status: HTTPStatus
    detail: str | None = None
    """`None`: the words of the error."""


_FAULT = ProblemRow(HTTPStatus.INTERNAL_SERVER_ERROR)
NOT_READY = Problem(HTTPStatus.SERVICE_UNAVAILABLE, "the stores do not answer: try again later")

ROWS: Mapping[type[Error], ProblemRow] = {
    errors.UnknownShard: ProblemRow(HTTPStatus.NOT_FOUND, "there is no such shard"),
    errors.KeyExists: ProblemRow(HTTPStatus.CONFLICT, "the key has a val: nothing was changed"),
    errors.Conflict: ProblemRow(HTTPStatus.CONFLICT, "other changes came first: nothing was changed"),
    errors.UpperMismatch: ProblemRow(HTTPStatus.CONFLICT, "another append came first: nothing was changed"),
    errors.SchemaMismatch: ProblemRow(HTTPStatus.CONFLICT, "the schema is another one by now"),
    errors.OpaqueMismatch: ProblemRow(HTTPStatus.CONFLICT, "another owner has taken over"),
    errors.AlreadyAppended: ProblemRow(HTTPStatus.CONFLICT, "it was appended before"),
    errors.BatchExpired: ProblemRow(HTTPStatus.CONFLICT, "it took too long: nothing was changed"),
    errors.SinceViolation: ProblemRow(HTTPStatus.GONE, "the history of that time is gone"),
    errors.LeaseExpired: ProblemRow(HTTPStatus.GONE, "what was read is no longer held: begin anew"),
    errors.SubscriptionExpired: ProblemRow(HTTPStatus.GONE, "the subscription gave up its position"),
    errors.ShardFinalized: ProblemRow(HTTPStatus.GONE, "it was dropped"),
    errors.InvalidUpdate: ProblemRow(HTTPStatus.UNPROCESSABLE_ENTITY),
    errors.InvalidUsage: ProblemRow(HTTPStatus.UNPROCESSABLE_ENTITY),
    errors.NotReadable: ProblemRow(HTTPStatus.TOO_EARLY, "that time is not complete yet"),
    errors.StorageUnavailable: ProblemRow(
        HTTPStatus.SERVICE_UNAVAILABLE, "the store does not answer: nothing was changed; try again"
    ),
    errors.Indeterminate: ProblemRow(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "it is not known whether it happened: try again with the same idempotency key",
    ),
    errors.CodecMismatch: _FAULT,
    errors.IncompatibleSchema: _FAULT,
    errors.InvalidLocation: _FAULT,
    errors.Unsupported: _FAULT,
    errors.Corruption: _FAULT,
    errors.MissingPart: _FAULT,
    errors.DiffOverflow: _FAULT,
    errors.Error: _FAULT,
}

# Values that a request may carry. All other kinds are bugs of the program.
OF_CLIENTS = frozenset(
    {
        UsageKind.INVALID_BOUNDS,
        UsageKind.INVALID_EMPTY_TIME_INTERVAL,
        UsageKind.UPDATE_NOT_BEYOND_LOWER,
        UsageKind.UPDATE_BEYOND_UPPER,
        UsageKind.INVALID_TIME,
        UsageKind.INVALID_NAME,
        UsageKind.INVALID_COLUMN,
        UsageKind.INVALID_CURSOR,
        UsageKind.INVALID_TXN,
        UsageKind.INVALID_SHARE,
    }
)


def row_of(error: Error) -> ProblemRow:
    """The row of an error: that of its class, or of the nearest class above."""
    if isinstance(error, InvalidUsage) and error.kind not in OF_CLIENTS:
        return _FAULT
    return next(ROWS[cls] for cls in type(error).__mro__ if cls in ROWS)


def problem_of(error: Error) -> Problem | None:
    """What a client is told of it; `None` for what is not for clients."""
    row = row_of(error)
    if row.status is HTTPStatus.INTERNAL_SERVER_ERROR:
        return None
    detail = Exception.__str__(error)[:DETAIL_CHARS_MAX] if row.detail is None else row.detail
    return Problem(row.status, detail, type(error).__name__)


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """The response that tells it."""
    return JSONResponse(problem.body(), problem.status, headers, media_type=MEDIA_TYPE)


def add_exception_handlers(app: Starlette, *, retry_after_s: int = RETRY_AFTER_S) -> None:
    """Answer errors of aiopersist that reach the application by the status that says what the client can do:
    404, 409, 410, 422, 425, or 503 with `Retry-After`. The body is a problem of RFC 9457
    (`application/problem+json`) with `status`, `title`, `detail`, and `error`, the name of the error's class.
    It names no location, no key and no secret; with 422 it says what is wrong with the value.

    Errors that are bugs of the program, or damage, go on: the server logs them, and answers 500. A handler of
    the application's own for a class of errors comes before this one."""

    async def answer(request: Any, error: Exception) -> Response:
        problem = problem_of(error) if isinstance(error, Error) and isinstance(request, Request) else None
        if problem is None:
            raise error
        unavailable = problem.status is HTTPStatus.SERVICE_UNAVAILABLE
        return problem_response(problem, {"Retry-After": str(retry_after_s)} if unavailable else None)

    app.add_exception_handler(Error, answer)
