"""Goal: who may not see the pages does not, and a browser does nothing on their behalf that they did not ask
for."""

import httpx
import pytest
from starlette.types import ASGIApp

import aiopersist as ap
from aiopersist.web import inspector
from aiopersist.web.guard import HostCheck, host_name
from aiopersist.web.serve import application, is_loopback, token_for

TOKEN = "t0k3n"


def browser(app: ASGIApp, base: str = "http://localhost/") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=base)


@pytest.mark.parametrize("address", ["/", "/nowhere", "/shard?name=none", "/static/inspector.css"])
async def test_every_answer_has_the_headers(mem: ap.Client, address: str) -> None:
    async with browser(inspector(mem)) as http:
        headers = (await http.get(address)).headers
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    if not address.startswith("/static"):
        assert headers["cache-control"] == "no-store"


async def test_no_page_has_a_script_or_style_of_its_own(mem: ap.Client) -> None:
    async with browser(inspector(mem)) as http:
        page = (await http.get("/")).text
    assert page.count("<script") == page.count('<script src="static/') == 1
    assert "<style" not in page
    assert " style=" not in page


async def test_a_token_is_needed_and_a_cookie_remembers_it(mem: ap.Client) -> None:
    async with browser(inspector(mem, token=TOKEN)) as http:
        for address in ("/", "/static/inspector.css", "/?token=", "/?token=wrong", "/?token=t0k3n%00"):
            refused = await http.get(address)
            assert refused.status_code == 401
            assert "set-cookie" not in refused.headers
        welcome = await http.get("/?q=a%26b&token=t0k3n")
        assert welcome.status_code == 303
        assert welcome.headers["location"] == "./?q=a%26b"
        cookie = welcome.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie
        assert (await http.get("/")).status_code == 200


async def test_an_address_with_line_ends_makes_no_header(mem: ap.Client) -> None:
    async with browser(inspector(mem, token=TOKEN)) as http:
        welcome = await http.get("/%0d%0aSet-Cookie:x=1?token=t0k3n")
    assert welcome.headers["location"] == "./%0D%0ASet-Cookie%3Ax%3D1"


async def test_a_program_sends_the_token_as_a_header(mem: ap.Client) -> None:
    async with browser(inspector(mem, token=TOKEN)) as http:
        for value, status in [(f"Bearer {TOKEN}", 200), ("Bearer", 401), ("Bearer é", 401), ("Basic x", 401)]:
            found = await http.get("/", headers={"Authorization": value.encode()})
            assert found.status_code == status


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:8321", "localhost"),
        ("LOCALHOST", "localhost"),
        ("[::1]:80", "::1"),
        ("127.0.0.1", "127.0.0.1"),
        ("evil.example:8321", "evil.example"),
        ("127.0.0.1.evil.example", "127.0.0.1.evil.example"),
        ("", ""),
    ],
)
def test_the_name_of_a_host(host: str, name: str) -> None:
    assert host_name(host) == name


async def test_on_loopback_no_other_name_is_served(mem: ap.Client) -> None:
    app = application(mem, "127.0.0.1", None, write=False)
    assert isinstance(app, HostCheck)
    async with browser(app) as http:
        for host, status in [
            ("localhost:1", 200),
            ("[::1]", 200),
            ("evil.example", 421),
            ("localhost.evil.example", 421),
        ]:
            assert (await http.get("/", headers={"Host": host})).status_code == status


def test_beyond_loopback_there_is_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOPERSIST_WEB_TOKEN", raising=False)
    assert [is_loopback(h) for h in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(h) for h in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5
    assert token_for("127.0.0.1") is None
    made = token_for("0.0.0.0")
    assert made is not None
    assert len(made) >= 32
    assert made != token_for("0.0.0.0")
    monkeypatch.setenv("AIOPERSIST_WEB_TOKEN", TOKEN)
    assert token_for("0.0.0.0") == TOKEN == token_for("127.0.0.1")


async def test_the_pages_work_wherever_they_are_mounted(mem: ap.Client) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    await mem.table("stock", str, int).put("pen", 1)
    app = Starlette(routes=[Mount("/deep/inspect", inspector(mem, token=TOKEN))])
    async with browser(app) as http:
        welcome = await http.get("/deep/inspect/?token=t0k3n")
        assert "Path=/deep/inspect" in welcome.headers["set-cookie"]
        page = await http.get("/deep/inspect/")
        assert page.status_code == 200
        assert 'href="/' not in page.text
        assert 'src="/' not in page.text
        for address in ("static/inspector.css", "static/inspector.js", "shard?name=stock"):
            assert (await http.get(f"/deep/inspect/{address}")).status_code == 200
