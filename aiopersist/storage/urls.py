"""Which URL opens which store, and what `ap.open` makes of its arguments.

Nothing here does I/O. The module of a store, and the driver that it needs, is imported when a URL of its
scheme is first opened; if the driver is missing, the error says what to install.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import quote, unquote

from aiopersist.base.errors import InvalidLocation, Unsupported, to_install
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.storage.address import Address, scheme_of, without_secrets
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.readonly import ReadonlyBlob, ReadonlyConsensus

if TYPE_CHECKING:
    from aiopersist.storage.objects.bucket import Bucket

S = TypeVar("S")
POLL = "poll_s"  # an option of consensus on objects
_CACHE, _CACHE_BYTES = "cache", "cache_bytes"  # options of blobs on servers
_CLOUDS = {"az": "azure", "gs": "gcs"}  # by scheme, the extra that it needs
_BUCKETS = ("s3", *_CLOUDS)  # schemes whose stores can be a whole location
_SWITCH = {"on": True, "off": False}
_HINTS = {
    "s3+obstore": "s3+obstore: use s3://, which has the same objects",
    "sqlite": "sqlite: ap.open(DIRECTORY) has its files and its SQLite there; or give blob= as well: "
    "ap.open(blob='file:///...', consensus='sqlite:///...')",
    "file": "file: write the directory as it is, ap.open('/...')",
    **dict.fromkeys(
        ("postgres", "postgresql"),
        "postgres: it keeps the state, and a blob store the data: "
        "ap.open(blob='s3://bucket/prefix', consensus='postgres://...'), or blob='file:///directory'",
    ),
}
"""How to open a location of stores that cannot be one alone."""
_NO_COLON = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)[;.,]?//")
_MEMORY = ":memory:"  # as SQLite writes it
_ALMOST_A_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/?)")  # a single letter is a drive


@dataclass(frozen=True, repr=False)
class Location:
    """Two stores that belong together, each a URL or an instance."""

    blob: str | Blob
    consensus: str | Consensus

    def __repr__(self) -> str:
        return f"Location(blob={_shown(self.blob)}, consensus={_shown(self.consensus)})"


def parse_location(
    location: "str | os.PathLike[str] | Location | None" = None,
    blob: str | Blob | None = None,
    consensus: str | Consensus | None = None,
) -> Location:
    """The location that the arguments name: a directory, `mem://`, a place in a bucket or a `Location`; or
    two stores; or, without arguments, the environment's `AIOPERSIST_LOCATION`, or `AIOPERSIST_BLOB` and
    `AIOPERSIST_CONSENSUS`. Anything else is `InvalidLocation`."""
    if location is None and blob is None and consensus is None:
        return _from_environment()
    if location is not None:
        if blob is not None or consensus is not None:
            raise InvalidLocation("give a location, or blob and consensus, not both")
        return _from_one(location)
    if blob is None or consensus is None:
        raise InvalidLocation(f"{'blob' if blob is None else 'consensus'} is missing: give both stores")
    if not isinstance(blob, str | Blob):
        raise InvalidLocation(f"blob must be a URL or a Blob, not {type(blob).__name__}")
    if not isinstance(consensus, str | Consensus):
        raise InvalidLocation(f"consensus must be a URL or a Consensus, not {type(consensus).__name__}")
    return Location(blob, consensus)


class Stores(NamedTuple):
    """The two opened stores of a location."""

    blob: Blob
    consensus: Consensus
    opened: list[Blob | Consensus]
    """The stores that were opened from URLs: the client closes these."""
    location: Location
    readonly: bool

    @property
    def consensus_url(self) -> str | None:
        """The URL of the consensus store, unless an instance was given."""
        return self.location.consensus if isinstance(self.location.consensus, str) else None

    def guarded(self) -> tuple[Blob, Consensus]:
        """Both stores; for a readonly client they refuse writes."""
        if self.readonly:
            return ReadonlyBlob(self.blob), ReadonlyConsensus(self.consensus)
        return self.blob, self.consensus


def open_stores(location: Location, *, runtime: Runtime, readonly: bool) -> Stores:
    """Open the stores of `location` that are given as URLs. No I/O."""
    opened: list[Blob | Consensus] = []
    blob, consensus = location.blob, location.consensus
    if isinstance(blob, str):
        blob = open_blob(blob, runtime=runtime)
        opened.append(blob)
    if isinstance(consensus, str):
        consensus = open_consensus(consensus, runtime=runtime, readonly=readonly)
        opened.append(consensus)
    return Stores(blob, consensus, opened, location, readonly)


def again(stores: Stores) -> Location:
    """The location of the same stores for another event loop: URLs, and stores in memory, which any loop may
    use. `Unsupported` for other instances."""
    blob = stores.blob if isinstance(stores.blob, MemoryBlob) else stores.location.blob
    is_memory = isinstance(stores.consensus, MemoryConsensus)
    consensus = stores.consensus if is_memory else stores.location.consensus
    for store in (blob, consensus):
        if not isinstance(store, str | MemoryBlob | MemoryConsensus):
            what = f"a {type(store).__name__} that was given as an instance has one event loop"
            raise Unsupported(f"{what}, and a scan reads in another: give a URL, or read with batches()")
    return Location(blob, consensus)


def open_blob(url: str, *, runtime: Runtime = SYSTEM) -> Blob:
    """The blob store at `url`. No I/O; a URL that cannot be used is `InvalidLocation`."""
    return _factory("blob store", _blob_schemes, url)(url, runtime)


def open_consensus(url: str, *, runtime: Runtime = SYSTEM, readonly: bool = False) -> Consensus:
    """The consensus store at `url`. No I/O; a URL that cannot be used is `InvalidLocation`. A `readonly`
    store creates nothing, and needs no right to. A registered scheme ignores `readonly`; the client refuses
    its writes."""
    return _factory("consensus store", _consensus_schemes, url)(url, runtime, readonly)


def register_blob_scheme(scheme: str, factory: Callable[[str], Blob]) -> None:
    """Let `factory(url)` open the blob stores of `scheme`, from now on and in this process. It does no I/O
    and raises `InvalidLocation` for a URL that it cannot use."""
    _blob_schemes[_checked(scheme)] = lambda url, runtime: factory(url)


def register_consensus_scheme(scheme: str, factory: Callable[[str], Consensus]) -> None:
    """Let `factory(url)` open the consensus stores of `scheme`, from now on and in this process. It does no
    I/O and raises `InvalidLocation` for a URL that it cannot use."""
    _consensus_schemes[_checked(scheme)] = lambda url, runtime, readonly: factory(url)


def _files(url: str, runtime: Runtime) -> Blob:
    from aiopersist.storage.files.blob import FilesBlob

    address = Address.parse(url, {"fsync"})
    fsync = _SWITCH.get(address.options.get("fsync", "on"))
    if fsync is None:
        raise InvalidLocation("file: option 'fsync' must be on or off")
    return FilesBlob(address.file_path, fsync, runtime=runtime)


def _sqlite(url: str, runtime: Runtime, readonly: bool) -> Consensus:
    path = Address.parse(url).file_path
    if readonly:
        from aiopersist.storage.sqlite.readonly import ReadonlySqliteConsensus

        return ReadonlySqliteConsensus(path, runtime=runtime)
    from aiopersist.storage.sqlite.consensus import SqliteConsensus

    return SqliteConsensus(path, runtime=runtime)


def _remote(opens: Callable[[str, Runtime], Blob]) -> Callable[[str, Runtime], Blob]:
    """The stores of a scheme, with a cache on disk if the URL asks for one."""

    def opened(url: str, runtime: Runtime) -> Blob:
        bare, options = _without(url, _CACHE, _CACHE_BYTES)
        blob = opens(bare, runtime)
        if not options:
            return blob
        from aiopersist.storage.disk_cache import DEFAULT_BYTES, DiskCache, DiskCacheBlob

        folder, limit = options.get(_CACHE), options.get(_CACHE_BYTES, str(DEFAULT_BYTES))
        if not folder or "\0" in folder:
            raise InvalidLocation(f"{scheme_of(url)}: option 'cache' is a folder")
        if not (limit.isascii() and limit.isdecimal() and int(limit)):
            raise InvalidLocation(f"{scheme_of(url)}: option 'cache_bytes' is a number of bytes")
        return DiskCacheBlob(blob, DiskCache(folder, int(limit), without_secrets(bare), runtime))

    return opened


def _without(url: str, *names: str) -> tuple[str, dict[str, str]]:
    """The URL without these options, and what they say."""
    place, mark, query = url.partition("?")
    values: dict[str, str] = {}
    rest = list[str]()
    for option in query.split("&"):
        name, _, value = option.partition("=")
        if name not in names:
            rest.append(option)
        elif name in values:
            raise InvalidLocation(f"{scheme_of(url)}: option {name!r} is given twice")
        else:
            values[name] = unquote(value)
    return f"{place}{mark}{'&'.join(rest)}".removesuffix("?"), values


def _s3(url: str, runtime: Runtime) -> Blob:
    with extra("s3"):
        from aiopersist.storage.s3.blob import S3Blob
        from aiopersist.storage.s3.client import OPTIONS
    return S3Blob.at(Address.parse(url, OPTIONS))


def _s3_consensus(url: str, runtime: Runtime, readonly: bool) -> Consensus:
    with extra("s3"):
        from aiopersist.storage.s3.bucket import S3Bucket
        from aiopersist.storage.s3.client import OPTIONS
    address = Address.parse(url, OPTIONS | {POLL})
    return _on_objects(S3Bucket.at(address, runtime), address, runtime)


def _cloud(url: str, runtime: Runtime) -> Blob:
    scheme = scheme_of(url) or ""
    with extra(_CLOUDS[scheme]):
        from aiopersist.storage.clouds.blob import CloudBlob
        from aiopersist.storage.clouds.places import options_of
    return CloudBlob.at(Address.parse(url, options_of(scheme)))


def _cloud_consensus(url: str, runtime: Runtime, readonly: bool) -> Consensus:
    scheme = scheme_of(url) or ""
    with extra(_CLOUDS[scheme]):
        from aiopersist.storage.clouds.bucket import CloudBucket
        from aiopersist.storage.clouds.places import options_of
    address = Address.parse(url, options_of(scheme) | {POLL})
    return _on_objects(CloudBucket.at(address, runtime), address, runtime)


def _on_objects(bucket: "Bucket", address: Address, runtime: Runtime) -> Consensus:
    from aiopersist.storage.objects.consensus import POLL_MAX_S, POLL_S, ObjectsConsensus

    try:
        poll_s = float(address.options.get(POLL, POLL_S))
    except ValueError:
        poll_s = nan
    if not 0 < poll_s <= POLL_MAX_S:
        raise InvalidLocation(
            f"{address.scheme}: option 'poll_s' is a number of seconds, at most {POLL_MAX_S:g}"
        )
    return ObjectsConsensus(bucket, runtime=runtime, poll_s=poll_s)


def _postgres(url: str, runtime: Runtime, readonly: bool) -> Consensus:
    with extra("postgres"):
        from aiopersist.storage.postgres.consensus import PostgresConsensus
    return PostgresConsensus(url, runtime=runtime, readonly=readonly)


_blob_schemes: dict[str, Callable[[str, Runtime], Blob]] = {
    "mem": lambda url, runtime: MemoryBlob(memory_name(url)),
    "file": _files,
    "s3": _remote(_s3),
    **dict.fromkeys(_CLOUDS, _remote(_cloud)),
}
_consensus_schemes: dict[str, Callable[[str, Runtime, bool], Consensus]] = {
    "mem": lambda url, runtime, readonly: MemoryConsensus(memory_name(url), runtime=runtime),
    "s3": _s3_consensus,
    **dict.fromkeys(_CLOUDS, _cloud_consensus),
    "sqlite": _sqlite,
    "postgres": _postgres,
    "postgresql": _postgres,
}


def _factory(what: str, schemes: dict[str, S], url: str) -> S:
    scheme = scheme_of(url)
    if not _is_text(url):
        raise InvalidLocation(f"the URL of a {what} has characters that are no text")
    if scheme is None:
        example = "file:///dir" if schemes is _blob_schemes else "sqlite:///dir/state.db"
        raise InvalidLocation(f"a {what} is given by a URL: write a path as {example}")
    if scheme not in schemes:
        bare = scheme.partition("+")[0]
        advice = f"write {bare}://" if bare in schemes else f"known are {', '.join(sorted(schemes))}"
        raise InvalidLocation(f"{scheme}: no {what} has this scheme; {advice}")
    return schemes[scheme]


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn a failed import into `InvalidLocation` that says to install the extra `name`."""
    try:
        yield
    except ImportError as error:
        raise InvalidLocation(f"{name}: {to_install(name)}") from error


