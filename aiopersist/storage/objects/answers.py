"""Which answers are the store's own, and what its refusals mean.

Whatever stands between this process and the store may answer in its place: a proxy, a gateway, a load
balancer, the login page of a network. It may do so after the store has carried out the request. So the status
of an answer alone says nothing about a write. The store's own refusals have its *code*, in a whole body:

    <?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>...</Error>

S3 and Google share their codes; Azure has its own.
"""

import re
from collections.abc import Mapping

from aiopersist.base.errors import Indeterminate, StorageUnavailable

_START = r"\ufeff?\s*(?:<\?xml[^>]*>\s*)?"
_ERROR = re.compile(rf"{_START}<Error\b[^>]*>.*?<Code>(\w+)</Code>.*</Error>\s*", re.DOTALL)
_RESULT = re.compile(rf"{_START}<(?:List\w*Result|EnumerationResults)\b")
_REQUEST_IDS = ("x-amz-request-id", "x-amz-id-2", "x-ms-request-id", "x-guploader-uploadid")

# Waiting does not help.
_LASTING = {
    "AccessDenied", "AllAccessDisabled", "AuthorizationHeaderMalformed", "ExpiredToken",
    "InsufficientStorage", "InvalidAccessKeyId", "InvalidToken", "NoSuchBucket", "PermanentRedirect",
    "QuotaExceeded", "SignatureDoesNotMatch", "XAdminUserNotFound", "XMinioStorageFull",
    "AccountIsDisabled", "AuthenticationFailed", "AuthorizationFailure", "ContainerNotFound",
    "InvalidAuthenticationInfo", "NoAuthenticationInformation",
}  # fmt: skip
# Refused for the moment, and surely not carried out.
_PASSING = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "OperationAborted", "RequestTimeout",
    "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests",
    "XAmzContentChecksumMismatch",
    "ContainerBeingDeleted", "Md5Mismatch", "ServerBusy",
    "ExistingObjectIsDirectory",  # versitygw, whose folder another request has just removed
}  # fmt: skip


class ForeignAnswer(Exception):
    """An answer that is not the store's own."""


def is_lasting(code: str) -> bool:
    """Whether waiting does not help."""
    return code in _LASTING


def is_code(text: str) -> bool:
    """Whether it is a code of a store: drivers give the status where the body has none."""
    return bool(text) and not text.isdecimal()


def code_in(body: str) -> str:
    """The code of the store in the body of an answer; empty if the body is not the store's, or not whole."""
    match = _ERROR.fullmatch(body)
    return match[1] if match else ""


def has_request_id(headers: Mapping[str, str]) -> bool:
    """Whether the answer has the id that stores give a request. The names in `headers` are in lower case."""
    return any(headers.get(name) for name in _REQUEST_IDS)


def is_result(body: str) -> bool:
    """Whether it begins as a list that a store shows."""
    return _RESULT.match(body) is not None


def is_page(media_type: str | None) -> bool:
    """Whether an answer is a page for people: no object of this library is one."""
    return (media_type or "").lower().startswith("text/html")


def tag_of(etag: str | None) -> str:
    """The tag of an object, which is the same in every answer: some have it in quotes, and a proxy that
    compresses calls it weak."""
    return (etag or "").removeprefix("W/").strip('"')


def refusal(text: str, status: int, code: str, *, writing: bool) -> Exception:
    """The error of this library for a refusal with that code: `StorageUnavailable` for what surely was not
    carried out, or only read, else `Indeterminate`."""
    if code in _LASTING:
        return StorageUnavailable(text, retry=False)
    if code in _PASSING:
        return StorageUnavailable(text)
    if writing and (status >= 500 or not is_code(code)):
        return Indeterminate(text)
    return StorageUnavailable(text, retry=status >= 500 or not is_code(code))
