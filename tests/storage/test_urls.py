"""Goal: each URL and set of arguments opens the right store; an error names the part at fault."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

import pytest

from aiopersist.base.errors import InvalidLocation
from aiopersist.storage.address import has_secrets
from aiopersist.storage.files.blob import FilesBlob
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.objects.consensus import ObjectsConsensus
from aiopersist.storage.postgres.address import PostgresAddress
from aiopersist.storage.s3.blob import S3Blob
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from aiopersist.storage.urls import (
    Location,
    open_blob,
    open_consensus,
    parse_location,
    register_blob_scheme,
    register_consensus_scheme,
)

BAD_BLOBS = {
    "not-a-url": ("just text", "URL"),
    "empty": ("", "URL"),
    "unknown-scheme": ("gopher://x/y", "gopher"),
    "consensus-scheme": ("sqlite:///x", "sqlite"),
    "unknown-option": ("file:///x?fsnyc=off", "fsnyc"),
    "bad-option": ("file:///x?fsync=maybe", "fsync"),
    "option-twice": ("file:///x?fsync=on&fsync=off", "fsync"),
    "no-path": ("file://", "file"),
    "mem-option": ("mem://x?a=b", "'a'"),
    "no-bucket": ("s3://", "s3"),
    "s3-user": ("s3://me@bucket/x", "s3"),
    "s3-option": ("s3://bucket/x?zone=1", "zone"),
    "s3-endpoint": ("s3://bucket/x?endpoint=localhost:9000", "endpoint"),
    "a-path": ("/var/data", "file:///dir"),
    "s3-key-as-user": ("s3://key:hunter2@bucket/x", "bucket"),
    "s3-torn-key-as-user": ("s3://key:hun/ter2@bucket/x", "%2F"),
    "s3-cut-secret": ("s3://b/x?access_key=a&secret_key=hun&ter2", "%26"),
    "s3-cut-secret-of-two": ("s3://b/x?access_key=a&secret_key=hun&ter2=x", "%26"),
    "s3-password-in-endpoint": ("s3://b/x?endpoint=http://key:hunter2@host:9000", "endpoint"),
    "s3-torn-password-in-endpoint": ("s3://b/x?endpoint=http://key:hun/ter2@host:9000", "endpoint"),
    "s3-cut-password-in-endpoint": ("s3://b/x?endpoint=http://key:hun&ter2@host:9000", "%26"),
    "s3-user-in-endpoint": ("s3://b/x?endpoint=https://hunter2@host", "endpoint"),
    "s3-query-in-endpoint": ("s3://b/x?endpoint=https://host/?a%3Dhunter2", "endpoint"),
    "s3-port": ("s3://b/x?endpoint=http://host:hunter2", "endpoint"),
    "s3-endpoint-of-nothing": ("s3://b/x?endpoint=http://", "endpoint"),
    "s3-half-credentials": ("s3://bucket/x?access_key=a", "secret_key"),
}
BAD_CONSENSUSES = {
    "unknown-scheme": ("mysql://x/y", "mysql"),
    "blob-scheme": ("file:///x", "file"),
    "sqlite-option": ("sqlite:///x?mode=ro", "mode"),
    "sqlite-no-path": ("sqlite://", "sqlite"),
    "postgres-option": ("postgres://u:hunter2@h/d?sparkle=hunter2", "sparkle"),
    "postgres-schema": ("postgres://u:hunter2@h/d?schema=", "schema"),
    "a-path": ("./state.db", "sqlite:///dir/state.db"),
    "postgres-port": ("postgres://u:hunter2@h:54x2/d", "port"),
    "postgres-high-port": ("postgres://h:65536/d", "port"),
    "postgres-ports": ("postgres://h:5432,i:x/d", "port"),
    "postgres-port-option": ("postgres://h/d?port=hunter2", "port"),
    "postgres-no-host": ("postgres://u:hunter2", "port"),
    **{
        f"postgres-unescaped-{'ab'[n % 2]}-{n}": (f"postgres://u:{password}@127.0.0.1:1/d", "%2F")
        for n, password in enumerate(
            (
                "/hunter2",
                "12/hunter2",
                "?hunter2",
                "12?hunter2",
                "12?hunter2=x",
                "12?schema=x&hunter2",
                "#/hunter2",
            )
        )
    },
    "postgres-cut-password": ("postgres://h/d?user=u&password=p&hunter2", "%26"),
    "postgres-cut-password-in-two": ("postgres://h/d?user=u&password=p&hunter2=x", "%26"),
    **{
        f"postgres-{name}-{value}": (f"postgres://u:hunter2@h/d?sslmode=require&{name}={value}", name)
        for name, value in (
            ("channel_binding", "always"),
            ("gssencmode", "require"),
            ("pgbouncer", "false"),
            ("connect_timeout", "0"),
            ("connect_timeout", "soon"),
            ("connections", "0"),
            ("idle_connections", "-1"),
            ("keepalives_idle", "x"),
            ("sslrootcert", "system"),
            ("client_encoding", "latin1"),
            ("connection_limit", "5"),
            ("supa", "base-pooler"),
        )
    },
    "postgres-bound-to-nothing": (
        "postgres://h/d?sslmode=disable&channel_binding=require",
        "channel_binding",
    ),
    "sqlalchemy": ("postgresql+asyncpg://u:hunter2@h/d", "write postgresql://"),
    "postgres-long-schema": ("postgres://u:hunter2@h/d?schema=" + "x" * 64, "schema"),
}


@pytest.mark.parametrize(("url", "names"), BAD_BLOBS.values(), ids=BAD_BLOBS.keys())
def test_a_blob_url_that_cannot_be_used(url: str, names: str) -> None:
    with pytest.raises(InvalidLocation, match=names) as caught:
        open_blob(url)
    assert_no_secret(url, str(caught.value), repr(Location(url, "mem://")))


@pytest.mark.parametrize(("url", "names"), BAD_CONSENSUSES.values(), ids=BAD_CONSENSUSES.keys())
def test_a_consensus_url_that_cannot_be_used(url: str, names: str) -> None:
    with pytest.raises(InvalidLocation, match=names) as caught:
        open_consensus(url)
    assert_no_secret(url, str(caught.value), repr(Location("mem://", url)))


def assert_no_secret(url: str, *shown: str) -> None:
    """No part of the secret is shown; and Spark, which would show the URL, takes it for secret."""
    for text in shown:
        assert not re.search("hun|ter2", text)
    try:
        secret = has_secrets(url)
    except InvalidLocation as error:  # which is no less
        secret = not re.search("hun|ter2", str(error))
    assert secret or not re.search("hun|ter2", url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("file:///tmp/a%20b/c%3Fd", "/tmp/a b/c?d"),
        ("file:///tmp/a#b", "/tmp/a#b"),
        ("file://localhost/tmp/x?fsync=off", "/tmp/x"),
        ("FILE:///tmp/x", "/tmp/x"),
        ("file://some/dir", os.path.abspath("some/dir")),
        ("file://./some/dir", os.path.abspath("some/dir")),
    ],
)
def test_a_path_is_decoded(url: str, shown: str) -> None:
    assert repr(open_blob(url)) == f"<FilesBlob {shown}>"
    if "?" not in url:
        consensus = open_consensus("sqlite" + url[4:])
        assert repr(consensus) == f"<SqliteConsensus {shown}>"


def test_opening_makes_nothing(tmp_path: Path) -> None:
    open_blob(f"file://{tmp_path}/x")
    open_consensus(f"sqlite://{tmp_path}/x/state.db")
    open_consensus("postgres://u@127.0.0.1:1/d")
    open_blob("s3://bucket?endpoint=http://127.0.0.1:1")
    assert list(tmp_path.iterdir()) == []


def test_credentials_do_not_show() -> None:
    postgres = "postgres://me:hunter2@h:5432/d?schema=persist"
    in_options = "postgres://h/d?user=me&password=hunter2&sslpassword=hunter2"
    s3 = "s3://b/p?access_key=hunter2&secret_key=hunter2&session_token=hunter2&endpoint=http://h:1"
    shown = [repr(open_consensus(url)) for url in (postgres, in_options)]
    shown += [repr(open_blob(s3)), repr(Location(s3, postgres)), repr(Location(s3, in_options))]
    assert "hunter2" not in "".join(shown)
    assert "postgres://me@h:5432/d?schema=persist" in shown[0]


@pytest.mark.parametrize(
    ("url", "password", "user"),
    [
        ("postgres://me:a%2Fb%3Fc%23d%40e%26f+g@h:5432/d", "a/b?c#d@e&f+g", "me"),
        ("postgres://me:a#b@c+d@h/d", "a#b@c+d", "me"),
        ("postgres://me%40corp:x@h/d", "x", "me@corp"),
        ("postgres://h:5432/d?user=me@corp&password=a+b%26c%20d/e?f", "a+b&c d/e?f", "me@corp"),
        ("postgres://me:x@[::1]:5432,h:1,%2Fvar%2Frun/d%2Fe", "x", "me"),
    ],
)
def test_what_the_driver_of_postgres_is_told(url: str, password: str, user: str) -> None:
    """As its own parser of URLs reads it."""
    arguments = PostgresAddress.parse(url, schema="s").arguments
    assert arguments["password"] == password
    parts = urlsplit(arguments["dsn"])
    assert unquote(parts.username or "") == user or parse_qs(parts.query)["user"] == [user]
    assert "[::1]:5432,h:1,%2fvar%2frun" in parts.netloc.lower() or parts.hostname == "h"
    assert unquote(parts.path) in ("/d", "/d/e")


@pytest.mark.parametrize(
    "query",
    [
        "sslmode=require&channel_binding=require",
        "sslmode=verify-full&sslrootcert=system",
        "sslmode=verify-full&sslrootcert=/ca.pem&channel_binding=prefer",
        "connect_timeout=3&application_name=web",
        "options=-c%20search_path%3Dapp",
        "keepalives=1&keepalives_idle=30&keepalives_interval=10&keepalives_count=5&tcp_user_timeout=9000",
        "gssencmode=disable&client_encoding=utf8&sslsni=1&sslcompression=0&load_balance_hosts=disable",
        "pgbouncer=true&connections=3&idle_connections=0&schema=public",
        "ssl_min_protocol_version=TLSv1.3&fallback_application_name=x",
    ],
)
def test_urls_of_providers(query: str) -> None:
    """Each option is taken with its meaning: by the driver, or here. What the driver does not know it would
    send to the server as a parameter of the session."""
    address = PostgresAddress.parse(f"postgres://u:hunter2@ep-x.eu.example/db?{query}", schema="s")
    given = dict(parse_qsl(query))
    passed = parse_qs(urlsplit(address.arguments["dsn"]).query)
    bound = given.get("channel_binding") == "require"
    assert passed.keys() <= {"sslmode", "sslrootcert", "ssl_min_protocol_version", "target_session_attrs"}
    assert address.trusts_system == (bound or given.get("sslrootcert") == "system")
    assert passed.get("sslmode") == (
        ["verify-full"] if bound else [given["sslmode"]] if "sslmode" in given else None
    )
    assert address.numbers == {name: int(given[name]) for name in address.numbers}
    assert address.numbers.keys() == {
        name for name in given if given[name].isdecimal() and not name.startswith("ssl")
    }
    assert address.startup.get("options") == given.get("options")
    named = given.get("application_name") or given.get("fallback_application_name") or "aiopersist"
    assert address.startup["application_name"] == named
    assert address.pooled == ("pgbouncer" in given)


def test_the_credentials_of_s3_are_taken_as_they_are() -> None:
    blob = open_blob("s3://b/team@corp/x?access_key=AK+A&secret_key=a+b/c%2Bd%26e@f&session_token=t%20u==")
    assert isinstance(blob, S3Blob)
    assert list(blob._client._credentials.values()) == ["AK+A", "a+b/c+d&e@f", "t u=="]
    assert repr(blob) == "<S3Blob s3://b/team@corp/x/>"


def test_a_url_without_secrets_is_shown() -> None:
    for url in ("file:///home/me@corp/a:b?fsync=off", "s3://b/team@corp?endpoint=http://h:1&region=r"):
        assert url in repr(Location(url, "mem://")) and not has_secrets(url)
    for url in ("postgres://me@h:5432/d?schema=persist", "sqlite:///a:b/c@d.db"):
        assert url in repr(Location("mem://", url)) and not has_secrets(url)
    assert repr(Location("mem://", "other://token@h/d?x=y")) == (
        "Location(blob=mem://, consensus=other://***@h/d?***)"
    )


def test_the_other_driver_of_s3_has_no_scheme() -> None:
    url = "s3+obstore://bucket/prefix"
    for opens in (parse_location, open_blob, open_consensus):
        with pytest.raises(InvalidLocation, match=r"^s3\+obstore: .*(use|write) s3://"):
            opens(url)


async def test_schemes_can_be_added() -> None:
    register_blob_scheme("My-Blobs", lambda url: MemoryBlob(url))
    register_consensus_scheme("my-log", lambda url: MemoryConsensus(url))
    assert isinstance(open_blob("my-blobs://x"), MemoryBlob)
    assert isinstance(open_consensus("my-log://x"), MemoryConsensus)
    with pytest.raises(ValueError):
        register_blob_scheme("no scheme", lambda url: MemoryBlob())


def test_a_missing_extra_says_what_to_install() -> None:
    program = """