def memory_name(url: str) -> str:
    """The name in `mem://name`; empty for stores that no other handle shares."""
    address = Address.parse(url)
    if address.user or address.password:
        raise InvalidLocation("mem: the URL has a user: write mem://name")
    return (address.host + address.path).rstrip("/")


def _is_known(scheme: str) -> bool:
    return scheme.lower() in {*_blob_schemes, *_consensus_schemes}


def _checked(scheme: str) -> str:
    if scheme_of(f"{scheme}://") is None:
        raise ValueError(f"not a scheme: {scheme!r}")
    return scheme.lower()


def _from_one(location: "str | os.PathLike[str] | Location") -> Location:
    if isinstance(location, Location):
        return location
    if not isinstance(location, str | os.PathLike):
        raise InvalidLocation(
            f"a location is a directory, a URL or a Location, not {type(location).__name__}"
        )
    text = os.fspath(location)
    if not _is_text(text):
        raise InvalidLocation("the location is no directory and no URL: its name is no text in UTF-8")
    scheme = scheme_of(text) if isinstance(location, str) else None
    if scheme == "mem":
        return Location(text, text)
    if scheme in _BUCKETS:
        return _in_a_bucket(text)
    if scheme in _HINTS:
        raise InvalidLocation(_HINTS[scheme])
    if scheme is not None:
        what = (
            f"{scheme}: a location is a directory, mem:// or a place in a bucket, by {', '.join(_BUCKETS)}; "
            "give other stores as blob and consensus"
        )
        raise InvalidLocation(what)
    almost = _ALMOST_A_URL.match(text)
    if almost and (_is_known(almost[1]) or (almost[2] and isinstance(location, str))):
        what = f"{almost[1]}: write a URL as a text with two slashes after the colon, a directory as ./..."
        raise InvalidLocation(what)
    mistyped = _NO_COLON.match(text)
    if mistyped and isinstance(location, str) and _is_known(mistyped[1]):
        raise InvalidLocation(f"{mistyped[1]}: write a URL as {mistyped[1]}://..., a directory as ./...")
    if location == _MEMORY:
        raise InvalidLocation(f"{_MEMORY}: write mem://, a directory as ./{_MEMORY}")
    if not text or "\0" in text:
        raise InvalidLocation("the location is no directory: it is empty or has a NUL")
    folder = quote("/" + Path(text).absolute().as_posix().lstrip("/"))
    return Location(f"file://{folder}/blob", f"sqlite://{folder}/state.db")


