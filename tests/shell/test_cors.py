"""Pages of other origins: who may call, and each header once, whatever an instance says of it."""

from typing import Any

import pytest

from llamastead.gateway.cors import Cors
from llamastead.shared.settings import load_settings

Heads = list[tuple[bytes, bytes]]


def cors(**given: Any) -> Cors:
    """Return what settings given like this mean."""
    return Cors.of(load_settings(given))


async def answered(rules: Cors, origin: bytes, *said: tuple[bytes, bytes]) -> Heads:
    """Return the head that reaches a page of `origin` when an instance said this."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await rules.answering(send, origin)({"type": "http.response.start", "status": 200, "headers": list(said)})
    return list(sent[0]["headers"])


async def test_c150_the_instances_own_words_are_replaced() -> None:
    """Have an instance say an empty origin, credentials and a Vary of its own: ours win, Vary is joined."""
    said = (
        (b"Access-Control-Allow-Origin", b""),
        (b"access-control-allow-credentials", b"true"),
        (b"vary", b"Accept-Encoding, Origin"),
        (b"content-type", b"text/plain"),
    )
    assert await answered(cors(), b"http://page.example", *said) == [
        (b"content-type", b"text/plain"),
        (b"access-control-allow-origin", b"http://page.example"),
        (b"vary", b"Accept-Encoding, Origin"),
    ]


@pytest.mark.parametrize(
    ("origin", "named"),
    [
        (b"http://one.example", True),
        (b"https://two.example", True),
        (b"http://two.example", False),
        (b"http://three.example", False),
        (b"null", False),
    ],
)
async def test_c151_only_the_origin_that_matches_is_named(origin: bytes, named: bool) -> None:
    """Allow two origins and call from each, a third and none in particular: its own name or nothing."""
    rules = cors(cors_origins="http://one.example, https://two.example")
    expected = [(b"access-control-allow-origin", origin), (b"access-control-allow-credentials", b"true")]
    assert await answered(rules, origin) == [*(expected if named else []), (b"vary", b"Origin")]


@pytest.mark.parametrize(
    "origin", ["http://localhost", "https://localhost:3000", "http://127.0.0.1:1", "http://[::1]"]
)
def test_the_word_localhost_means_pages_of_this_machine(origin: str) -> None:
    """Allow `localhost`: its three spellings may call on any port, names that only look like it may not."""
    rules = cors(cors_origins="localhost")
    assert rules.allows(origin.encode())
    assert not rules.allows(origin.replace("localhost", "localhost.evil.example").encode() + b".example")


def test_no_page_gets_credentials_while_any_may_call() -> None:
    """Look at the default, at named origins, and at those without credentials."""
    assert not cors().credentials
    assert cors(cors_origins="http://one.example").credentials
    assert not cors(cors_origins="http://one.example", cors_credentials=False).credentials


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, b"*, Authorization"),
        ({"cors_origins": "http://one.example"}, b"x-asked"),
        ({"cors_headers": "a, b"}, b"a, b"),
    ],
)
async def test_a_preflight_says_which_headers_may_be_sent(given: dict[str, str], expected: bytes) -> None:
    """Ask before a call: the star and Authorization, what was asked where a star won't do, or the setting."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "headers": [(b"access-control-request-headers", b"x-asked")]}
    await cors(**given).preflight(scope, receive, send, "r")
    assert dict(sent[0]["headers"])[b"access-control-allow-headers"] == expected
