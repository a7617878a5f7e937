"""aiopersist in a FastAPI application: `from aiopersist import fastapi as apf`. It needs the extra `web`.

| module     | contents                                                                    |
|------------|-----------------------------------------------------------------------------|
| `attached` | the client and the tables of a running application                          |
| `life`     | `lifespan` opens the client; `client` and `table` are dependencies          |
| `events`   | texts of server-sent events, and their places in the feed                   |
| `patience` | how far a consumer may fall behind                                          |
| `ids`      | signed ids of events                                                        |
| `stream`   | `event_stream`: a feed as server-sent events                                |
| `sender`   | sends the changes of a feed to one client                                   |
| `problems` | the HTTP status of each error: `add_exception_handlers`                     |
| `probes`   | `/livez` and `/readyz`                                                      |
| `catalog`  | `iceberg_catalog`: published tables, for other engines                      |
| `inside`   | `inspector` and `metrics` of `aiopersist.web`, for the application's client |
| `ending`   | notices that the server is about to end                                     |
"""

from importlib.util import find_spec

from aiopersist.base.errors import to_install

if find_spec("fastapi") is None:
    raise ModuleNotFoundError(f"fastapi is not installed: {to_install('web')}", name="fastapi")

from aiopersist.fastapi.catalog import iceberg_catalog
from aiopersist.fastapi.inside import inspector, metrics
from aiopersist.fastapi.life import AppTable, client, client_of, lifespan, table
from aiopersist.fastapi.probes import health
from aiopersist.fastapi.problems import add_exception_handlers
from aiopersist.fastapi.stream import EventStream, event_stream

__all__ = [
    "AppTable",
    "EventStream",
    "add_exception_handlers",
    "client",
    "client_of",
    "event_stream",
    "health",
    "iceberg_catalog",
    "inspector",
    "lifespan",
    "metrics",
    "table",
]