def _is_text(text: str | bytes) -> bool:
    """Whether UTF-8 can write it: a name of bytes, or of lone surrogates, is none."""
    try:
        return isinstance(text, str) and text.encode() is not None
    except UnicodeEncodeError:
        return False


def _in_a_bucket(url: str) -> Location:
    """Both stores below one prefix of a bucket."""
    blob, consensus = _without(url, POLL)[0], _without(url, _CACHE, _CACHE_BYTES)[0]
    return Location(_below(blob, "blob"), _below(consensus, "consensus"))


def _below(url: str, folder: str) -> str:
    place, mark, query = url.partition("?")
    return f"{place.rstrip('/')}/{folder}{mark}{query}"


def _from_environment() -> Location:
    names = ("LOCATION", "BLOB", "CONSENSUS")
    values = {name: os.environ.get(f"AIOPERSIST_{name}") or None for name in names}
    if not any(values.values()):
        raise InvalidLocation(
            "no location: give one, or set AIOPERSIST_LOCATION, or AIOPERSIST_BLOB and AIOPERSIST_CONSENSUS"
        )
    try:
        return parse_location(values["LOCATION"], values["BLOB"], values["CONSENSUS"])
    except InvalidLocation as error:
        raise InvalidLocation(f"{error} (from the environment, AIOPERSIST_*)") from None


def _shown(store: str | Blob | Consensus) -> str:
    return without_secrets(store) if isinstance(store, str) else f"<{type(store).__name__}>"
