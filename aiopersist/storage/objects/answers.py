"""What the refusals of an object store mean, by the status of HTTP and the code in the body. S3 and
Google share their codes; Azure has its own."""

from aiopersist.errors import Indeterminate, StorageUnavailable

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
}  # fmt: skip


def is_lasting(code: str) -> bool:
    """Whether waiting does not help."""
    return code in _LASTING


def refusal(text: str, status: int, code: str, *, writing: bool) -> Exception:
    """The error of this library for a refusal: `StorageUnavailable` for what surely was not carried out, or
    only read, else `Indeterminate`."""
    if code in _LASTING or status in (401, 403, 507):
        return StorageUnavailable(text, retry=False)
    if code in _PASSING or status in (408, 429, 503):
        return StorageUnavailable(text)
    if status >= 500 and writing:
        return Indeterminate(text)
    return StorageUnavailable(text, retry=status >= 500 or status < 300)
