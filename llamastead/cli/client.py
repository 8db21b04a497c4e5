"""The HTTP side of the client commands: which gateway, with which key, and errors in one readable line."""

import argparse
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from llamastead.shared.settings import Settings, load_settings
from llamastead.up.folder import gateway_note_path, http_place, trust

START_HINT = "start it with `llamastead up`, or give --url"
PATIENCE_S = 30.0
REMOVAL_PATIENCE_S = 90.0  # the model may have to stop first
RELOAD_PATIENCE_S = 600.0  # there may be thousands of models; a gateway gives up before if nobody is at work
UNKNOWN_MODEL = re.compile(r"model '.*' not found")
NO_LIMITS = httpx.Limits(max_connections=None)


class ClientError(Exception):
    """A command could not be carried out; the message says why and what to do."""


class Answer(dict[str, Any]):
    """A JSON object of an answer. Who leaves out what a gateway says is none: a lone llama-server, say."""

    def __missing__(self, name: str) -> Any:
        """Raise ClientError in place of KeyError."""
        raise ClientError(f"what answers is no Llamastead, it says nothing of {name!r}: check --url")


def json_of(answer: httpx.Response) -> Any:
    """Return the JSON of an answer, its objects as Answer."""
    return answer.json(object_hook=Answer)


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which gateway a command talks to."""
    group = parser.add_argument_group("which gateway (default: the one `llamastead up` runs on this machine)")
    group.add_argument("--url", default=os.environ.get("LLAMASTEAD_URL"), help="its address (LLAMASTEAD_URL)")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("LLAMASTEAD_API_KEY"),
        help="key to show, an admin one to load, unload or read logs (LLAMASTEAD_API_KEY)",
    )
    group.add_argument("--run-dir", metavar="PATH", help="run folder of that `up` (LLAMASTEAD_RUN_DIR)")


def settings_of(parsed: argparse.Namespace) -> Settings:
    """Return the settings of the `llamastead up` whose run folder the flags name."""
    return load_settings({"run_dir": parsed.run_dir} if parsed.run_dir else {})


class Client:
    """Speaks to one gateway."""

    def __init__(self, url: str, key: str | None, prefix: str = "", cert: str = "") -> None:
        """`prefix` is what its paths begin with, `cert` the file of its certificate; "" for none."""
        self.url = url
        self._base, self._socket_path = http_place(url, prefix, tls=bool(cert))
        self._trusted = trust(cert)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(
            base_url=self._base,
            headers=self._headers,
            transport=httpx.HTTPTransport(uds=self._socket_path, verify=self._trusted),
            timeout=PATIENCE_S,
        )

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> "Client":
        """Return the client that the flags ask for. Raises ClientError when no gateway is known."""
        if parsed.url:
            url = (
                parsed.url
                if parsed.url.startswith(("http://", "https://", "unix:"))
                else f"http://{parsed.url}"
            )
            return cls(url, parsed.api_key)
        run_dir = settings_of(parsed).run_dir
        try:
            note = json.loads(gateway_note_path(run_dir).read_text())
        except (OSError, ValueError):
            raise ClientError(f"no Llamastead runs with the run folder {run_dir}: {START_HINT}") from None
        return cls(note["url"], parsed.api_key or note["key"], note.get("prefix", ""), note.get("cert", ""))

    def get(self, path: str, **params: str) -> Any:
        """Return the JSON that a GET answers. Raises ClientError."""
        with self.readable_errors():
            return json_of(checked(self._http.get(path, params=params)))

    def post(self, path: str, body: dict[str, Any], patience_s: float = PATIENCE_S) -> Any:
        """Return the JSON that a POST of JSON answers. Raises ClientError."""
        with self.readable_errors(patience_s):
            return json_of(checked(self._http.post(path, json=body, timeout=patience_s)))

    def delete(self, path: str, **params: str) -> Any:
        """Return the JSON that a DELETE answers. Raises ClientError."""
        with self.readable_errors(REMOVAL_PATIENCE_S):
            answer = self._http.delete(path, params=params, timeout=REMOVAL_PATIENCE_S)
            return json_of(checked(answer))

    def lines(self, path: str, **params: str) -> Iterator[str]:
        """Yield the lines of an answer as they come, however long that takes. Raises ClientError."""
        return self._lines(path, params, lambda: None)

    def events(self, on_open: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """Yield what happens to models as it does; `on_open` is called first. Raises ClientError."""
        for line in self._lines("/models/sse", {}, on_open):
            if line.startswith("data:"):
                yield json.loads(line.removeprefix("data:"))

    def _lines(self, path: str, params: Mapping[str, str], on_open: Callable[[], None]) -> Iterator[str]:
        timeout = httpx.Timeout(PATIENCE_S, read=None)
        with (
            self.readable_errors(),
            self._http.stream("GET", path, params=params, timeout=timeout) as answer,
        ):
            if not answer.is_success:
                answer.read()
            on_open()
            yield from checked(answer).iter_lines()

    def concurrent(self) -> httpx.AsyncClient:
        """Return a client of the same gateway for many requests at once; whoever asked closes it."""
        transport = httpx.AsyncHTTPTransport(uds=self._socket_path, limits=NO_LIMITS, verify=self._trusted)
        return httpx.AsyncClient(
            base_url=self._base, headers=self._headers, transport=transport, timeout=PATIENCE_S
        )

    @contextlib.contextmanager
    def readable_errors(self, patience_s: float = PATIENCE_S) -> Iterator[None]:
        """Turn what goes wrong on the way to the gateway into a ClientError."""
        try:
            yield
        except httpx.InvalidURL as error:
            raise ClientError(f"{self.url} is no address: {error}") from None
        except httpx.ConnectError:
            raise ClientError(f"nothing answers at {self.url}: {START_HINT}") from None
        except httpx.TimeoutException:
            raise ClientError(f"{self.url} gave no answer within {patience_s:g} s") from None
        except httpx.HTTPError as error:
            raise ClientError(f"{self.url} broke off: {error}") from None
        except ValueError:
            raise ClientError(f"{self.url} answers, but not as Llamastead does: check --url") from None


def require_local_redis(settings: Settings) -> None:
    """Raise ClientError when Redis is to be the embedded one and no `llamastead up` keeps it."""
    if settings.embedded_redis and not Path(settings.redis_url.removeprefix("unix://")).exists():
        raise ClientError(
            f"no Llamastead runs with the run folder {settings.run_dir}: start it with `llamastead up`, "
            "or give --redis-url"
        )


def checked(answer: httpx.Response) -> httpx.Response:
    """Return an answer that is a success; ClientError with its message when it is none."""
    if answer.is_success:
        return answer
    try:
        error = answer.json()["error"]
        message = str(error["message"]).strip()
    except (ValueError, KeyError, TypeError):
        error, message = {}, f"{answer.reason_phrase or 'no reason given'} ({answer.status_code})"
    # With a reason it is the hub's refusal, which no key of ours changes.
    if answer.status_code in (401, 403) and "reason" not in error:
        message += ": give --api-key or set LLAMASTEAD_API_KEY"
    if UNKNOWN_MODEL.fullmatch(message):
        message += ": `llamastead ps` lists the names"
    raise ClientError(message)
