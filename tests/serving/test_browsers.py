"""Pages of other sites, and the page that shows the schema."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

import eecore
from eecore.errors import RequestError
from eecore.serving.app import create_app
from eecore.serving.settings import ServerSettings
from servers import Asker, asker

SITE, OTHER = "https://example.org", "http://localhost:3000"
CHATS = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "lock the front door"}], "max_tokens": 2}
ALLOWED = "access-control-allow-origin"


def preflight(server: Asker, origin: str) -> Any:
    """A browser's request before it sends JSON to another site."""
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    return server.run(lambda client: client.options(CHATS, headers=headers))


def of_origins(model: eecore.Model, *origins: str, keys: tuple[str, ...] = ()) -> Asker:
    service = asker(model).service
    return Asker(service, create_app(service, keys, origins))


def test_no_page_of_another_site_may_ask_unless_it_is_named(server: Asker) -> None:
    assert preflight(server, SITE).status_code == 405
    assert ALLOWED not in server.post(CHATS, BODY, headers={"origin": SITE}).headers


def test_a_page_of_a_site_that_is_named(intent: eecore.Model) -> None:
    server = of_origins(intent, SITE, OTHER, keys=("key",))
    for origin in (SITE, OTHER):
        leave = preflight(server, origin)  # which has no key
        assert (leave.status_code, leave.headers[ALLOWED]) == (200, origin)
        assert "x-stainless-lang" in leave.headers["access-control-allow-headers"]
        headers = {"origin": origin, "authorization": "Bearer key"}
        for body, status in ((BODY, 200), ({}, 400)):  # a page reads what is wrong, too
            answer = server.post(CHATS, body, headers=headers)
            assert (answer.status_code, answer.headers[ALLOWED]) == (status, origin)
        stream = server.post(CHATS, {**BODY, "stream": True}, headers=headers)
        assert stream.headers[ALLOWED] == origin
    leave = preflight(server, "https://example.com")
    assert (leave.status_code, ALLOWED in leave.headers) == (400, False)


def test_all_sites(intent: eecore.Model) -> None:
    server = of_origins(intent, "*")
    assert preflight(server, SITE).headers[ALLOWED] == "*"
    answer = server.post(CHATS, BODY, headers={"origin": SITE})
    assert answer.headers[ALLOWED] == "*"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["example.org", "https://example.org/", "https://Example.org", "https://", "", "**"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(RequestError, match=r"^cors_origins: expected \* or the origin of a site"):
        ServerSettings(cors_origins=(SITE, origin))


class Tags(HTMLParser):
    """The tags of a page, and the addresses that a browser fetches for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str | None] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_schema_as_a_page(server: Asker) -> None:
    page = server.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "script" not in page.headers["content-security-policy"]
    found = Tags(page.text)
    assert not found.tags & {"script", "link", "img", "iframe"}
    assert found.links == ["openapi.json"]
    schema = server.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        assert path in found.text
        for operation in methods.values():
            content = operation.get("requestBody", {}).get("content", {})
            for each in content.values():
                for name, field in each["schema"]["properties"].items():
                    assert name in found.text
                    assert field.get("description", "") in found.text
    assert "list of object" in found.text
    assert "integer 1.." in found.text
