"""Templates, and their filters and functions. All output is escaped."""

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from aiopersist.maintenance.inspect import signer
from aiopersist.web import words

FOLDER = Path(__file__).parent


def link(page: str, anchor: str = "", /, **query: Any) -> str:
    """A relative address. Values that are `None` or empty are left out."""
    present = {name: value for name, value in query.items() if value not in (None, "", ())}
    text = f"{page}?{urlencode(present, doseq=True)}" if present else page
    return f"{text}#{anchor}" if anchor else text


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.globals["link"] = link
    environment.filters |= {
        "size": words.size_text,
        "number": words.number_text,
        "rate": words.rate_text,
        "growth": words.growth_text,
        "duration": words.duration_text,
        "moment": words.moment_text,
        "short": words.short_id,
        "visible": words.visible,
        "owner": lambda text: signer(text) or words.short_id(text),
        "cut": words.cut,
    }
    environment.globals |= {
        "ago": words.ago_text,
        "expiry": words.expiry_text,
        "frontier": words.frontier_text,
        "time_text": words.time_text,
    }
    return environment


ENVIRONMENT = _environment()


def rendered(name: str, values: dict[str, Any]) -> str:
    """The page of that template."""
    return ENVIRONMENT.get_template(name).render(values)
