"""A real server of the protocol of Azure's blobs for tests: azurite, which keeps them in memory.

It is the program that `AIOPERSIST_TEST_AZURITE` names, or `azurite-blob` on the `PATH`, or what npm has
installed in `.cache/azurite` below the working directory.
"""

import base64
import hashlib
import hmac
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from aiopersist.base.runtime import SYSTEM
from aiopersist.testing.started import http_server, temporary_directory

PROGRAM = "azurite-blob"
ACCOUNT = "devstoreaccount1"
# The key of the account, the same in every azurite: it protects nothing.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
API = "2021-12-02"


@dataclass(frozen=True)
class AzureServer:
    """A running server with an existing container."""

    endpoint: str
    container: str

    def url(self, prefix: str, *, endpoint: str | None = None) -> str:
        """A location below `prefix`; `endpoint` may be that of a proxy in between."""
        options = {
            "account": ACCOUNT,
            "account_key": KEY,
            "endpoint": f"{endpoint or self.endpoint}/{ACCOUNT}",
        }
        return f"az://{self.container}/{prefix}?{urlencode(options, safe=':/')}"


def azurite_path() -> str | None:
    """The path of the program, or `None`."""
    named = os.environ.get("AIOPERSIST_TEST_AZURITE")
    if named:
        if not shutil.which(named):
            raise RuntimeError(f"AIOPERSIST_TEST_AZURITE is {named!r}: no program is there")
        return named
    installed = Path(".cache/azurite/node_modules/.bin").absolute()
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path=str(installed))


@contextmanager
def azure_server() -> Iterator[AzureServer]:
    """A fresh azurite with a container."""
    program = azurite_path()
    if program is None:
        raise RuntimeError(
            "azurite is not on this machine: npm install azurite, or set AIOPERSIST_TEST_AZURITE"
        )
    flags = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with (
        temporary_directory("azure") as directory,
        http_server(
            lambda port: [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), *flags],
            directory,
            os.environ,
            stop_signal="KILL",  # it waits for connections, and keeps nothing
        ) as endpoint,
    ):
        server = AzureServer(endpoint, f"test-{SYSTEM.uuid().hex[:12]}")
        make_container(server)
        yield server


def make_container(server: AzureServer) -> None:
    """Make the container of the server."""
    headers = {"x-ms-date": formatdate(SYSTEM.wall(), usegmt=True), "x-ms-version": API}
    signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    # the path of the resource has the account's name twice, since it is also a part of the endpoint
    text = f"PUT{chr(10) * 12}{signed}/{ACCOUNT}/{ACCOUNT}/{server.container}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{server.endpoint}/{ACCOUNT}/{server.container}?restype=container"
    urlopen(Request(url, method="PUT", headers=headers)).close()
