"""Who may call what."""

from pathlib import Path

import pytest
from app_kit import open_app
from gateway_kit import settings_for
from redis.asyncio import Redis

from llamastead.gateway.auth import Keys
from llamastead.gateway.routes import Access
from llamastead.shared.errors import ApiError

BOTH = Keys(("user-1", "user-2"), ("boss",))


def status(keys: Keys, access: Access, **headers: str) -> int:
    """Return 200 where a request with these headers is let in, else the status it is refused with."""
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    try:
        keys.check(access, raw)
    except ApiError as refusal:
        return refusal.status
    return 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 401),
        ({"authorization": "Bearer user-1"}, 200),
        ({"authorization": "bearer user-2"}, 200),
        ({"authorization": "BEARER   user-2 "}, 200),
        ({"authorization": "user-1"}, 200),
        ({"authorization": "Bearer boss"}, 200),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Bearer schlüssel"}, 401),
        ({"x_api_key": "user-1"}, 200),
        ({"x_api_key": "wrong"}, 401),
        ({"authorization": "Bearer wrong", "x_api_key": "user-1"}, 401),
    ],
)
def test_keys_are_taken_as_llama_server_takes_them(headers: dict[str, str], expected: int) -> None:
    """Give a key in every form: Bearer (in any case) or bare, else X-Api-Key only without Authorization."""
    assert status(BOTH, Access.INFERENCE, **headers) == expected


def test_management_needs_an_admin_key_where_there_is_one() -> None:
    """Manage with each kind of key: inference keys are refused as 403 once an admin key is configured."""
    assert status(BOTH, Access.ADMIN, authorization="Bearer boss") == 200
    assert status(BOTH, Access.ADMIN, authorization="Bearer user-1") == 403
    assert status(BOTH, Access.ADMIN) == 401
    assert status(Keys(("user-1",)), Access.ADMIN, authorization="Bearer user-1") == 200


def test_what_is_open_without_keys() -> None:
    """Call without a key: open routes always, everything without keys, inference with admin keys only."""
    assert status(BOTH, Access.OPEN) == 200
    assert {status(Keys(), access) for access in Access} == {200}
    assert status(Keys(admin=("boss",)), Access.INFERENCE) == 200
    assert status(Keys(admin=("boss",)), Access.ADMIN) == 401


def test_c84_a_probe_key_is_for_what_is_loaded_and_for_nothing_else() -> None:
    """Give a probe key beside other kinds of keys and alone: inference yes, management never, loads never."""
    probe = {"authorization": "Bearer probe"}
    for keys in (
        Keys(("user",), ("boss",), ("probe",)),
        Keys(("user",), (), ("probe",)),
        Keys(probe=("probe",)),
    ):
        assert status(keys, Access.INFERENCE, **probe) == 200
        assert status(keys, Access.ADMIN, **probe) == 403
        assert keys.probes([(b"x-api-key", b"probe")])
        assert not keys.probes([(b"x-api-key", b"user")])
        assert keys.owner([(b"x-api-key", b"probe")])
    assert status(Keys(("user",), (), ("probe",)), Access.INFERENCE) == 401
    assert status(Keys(probe=("probe",)), Access.ADMIN) == 200
    assert not Keys().probes([(b"x-api-key", b"")])


async def test_every_route_wants_its_key_and_a_refusal_looks_like_llama_servers(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Call one route of each kind, unknown ones too: only health, pages and preflights are open."""
    async with open_app(redis, settings_for(tmp_path, redis_url=redis_url), BOTH, "a") as served:
        for path in ("/health", "/v1/health", "/healthz", "/readyz"):
            assert (await served.client.get(path)).status_code == 200
        assert (await served.client.options("/v1/models")).status_code == 200
        assert (await served.client.get("/")).status_code == 404
        for path in (
            "/models",
            "/v1/models",
            "/props",
            "/metrics",
            "/metrics/gateway",
            "/slots",
            "/models/sse",
            "/queue",
            "/x",
        ):
            refused = await served.client.get(path)
            assert refused.status_code == 401
            assert refused.json() == {
                "error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}
            }
        user = {"Authorization": "Bearer user-1"}
        assert (await served.client.get("/models", headers=user)).status_code == 200
        assert (await served.client.post("/v1/completions", headers=user)).status_code == 200
        refused = await served.client.post("/models/unload", headers=user, json={"model": "a"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert served.proxy.asked == [("POST", "/v1/completions")]


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a key: it is compared with every one that there is, each time by the function made for that."""
    compared: list[bytes] = []

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append(expected)
        return given == expected

    monkeypatch.setattr("llamastead.shared.secret.hmac.compare_digest", compare)
    assert status(BOTH, Access.ADMIN, authorization="Bearer boss") == 200
    assert {b"user-1", b"user-2", b"boss"} == set(compared)
