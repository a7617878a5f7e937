"""The HTTP status of each error, and its text for clients.

`ROWS` is the only table. A body is a problem of RFC 9457, with `detail` where clients of FastAPI expect it.
Texts are fixed, since messages of errors may name keys of other users and the places of stores. Only errors
about a refused value keep their message, since the client sent the value. All other errors are bugs or
matters for operators: they propagate, and the server logs them and answers 500.
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
    """The problem as the client gets it."""

    status: HTTPStatus
    detail: str
    error: str = ""
    """The name of the error's class."""

    def body(self) -> dict[str, Any]:
        """The body by RFC 9457; `error` is an extension."""
        body = {"type": "about:blank", "title": self.status.phrase, "status": int(self.status)}
        return {**body, "detail": self.detail, **({"error": self.error} if self.error else {})}


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """A row of the table."""

    status: HTTPStatus
    detail: str | None = None
    """`None`: the message of the error."""


_FAULT = ProblemRow(HTTPStatus.INTERNAL_SERVER_ERROR)
NOT_READY = Problem(HTTPStatus.SERVICE_UNAVAILABLE, "the stores do not answer: try again later")

ROWS: Mapping[type[Error], ProblemRow] = {
    errors.UnknownShard: ProblemRow(HTTPStatus.NOT_FOUND, "no such shard"),
    errors.UnknownTag: ProblemRow(HTTPStatus.NOT_FOUND, "no such tag"),
    errors.TagExists: ProblemRow(HTTPStatus.CONFLICT, "there is a tag of that name: nothing was changed"),
    errors.KeyExists: ProblemRow(HTTPStatus.CONFLICT, "the key already has a value: nothing was changed"),
    errors.Conflict: ProblemRow(HTTPStatus.CONFLICT, "other changes came first: nothing was changed"),
    errors.UpperMismatch: ProblemRow(HTTPStatus.CONFLICT, "another append came first: nothing was changed"),
    errors.SchemaMismatch: ProblemRow(HTTPStatus.CONFLICT, "the schema has changed"),
    errors.OpaqueMismatch: ProblemRow(HTTPStatus.CONFLICT, "another owner has taken over"),
    errors.AlreadyAppended: ProblemRow(HTTPStatus.CONFLICT, "it was already appended"),
    errors.BatchExpired: ProblemRow(HTTPStatus.CONFLICT, "it took too long: nothing was changed"),
    errors.SinceViolation: ProblemRow(HTTPStatus.GONE, "the history of that time is gone"),
    errors.LeaseExpired: ProblemRow(HTTPStatus.GONE, "the data read is no longer held: start again"),
    errors.SubscriptionExpired: ProblemRow(HTTPStatus.GONE, "the subscription lost its position"),
    errors.ShardFinalized: ProblemRow(HTTPStatus.GONE, "it was dropped"),
    errors.InvalidUpdate: ProblemRow(HTTPStatus.UNPROCESSABLE_ENTITY),
    errors.InvalidUsage: ProblemRow(HTTPStatus.UNPROCESSABLE_ENTITY),
    errors.NotReadable: ProblemRow(HTTPStatus.TOO_EARLY, "that time is not complete yet"),
    errors.StorageUnavailable: ProblemRow(
        HTTPStatus.SERVICE_UNAVAILABLE, "the store does not answer: nothing was changed; try again"
    ),
    errors.Indeterminate: ProblemRow(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "the outcome is unknown: try again with the same idempotency key",
    ),
    errors.CodecMismatch: _FAULT,
    errors.IncompatibleSchema: _FAULT,
    errors.InvalidLocation: _FAULT,
    errors.Unsupported: _FAULT,
    errors.Corruption: _FAULT,
    errors.MissingPart: _FAULT,
    errors.DiffOverflow: _FAULT,
    errors.NegativeMultiplicity: _FAULT,
    errors.Error: _FAULT,
}

# Kinds of errors about values of a request. All other kinds are bugs of the program.
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
    """The row of the error's class, or of its nearest base class."""
    if isinstance(error, InvalidUsage) and error.kind not in OF_CLIENTS:
        return _FAULT
    return next(ROWS[cls] for cls in type(error).__mro__ if cls in ROWS)


def problem_of(error: Error) -> Problem | None:
    """The problem for the client; `None` if the error is not for clients."""
    row = row_of(error)
    if row.status is HTTPStatus.INTERNAL_SERVER_ERROR:
        return None
    detail = Exception.__str__(error)[:DETAIL_CHARS_MAX] if row.detail is None else row.detail
    return Problem(row.status, detail, type(error).__name__)


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """The response with the problem."""
    return JSONResponse(problem.body(), problem.status, headers, media_type=MEDIA_TYPE)


def add_exception_handlers(app: Starlette, *, retry_after_s: int = RETRY_AFTER_S) -> None:
    """Answer uncaught errors of aiopersist with a status that tells the client what to do: 404, 409, 410,
    422, 425, or 503 with `Retry-After`. The body is a problem of RFC 9457 (`application/problem+json`) with
    `status`, `title`, `detail`, and `error`, the name of the error's class. It names no location, key or
    secret; with 422 it says what is wrong with the value.

    Bugs of the program and damaged data propagate: the server logs them and answers 500. The application's
    own handlers for classes of errors take precedence."""

    async def answer(request: Any, error: Exception) -> Response:
        problem = problem_of(error) if isinstance(error, Error) and isinstance(request, Request) else None
        if problem is None:
            raise error
        unavailable = problem.status is HTTPStatus.SERVICE_UNAVAILABLE
        return problem_response(problem, {"Retry-After": str(retry_after_s)} if unavailable else None)

    app.add_exception_handler(Error, answer)