import sys
sys.modules["asyncpg"] = sys.modules["aiobotocore"] = None
from aiopersist.storage.urls import open_blob, open_consensus
open_blob("file:///x"), open_consensus("sqlite:///x")
for opens, url in ((open_blob, "s3://b"), (open_consensus, "postgres://h/d")):
    try:
        opens(url)
    except Exception as error:
        print(type(error).__name__, error)
"""
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines() == [
        "InvalidLocation s3: pip install '.[s3]' in a clone of aiopersist",
        "InvalidLocation postgres: pip install '.[postgres]' in a clone of aiopersist",
    ]


def test_backends_are_imported_by_scheme() -> None:
    program = """
import sys
from aiopersist.storage.urls import open_blob, open_consensus
open_blob("mem://"), open_consensus("mem://")
print([name for name in ("asyncpg", "aiobotocore", "sqlite3", "pytest") if name in sys.modules])
"""
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == "[]"


@pytest.fixture
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCATION", "BLOB", "CONSENSUS"):
        monkeypatch.delenv(f"AIOPERSIST_{name}", raising=False)


@pytest.mark.usefixtures("_no_environment")
class TestParseLocation:
    def test_a_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        odd = tmp_path / "a b?c#d%20"
        for given in (odd, str(odd)):
            location = parse_location(given)
            assert repr(open_blob(str(location.blob))) == f"<FilesBlob {odd}/blob>"
            assert repr(open_consensus(str(location.consensus))) == f"<SqliteConsensus {odd}/state.db>"
        monkeypatch.chdir(tmp_path)
        assert parse_location("./data") == parse_location(tmp_path / "data")
        assert isinstance(open_blob(str(parse_location("data").blob)), FilesBlob)
        assert isinstance(open_consensus(str(parse_location("data").consensus)), SqliteConsensus)
        for given in ("mem", "./mem:", Path("data:/x"), "C:/x", "12:30"):
            assert str(parse_location(given).blob).startswith("file:///")

    def test_memory(self) -> None:
        assert parse_location("mem://") == Location("mem://", "mem://")
        assert parse_location("mem://name") == Location("mem://name", "mem://name")

    def test_a_bucket(self) -> None:
        """Goal: both stores lie below the prefix, with the options that each of them knows."""
        options = "endpoint=http://h:1&region=r"
        for prefix in ("s3://b/p", "s3://b/p/", "S3://b/p"):
            found = parse_location(f"{prefix}?{options}&poll_s=3")
            start = prefix.rstrip("/")
            assert found == Location(f"{start}/blob?{options}", f"{start}/consensus?{options}&poll_s=3")
            assert isinstance(open_blob(str(found.blob)), S3Blob)
            assert isinstance(open_consensus(str(found.consensus)), ObjectsConsensus)
        assert parse_location("s3://b") == Location("s3://b/blob", "s3://b/consensus")
        assert parse_location("s3://b?poll_s=3") == Location("s3://b/blob", "s3://b/consensus?poll_s=3")

    @pytest.mark.parametrize("poll_s", ["0", "-1", "11", "nan", "often", ""])
    def test_how_often_it_polls(self, poll_s: str) -> None:
        with pytest.raises(InvalidLocation, match="poll_s"):
            open_consensus(f"s3://b/p?poll_s={poll_s}")

    def test_two_stores(self) -> None:
        blob = MemoryBlob()
        assert parse_location(blob=blob, consensus="mem://").blob is blob
        assert parse_location(Location("mem://a", "mem://b")) == Location("mem://a", "mem://b")

    @pytest.mark.parametrize(
        ("arguments", "names"),
        [
            ({}, "AIOPERSIST_LOCATION"),
            ({"blob": "mem://"}, "consensus"),
            ({"consensus": "mem://"}, "blob"),
            ({"location": "x", "blob": "mem://", "consensus": "mem://"}, "not both"),
            ({"location": "x", "consensus": "mem://"}, "not both"),
            ({"location": "gopher://bucket/x"}, "gopher"),
            ({"location": "postgres://h/d"}, "postgres"),
            ({"location": ""}, "directory"),
            *(
                ({"location": text}, text.partition(":")[0])
                for text in ("mem:/", "mem:x", "Mem:", "s3:/b", "x-y:/z")
            ),
            ({"location": Path("mem://x")}, "text"),
            ({"location": 7}, "int"),
            ({"blob": 7, "consensus": "mem://"}, "blob"),
            ({"blob": "mem://", "consensus": MemoryBlob()}, "consensus"),
        ],
        ids=str,
    )
    def test_what_cannot_be_used(self, arguments: dict[str, object], names: str) -> None:
        with pytest.raises(InvalidLocation, match=names):
            parse_location(**arguments)  # type: ignore[arg-type]

    def test_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AIOPERSIST_BLOB", "mem://b")
        with pytest.raises(InvalidLocation, match="consensus"):
            parse_location()
        monkeypatch.setenv("AIOPERSIST_CONSENSUS", "mem://c")
        assert parse_location() == Location("mem://b", "mem://c")
        assert parse_location("mem://x") == Location("mem://x", "mem://x")
        monkeypatch.setenv("AIOPERSIST_LOCATION", "mem://l")
        with pytest.raises(InvalidLocation, match="not both"):
            parse_location()
        monkeypatch.delenv("AIOPERSIST_BLOB")
        monkeypatch.delenv("AIOPERSIST_CONSENSUS")
        assert parse_location() == Location("mem://l", "mem://l")
