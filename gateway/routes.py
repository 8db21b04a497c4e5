"""One table of everything the gateway serves: what each route needs, may do and who may call it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    DOWNLOAD = "download"
    REMOVE = "remove"
    UNLOAD = "unload"
    RELOAD = "reload"
    EVENTS = "events"
    PROPS = "props"
    QUEUE = "queue"
    METRICS = "metrics"
    PROCESS = "process"
    LOGS = "logs"
    STREAM = "stream"
    LOOKUP = "lookup"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class Route:
    """What one method and path mean.

    A path that ends in `/*` stands for itself followed by one more, possibly slashed, part. `may_load`: a
    model that is not loaded is loaded for it (a GET loads only with `?autoload=true`). `use` is None where no
    model is involved. `streams`: a request may ask for its answer as a stream of events.
    """

    method: str
    path: str
    serves: Serves
    access: Access
    may_load: bool = False
    use: UseKind | None = None
    streams: bool = False

    @property
    def needs_model(self) -> bool:
        """Whether a request has to name a model."""
        return self.serves is Serves.PROXY


def _view(method: str, path: str, serves: Serves, access: Access = Access.INFERENCE) -> Route:
    return Route(method, path, serves, access)


def _inference(path: str) -> Route:
    return Route("POST", path, Serves.PROXY, Access.INFERENCE, may_load=True, use=UseKind.INFERENCE)


def _generation(path: str) -> Route:
    return replace(_inference(path), streams=True)


def _control(path: str) -> Route:
    """A POST that sets something of an instance: it loads like any POST, but is no use of the model."""
    return Route("POST", path, Serves.PROXY, Access.INFERENCE, may_load=True, use=UseKind.READ)


def _read(path: str, use: UseKind = UseKind.READ) -> Route:
    return Route("GET", path, Serves.PROXY, Access.INFERENCE, use=use)


ROUTES: tuple[Route, ...] = (
    _view("GET", "/health", Serves.HEALTH, Access.OPEN),
    _view("GET", "/v1/health", Serves.HEALTH, Access.OPEN),
    _view("GET", "/healthz", Serves.LIVE, Access.OPEN),
    _view("GET", "/readyz", Serves.READY, Access.OPEN),
    _view("GET", "/models", Serves.MODELS),
    _view("GET", "/v1/models", Serves.MODELS),
    _view("GET", "/models/sse", Serves.EVENTS),
    _view("GET", "/v1/models/*", Serves.MODEL),
    _view("POST", "/models", Serves.DOWNLOAD, Access.ADMIN),
    _view("DELETE", "/models", Serves.REMOVE, Access.ADMIN),
    _view("POST", "/models/load", Serves.LOAD, Access.ADMIN),
    _view("POST", "/models/unload", Serves.UNLOAD, Access.ADMIN),
    _view("POST", "/models/reload", Serves.RELOAD, Access.ADMIN),
    _view("GET", "/queue", Serves.QUEUE),
    _view("GET", "/metrics/gateway", Serves.PROCESS),
    _view("GET", "/logs/*", Serves.LOGS, Access.ADMIN),
    # Answered by the gateway, or by the instance with `?model=`.
    Route("GET", "/props", Serves.PROPS, Access.INFERENCE, use=UseKind.PEEK),
    # Older engines wake for their metrics, so a sleeper is not asked: see gateway/instance_metrics.py.
    Route("GET", "/metrics", Serves.METRICS, Access.INFERENCE, use=UseKind.READ),
    # Conversations: found in Redis, asked of their instance, whatever its model does now.
    _view("GET", "/v1/stream", Serves.STREAM),
    _view("GET", "/v1/stream/*", Serves.STREAM),
    _view("DELETE", "/v1/stream", Serves.STREAM),
    _view("DELETE", "/v1/stream/*", Serves.STREAM),
    _view("POST", "/v1/streams/lookup", Serves.LOOKUP),
    # Features of llama-server that stay off behind a router.
    _view("GET", "/tools", Serves.DISABLED),
    _view("POST", "/tools", Serves.DISABLED),
    _view("GET", "/cors-proxy", Serves.DISABLED),
    _view("POST", "/cors-proxy", Serves.DISABLED),
    _generation("/completion"),
    _generation("/completions"),
    _generation("/v1/completions"),
    _generation("/chat/completions"),
    _generation("/v1/chat/completions"),
    _generation("/infill"),
    _generation("/responses"),
    _generation("/v1/responses"),
    _generation("/v1/messages"),
    _inference("/audio/transcriptions"),
    _inference("/v1/audio/transcriptions"),
    _inference("/embedding"),
    _inference("/embeddings"),
    _inference("/v1/embeddings"),
    _inference("/rerank"),
    _inference("/reranking"),
    _inference("/v1/rerank"),
    _inference("/v1/reranking"),
    _inference("/v1/systemone"),
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

# Any WebSocket whose path is not one of our own: like an inference POST, with its model in the query.
WEBSOCKET = replace(_inference("/*"), method="GET")

# Answered by the instance when a model is named.
WITH_MODEL_PROXIED = frozenset({Serves.PROPS, Serves.METRICS})

# Whoever watches a gateway need not know its prefix, and is answered however many clients there are.
PROBES = frozenset({"/healthz", "/readyz"})

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

    def find_socket(self, path: str) -> Route | None:
        """Return the route of a WebSocket at a path, None where the gateway itself answers that path."""
        found = (self.find(method, path) for method in ("GET", "POST"))
        ours = any(route is not None and route[0].serves is not Serves.PROXY for route in found)
        return None if ours or path in OPEN_PATHS else WEBSOCKET
