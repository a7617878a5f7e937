"""The way into a FastAPI application: `from aiopersist import fastapi as apf`. It needs the extra `web`.

| module     | what it has                                                                          |
|------------|--------------------------------------------------------------------------------------|
| `attached` | what an application holds while it runs: its client, its tables, whether it is ending |
| `life`     | `lifespan` opens the client; `client` and `table` are dependencies                    |
| `events`   | the text of server-sent events, and the place of each in its feed                     |
| `patience` | how far a consumer may stay behind                                                    |
| `ids`      | the ids of events, which are signed                                                   |
| `stream`   | `event_stream`: a feed as server-sent events                                          |
| `sender`   | sends the changes of a feed, as its client takes them                                 |
| `problems` | which status each error is: `add_exception_handlers`                                  |
| `probes`   | `/livez` and `/readyz`                                                                |
| `inside`   | `inspector` and `metrics`: those of `aiopersist.web`, for the application's client     |
| `ending`   | notices that the server is about to end                                               |
"""

from importlib.util import find_spec

from aiopersist.base.errors import to_install

if find_spec("fastapi") is None:
    raise ModuleNotFoundError(f"fastapi is not installed: {to_install('web')}", name="fastapi")

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
    "inspector",
    "lifespan",
    "metrics",
    "table",
]
