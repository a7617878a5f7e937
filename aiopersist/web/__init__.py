"""Pages for browsers and metrics for monitors. It needs the extra `web`.

| module                     | contents                                                           |
|----------------------------|--------------------------------------------------------------------|
| `metrics`                  | `GET /metrics`, for Prometheus                                     |
| `app`, `serve`             | the inspector, an application of pages; a server of it             |
| `guard`                    | headers, tokens, names of hosts, forms                             |
| `location`, `census`       | the page of a location; names and summaries of its shards          |
| `commits`                  | where the time of commits goes; pure                               |
| `shard`, `picture`, `ticks`| the page of a shard; its picture as a value; pure                  |
| `holds`                    | holds on history and versions, and retention, in words; pure       |
| `contents`, `contents_page`| addresses of contents; the responses to them                       |
| `readable`                 | readable times, the slider, times that people write; pure          |
| `streams`                  | pages of rows of a stream of an `Indexed`                          |
| `reading`, `rows`, `reads` | a page of rows, rows as cells, running reads                       |
| `work`                     | work that visitors may start                                       |
| `cache`                    | data kept between two pages                                        |
| `render`, `words`          | templates; texts of figures, moments and times; pure               |
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
    """Import a name at its first use, so that each needs only its own dependencies."""
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
