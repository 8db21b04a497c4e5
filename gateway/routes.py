"""One table of everything the gateway serves: what each route needs, may do and who may call it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from llamastead.shared.words import UseKind


class Access(StrEnum):
    """Which key a route wants."""

    OPEN = "open"
    INFERENCE = "inference"
    ADMIN = "admin"


class Serves(StrEnum):
    """Who answers a route: `PROXY` the instance of a model, the others a view of the gateway itself."""

    PROXY = "proxy"
    HEALTH = "health"
    LIVE = "live"
    READY = "ready"
    MODELS = "models"
    MODEL = "model"
    LOAD = "load"
    UNLOAD = "unload"
    EVENTS = "events"
    PROPS = "props"
    QUEUE = "queue"
    METRICS = "metrics"
    PROCESS = "process"
    LOGS = "logs"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class Route:
    """What one method and path mean.

    A path that ends in `/*` stands for itself followed by one more, possibly slashed, part. `may_load`: a
    model that is not loaded is loaded for it (a GET loads only with `?autoload=true`). `use` is None where no
    model is involved.
    """

    method: str
    path: str
    serves: Serves
    access: Access
    needs_model: bool = False
    may_load: bool = False
    use: UseKind | None = None


def _view(method: str, path: str, serves: Serves, access: Access = Access.INFERENCE) -> Route:
    return Route(method, path, serves, access)


def _inference(path: str) -> Route:
    return Route("POST", path, Serves.PROXY, Access.INFERENCE, True, True, UseKind.INFERENCE)


def _control(path: str) -> Route:
    """A POST that sets something of an instance: it loads like any POST, but is no use of the model."""
    return Route("POST", path, Serves.PROXY, Access.INFERENCE, True, True, UseKind.READ)


def _read(path: str, use: UseKind = UseKind.READ) -> Route:
    return Route("GET", path, Serves.PROXY, Access.INFERENCE, True, False, use)


ROUTES: tuple[Route, ...] = (
    _view("GET", "/health", Serves.HEALTH, Access.OPEN),
    _view("GET", "/v1/health", Serves.HEALTH, Access.OPEN),
    _view("GET", "/healthz", Serves.LIVE, Access.OPEN),
    _view("GET", "/readyz", Serves.READY, Access.OPEN),
    _view("GET", "/models", Serves.MODELS),
    _view("GET", "/v1/models", Serves.MODELS),
    _view("GET", "/models/sse", Serves.EVENTS),
    _view("GET", "/v1/models/*", Serves.MODEL),
    _view("POST", "/models/load", Serves.LOAD, Access.ADMIN),
    _view("POST", "/models/unload", Serves.UNLOAD, Access.ADMIN),
    _view("GET", "/queue", Serves.QUEUE),
    _view("GET", "/metrics/gateway", Serves.PROCESS),
    _view("GET", "/logs/*", Serves.LOGS, Access.ADMIN),
    # Answered by the gateway, or by the instance with `?model=`.
    Route("GET", "/props", Serves.PROPS, Access.INFERENCE, False, False, UseKind.PEEK),
    Route("GET", "/metrics", Serves.METRICS, Access.INFERENCE, False, False, UseKind.PEEK),
    # Features of llama-server that stay off behind a router.
    _view("GET", "/tools", Serves.DISABLED),
    _view("POST", "/tools", Serves.DISABLED),
    _view("GET", "/cors-proxy", Serves.DISABLED),
    _view("POST", "/cors-proxy", Serves.DISABLED),
    _inference("/completion"),
    _inference("/completions"),
    _inference("/v1/completions"),
    _inference("/chat/completions"),
    _inference("/v1/chat/completions"),
    _inference("/infill"),
    _inference("/responses"),
    _inference("/v1/responses"),
    _inference("/v1/messages"),
    _inference("/audio/transcriptions"),
    _inference("/v1/audio/transcriptions"),
    _inference("/embedding"),
    _inference("/embeddings"),
    _inference("/v1/embeddings"),
    _inference("/rerank"),
    _inference("/reranking"),
    _inference("/v1/rerank"),
    _inference("/v1/reranking"),
    _inference("/tokenize"),
    _inference("/detokenize"),
    _inference("/apply-template"),
    _inference("/chat/completions/input_tokens"),
    _inference("/v1/chat/completions/input_tokens"),
    _inference("/responses/input_tokens"),
    _inference("/v1/responses/input_tokens"),
    _inference("/v1/messages/count_tokens"),
    _control("/v1/chat/completions/control"),
    _control("/props"),
    _control("/lora-adapters"),
    _control("/slots/*"),
    _read("/slots"),
    _read("/lora-adapters"),
)

# Answered by the instance when a model is named.
WITH_MODEL_PROXIED = frozenset({Serves.PROPS, Serves.METRICS})

# Open like llama-server's page and its assets, whether or not something is served there.
OPEN_PATHS = frozenset({"/", "/index.html", "/favicon.ico", "/favicon.svg"})


class Router:
    """Finds the route of a method and path."""

    def __init__(self, routes: tuple[Route, ...] = ROUTES) -> None:
        self._exact: Mapping[tuple[str, str], Route] = {
            (r.method, r.path): r for r in routes if not r.path.endswith("/*")
        }
        self._under = tuple((r.method, r.path[:-1], r) for r in routes if r.path.endswith("/*"))

    def find(self, method: str, path: str) -> tuple[Route, str] | None:
        """Return the route and what stands for its `*` (empty without one), None for an unknown path.

        HEAD is answered where GET is.
        """
        if method == "HEAD":
            method = "GET"
        if route := self._exact.get((method, path)):
            return route, ""
        for wanted, prefix, route in self._under:
            if method == wanted and path.startswith(prefix) and len(path) > len(prefix):
                return route, path[len(prefix) :]
        return None
