"""The meaning of the errors of S3 and its driver.

A request that surely was not carried out, or that only read, is `StorageUnavailable`; a write whose answer is
lost, or is not the store's own (`objects/answers.py`), is `Indeterminate`. A text holds the place, the
operation and the server's code, never its message.
"""

from collections.abc import Mapping
from typing import Any

import aiohttp
from botocore import exceptions as driver

from aiopersist.base.errors import Error, Indeterminate, StorageUnavailable
from aiopersist.storage.objects import answers

_MISSING = "NoSuchKey"
_THERE = "PreconditionFailed"
_BEYOND_THE_END = "InvalidRange"
_NO_CREDENTIALS = (
    driver.NoCredentialsError,
    driver.PartialCredentialsError,
    driver.NoRegionError,
    driver.ParamValidationError,
    driver.ProfileNotFound,
)


def code(error: BaseException) -> str:
    """The server's code, or an empty text; the driver gives the status where the body has none."""
    if isinstance(error, driver.ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return ""


def is_missing(error: BaseException) -> bool:
    return code(error) == _MISSING


def is_there(error: BaseException) -> bool:
    """Whether a put was refused, because the blob is there."""
    return code(error) == _THERE


def is_beyond_the_end(error: BaseException) -> bool:
    return code(error) == _BEYOND_THE_END


def is_damaged(error: BaseException) -> bool:
    """Whether the checksum or the length of a body differs from the one that the server announced."""
    if isinstance(error, driver.FlexibleChecksumError | driver.ChecksumError | driver.IncompleteReadError):
        return True
    return any(isinstance(e, aiohttp.ClientPayloadError) for e in _causes(error))


def check_own(answer: Mapping[str, Any], member: str, *, is_empty: bool = False) -> None:
    """`ForeignAnswer` unless a success looks like the store's own: that member, no body if `is_empty`."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    if member not in answer or (is_empty and headers.get("content-length", "0") != "0"):
        raise answers.ForeignAnswer


def mapped(error: Exception, place: str, op: str, *, writing: bool) -> Exception:
    """The error of this library for an error of the driver at that bucket."""
    if isinstance(error, Error):
        return error
    if isinstance(error, driver.ClientError):
        return _of_server(error, place, op, writing)
    text = f"{place}: {op}: {type(error).__name__}"
    if isinstance(error, _NO_CREDENTIALS):
        return StorageUnavailable(text, retry=False)
    if not writing or _was_not_sent(error):
        return StorageUnavailable(text)
    return Indeterminate(text)


def of_code(name: str, place: str, op: str) -> Exception:
    """The error of this library for the code that the server gave for one of several keys."""
    return StorageUnavailable(f"{place}: {op}: {name}", retry=not answers.is_lasting(name))


def _of_server(error: driver.ClientError, place: str, op: str, writing: bool) -> Exception:
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    name = code(error) if answers.is_code(code(error)) else ""
    return answers.refusal(f"{place}: {op}: {status} {name}", status, name, writing=writing)


def _was_not_sent(error: Exception) -> bool:
    if isinstance(error, driver.ConnectTimeoutError):
        return True
    return any(isinstance(e, aiohttp.ClientConnectorError) for e in _causes(error))


def _causes(error: BaseException) -> list[BaseException]:
    """The error and its causes; the driver keeps some causes in an attribute."""
    causes: list[BaseException] = []
    rest: list[object] = [error]
    while rest:
        e = rest.pop()
        if isinstance(e, BaseException) and e not in causes:
            causes.append(e)
            rest += [e.__cause__, e.__context__, getattr(e, "kwargs", {}).get("error")]
    return causes
