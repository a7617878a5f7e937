"""What a browser or a monitor reads from a client. It needs the extra `web`.

| module                     | what it has                                                        |
|----------------------------|--------------------------------------------------------------------|
| `metrics`                  | `GET /metrics`, for Prometheus                                     |
| `app`, `serve`             | the inspector, an application of pages; a server of it             |
| `guard`                    | headers, tokens, names of hosts, forms                             |
| `location`, `census`       | the page of a location; what is known of its shards                |
| `commits`                  | why commits take what they take; pure                              |
| `shard`, `picture`, `ticks`| the page of a shard; its picture as a value; pure                  |
| `holds`                    | what keeps the history of a shard, and whose it is; pure           |
| `contents`, `contents_page`| the addresses of contents; the answers to them                    |
| `readable`                 | which times can be read, the slider, and how times are written; pure|
| `streams`                  | pages of rows of a stream of an `Indexed`                          |
| `reading`, `rows`, `reads` | a page of rows, rows as cells, reads that take longer              |
| `work`                     | work that visitors may ask for                                     |
| `known`                    | what is kept between two pages                                     |
| `render`, `words`          | templates; how figures, times and texts are said; pure             |
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiopersist.web.app import inspector as inspector
    from aiopersist.web.metrics import ClientCollector as ClientCollector
    from aiopersist.web.metrics import metrics_router as metrics_router
    from aiopersist.web.metrics import metrics_text as metrics_text

__all__ = ["ClientCollector", "inspector", "metrics_router", "metrics_text"]

_WHERE = {
    "inspector": "aiopersist.web.app",
    **dict.fromkeys(("ClientCollector", "metrics_router", "metrics_text"), "aiopersist.web.metrics"),
}


def __getattr__(name: str) -> Any:
    """Names are imported by their first use: a part of the package wants no more than it needs."""
    from importlib import import_module

    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_WHERE[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("aiopersist"):
            raise
        missing = error.name.partition(".")[0]
        from aiopersist.base.errors import to_install

        text = f"{missing} is not installed: {to_install('web')}"
        raise ModuleNotFoundError(text, name=missing) from error
