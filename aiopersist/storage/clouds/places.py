"""Which URL is which place of which store.

    az://container/prefix?account=&account_key=&sas_token=&endpoint=
    gs://bucket/prefix?service_account=&bearer_token=&endpoint=

What no option gives, the driver takes from the environment, and then from the machine that it runs on. The
driver repeats no request: what is refused may have happened, and the layers above know what that means.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore

from aiopersist.base.errors import InvalidLocation
from aiopersist.storage.address import Address

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

CONNECT_TIMEOUT = timedelta(seconds=10)
READ_TIMEOUT = timedelta(seconds=60)  # without a byte
TIMEOUT = timedelta(minutes=10)
IDLE_TIMEOUT = timedelta(seconds=15)  # less than servers keep a connection
NO_RETRIES: "RetryConfig" = {"max_retries": 0}


class CloudPlace(NamedTuple):
    """A place in a store."""

    scheme: str
    store: Any
    """The driver's store, with the prefix."""
    shown: str
    """The URL without options."""
    uri: str
    """The place for other programs."""
    server: str
    """The URL of the server, which tells its clock."""
    product: str
    deletes: int
    """Names that one request deletes."""

    @property
    def takes_any_list(self) -> bool:
        """Whether the driver takes every document for a list: one for people becomes a list of nothing."""
        return self.scheme != "az"

    @property
    def has_generations(self) -> bool:
        """Whether the store's answer to each put has a number."""
        return self.scheme == "gs"


class _Cloud(NamedTuple):
    product: str
    store: Any
    names: Mapping[str, str]
    """By option, the name that the driver gives it."""
    deletes: int
    server: Callable[[Mapping[str, Any]], str]
    """The URL of the server without the option `endpoint`, given the driver's options."""


_CLOUDS = {
    "az": _Cloud(
        "Azure",
        AzureStore,
        {"account": "account_name", "account_key": "account_key", "sas_token": "sas_key"},
        256,
        lambda config: f"https://{config.get('account_name')}.blob.core.windows.net",
    ),
    "gs": _Cloud(
        "Google Cloud Storage",
        GCSStore,
        {"service_account": "service_account", "bearer_token": "bearer_token"},
        1,
        lambda config: "https://storage.googleapis.com",
    ),
}
_ENDPOINT = {"gs": "base_url"}
_LAKE = ".dfs.core.windows.net"  # the hosts that readers of tables ask for the same blobs


def options_of(scheme: str) -> frozenset[str]:
    """The options that a URL of this scheme may have."""
    return frozenset({"endpoint", *_CLOUDS[scheme].names})


def place_of(address: Address) -> CloudPlace:
    """The place at an address. No request. `InvalidLocation` if the driver cannot use it."""
    scheme, options = address.scheme, address.options
    cloud = _CLOUDS[scheme]
    address.check_bucket("container" if scheme == "az" else "bucket")
    endpoint = options.get("endpoint")
    config = {cloud.names[name]: value for name, value in options.items() if name in cloud.names}
    if endpoint is not None:
        config[_ENDPOINT.get(scheme, "endpoint")] = endpoint
    prefix = address.path.strip("/")
    store = _store(scheme, cloud, address.host, prefix, config)
    settings = {**store.config, **config}
    names = ("endpoint", "aws_endpoint_url_s3", "base_url")
    named = endpoint or next(filter(None, map(settings.get, names)), None)
    server = str(named or cloud.server(settings)).rstrip("/")
    shown = f"{scheme}://{address.host}/{prefix + '/' if prefix else ''}"
    uri = (
        shown if scheme == "gs" else f"abfss://{address.host}@{settings.get('account_name')}{_LAKE}/{prefix}"
    )
    return CloudPlace(scheme, store, shown, uri.rstrip("/"), server, cloud.product, cloud.deletes)


def _store(scheme: str, cloud: _Cloud, bucket: str, prefix: str, config: Mapping[str, str]) -> Any:
    client: ClientConfig = {
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": READ_TIMEOUT,
        "timeout": TIMEOUT,
        "pool_idle_timeout": IDLE_TIMEOUT,
        "allow_http": any(value.startswith("http://") for value in config.values()),
    }
    try:
        return cloud.store(
            bucket, prefix=prefix or None, config=config, client_options=client, retry_config=NO_RETRIES
        )
    except (BaseError, ValueError) as error:  # its text may show a secret
        why = _why(str(error))
        raise InvalidLocation(f"{scheme}: obstore cannot use this URL{why}") from None


def _why(text: str) -> str:
    reasons = {
        "Account must be specified": "give the option 'account', or AZURE_STORAGE_ACCOUNT_NAME",
        "Invalid Access Key": "the account key is not in base64",
        "service account file": "the file of the service account cannot be read",
        "parse path": "the prefix has an empty or a relative part",
    }
    return next((f": {why}" for mark, why in reasons.items() if mark in text), "")
