"""The meaning of the errors of obstore.

A request that surely was not carried out, or that only read, is `StorageUnavailable`; a write whose answer is
lost, or is not the store's own (`objects/answers.py`), is `Indeterminate`. The driver has few types, and
makes them of the status alone. So the status, the code in the body and the kind of a failed connection are
taken from its text. A text of this library holds these and the place: the driver's has the address of the
request, and whatever the server says.
"""

import re

from obstore import exceptions as driver

from aiopersist.base.errors import Error, Indeterminate, StorageUnavailable
from aiopersist.storage.objects import answers

_STATUS = re.compile(r"non-2xx status code: (\d{3})[^:]*: (.*?)(?:\n\nDebug source:|\Z)", re.DOTALL)
_OF_SEVERAL = re.compile(r"^Debug source|\(code: (\w+)\)", re.MULTILINE)
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_OF_CREDENTIALS = re.compile(r"token request|Error performing \w+ https?://169\.254\.")
_BEYOND_THE_END = re.compile(r"StartTooLarge|bytes 0--1/0")  # also as azurite says it of an empty object
_MISSING = {"NoSuchKey", "BlobNotFound", "ResourceNotFound", "404"}  # the last of one name of several
_THERE = {"BlobAlreadyExists", "ConditionNotMet", "PreconditionFailed"}


def is_missing(error: BaseException) -> bool:
    """Whether the store says that there is no such object; a place that is not there is an error. Azure says
    so by a status of its own for each name of several."""
    if not isinstance(error, driver.BaseError | FileNotFoundError):
        return False
    text = str(error)
    return _code(text) in _MISSING or (not _status(text) and _code(text) == "404")


def is_there(error: BaseException) -> bool:
    """Whether the store refused a creation, because the object is there. The driver also says so of any page,
    and of conflicts that decide nothing, as S3 answers them to creations beside a deletion."""
    if not isinstance(error, driver.AlreadyExistsError | driver.PreconditionError):
        return False
    return _code(str(error)) in _THERE


def is_beyond_the_end(error: BaseException) -> bool:
    """Whether a range begins at the end of the object or beyond."""
    if not isinstance(error, driver.BaseError):
        return False
    text = str(error)
    return _code(text) == "InvalidRange" or _BEYOND_THE_END.search(text) is not None


def mapped(error: Exception, place: str, op: str, *, writing: bool) -> Exception:
    """The error of this library for an error of the driver."""
    if isinstance(error, Error):
        return error
    text = str(error)
    status, code = _status(text), _code(text)
    if _OF_CREDENTIALS.search(text):
        what = f"{place}: {op}: no credentials: {status or _kind(text)}"
        return StorageUnavailable(what, retry=not 400 <= status < 500)
    if status:
        return answers.refusal(f"{place}: {op}: {status} {code}", status, code, writing=writing)
    if code.isdecimal():  # of one name of several
        return answers.refusal(f"{place}: {op}: {code}", int(code), "", writing=writing)
    if code:
        return StorageUnavailable(f"{place}: {op}: {code}", retry=not answers.is_lasting(code))
    kind = _kind(text)
    what = f"{place}: {op}: {kind or type(error).__name__}"
    if isinstance(error, driver.UnauthenticatedError | driver.PermissionDeniedError):
        return StorageUnavailable(what, retry=False)
    return Indeterminate(what) if writing and kind != "Connect" else StorageUnavailable(what)


def _status(text: str) -> int:
    """The status of the answer; 0 if there was none."""
    match = _STATUS.search(text)
    return int(match[1]) if match else 0


def _code(text: str) -> str:
    """The code that the store gave, or an empty text."""
    if answer := _STATUS.search(text):
        return answers.code_in(answer[2])
    match = _OF_SEVERAL.search(text)
    return (match[1] or "") if match else ""


def _kind(text: str) -> str:
    """How a connection failed, in a word of the driver."""
    match = _KIND.search(text)
    return match[1] if match else ""
