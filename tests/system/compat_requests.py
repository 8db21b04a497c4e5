"""Every request that is sent to both servers: all routes of the real router, with good and with bad input."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

from compat_kit import Ask

SAME: dict[str, Any] = {"temperature": 0, "seed": 1, "cache_prompt": False}
SAY = [{"role": "user", "content": "say something"}]
CHAT: dict[str, Any] = {"messages": SAY, "max_tokens": 4, **SAME}
TEXT: dict[str, Any] = {"prompt": "once upon", "max_tokens": 4, **SAME}
RERANK = {"query": "once", "documents": ["upon a time", "once"]}
FORM = {"content-type": "multipart/form-data; boundary=edge"}
# Path → the model that can do it, and a body that it takes.
GOOD: dict[str, tuple[str, Any]] = {
    "/completion": ("chat", {"prompt": "once upon", "n_predict": 4, **SAME}),
    "/completions": ("chat", TEXT),
    "/v1/completions": ("chat", TEXT),
    "/chat/completions": ("chat", CHAT),
    "/v1/chat/completions": ("chat", CHAT),
    "/v1/chat/completions/control": ("chat", {"id": "nobody"}),
    "/infill": ("fim", {"input_prefix": "once", "input_suffix": "time", "n_predict": 4, **SAME}),
    "/responses": ("chat", {"input": "say something", "max_output_tokens": 4, **SAME}),
    "/v1/responses": ("chat", {"input": "say something", "max_output_tokens": 4, **SAME}),
    "/v1/messages": ("chat", CHAT),
    "/v1/messages/count_tokens": ("chat", {"messages": SAY}),
    "/embedding": ("embed", {"content": "once"}),
    "/embeddings": ("embed", {"input": "once"}),
    "/v1/embeddings": ("embed", {"input": ["once", "upon"]}),
    "/rerank": ("rank", RERANK),
    "/reranking": ("rank", RERANK),
    "/v1/rerank": ("rank", RERANK),
    "/v1/reranking": ("rank", RERANK),
    "/v1/systemone": ("chat", {"state": "once", "questions": {"a": {"type": "noul", "instructions": "so?"}}}),
    "/tokenize": ("chat", {"content": "once upon", "with_pieces": True}),
    "/detokenize": ("chat", {"tokens": [266, 279, 280]}),
    "/apply-template": ("chat", {"messages": SAY}),
    "/chat/completions/input_tokens": ("chat", CHAT),
    "/v1/chat/completions/input_tokens": ("chat", CHAT),
    "/responses/input_tokens": ("chat", {"input": "say something"}),
    "/v1/responses/input_tokens": ("chat", {"input": "say something"}),
    "/props": ("chat", {}),
    "/slots/0?action=erase": ("chat", {}),
    "/slots/0?action=save": ("chat", {"filename": "x"}),
    "/lora-adapters": ("chat", []),
}
STREAMS = ("/completion", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
AUDIO = ("/audio/transcriptions", "/v1/audio/transcriptions")
READS = ("/props", "/metrics", "/slots", "/lora-adapters")
UNKNOWN = (
    *("/nothere", "/mcp", "/api/tags", "/api/show", "/api/version", "/api/chat", "/v1/tokenize", "/models/"),
    *("/v1", "/chat/completions/control", "/v1/messages/", "/v1/images/generations", "/slots/"),
)
ORIGINS = ("http://page.example", "null", "http://localhost:3000")


def named(model: str, body: Any) -> Any:
    """Return a good body that names its model; a list can't."""
    return {"model": model, **body} if isinstance(body, dict) else body


def form(**parts: str) -> str:
    """Return the parts as a multipart form with the boundary of FORM."""
    text = "".join(
        f'--edge\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in parts.items()
    )
    return f"{text}--edge--\r\n"


def with_query(path: str, query: str) -> str:
    """Return the path with one more query parameter."""
    return f"{path}{'&' if '?' in path else '?'}{query}"


def open_requests() -> Iterator[Ask]:
    """Yield the requests for two servers without keys."""
    yield from _herd()
    yield from _pages()
    yield from _inference()
    yield from _bad_bodies()
    yield from _names()
    yield from _reads()
    yield from _loading()
    yield from _orders()
    yield from _files()
    yield from _conversations()
    yield from _origins()


def _herd() -> Iterator[Ask]:
    for path in ("/health", "/v1/health", "/models", "/v1/models", "/props"):
        yield Ask("GET", path)
        yield Ask("HEAD", path)
    yield Ask("GET", "/models", about="chat", state="loaded")
    yield Ask("GET", "/models", about="sleeper", state="sleeping")
    yield Ask("GET", "/models?reload=1")
    yield Ask("GET", "/v1/models/chat")
    for method in ("GET", "POST"):
        for path in ("/tools", "/cors-proxy"):
            yield Ask(method, path)
    for method, path in (("POST", "/health"), ("PUT", "/models"), ("GET", "/v1/chat/completions")):
        yield Ask(method, path)
    for path in UNKNOWN:
        yield Ask("GET", path)
        yield Ask("POST", path, {"model": "chat"})


def _pages() -> Iterator[Ask]:
    packed = {"accept-encoding": "gzip"}
    for path in ("/", "/index.html", "/favicon.ico", "/favicon.svg", "/manifest.webmanifest", "/sw.js"):
        yield Ask("GET", path, headers=packed)
    yield Ask("GET", "/", note="no gzip")
    yield Ask("GET", "/build.json", headers=packed)
    yield Ask("GET", "/bundle.js", headers=packed)


def _inference() -> Iterator[Ask]:
    for path, (model, body) in GOOD.items():
        if isinstance(body, dict):
            yield Ask("POST", path, named(model, body), about=model, state="loaded")
        else:
            yield Ask("POST", with_query(path, f"model={model}"), body, about=model, state="loaded")
    for path in STREAMS:
        model, body = GOOD[path]
        yield Ask(
            "POST", path, named(model, body) | {"stream": True}, about=model, state="loaded", note="stream"
        )
    for path in AUDIO:
        yield Ask("POST", path, form(model="chat", file="x"), FORM, about="chat", state="loaded")
    for path in ("/v1/embeddings", "/v1/rerank", "/infill"):  # of a model that can't
        yield Ask("POST", path, named("chat", GOOD[path][1]), about="chat", state="loaded", note="unable")
    chat = json.dumps(named("chat", CHAT))
    loaded: dict[str, Any] = {"about": "chat", "state": "loaded"}
    path = "/v1/chat/completions"
    packed = gzip.compress(chat.encode())
    yield Ask("POST", path, packed, {"content-encoding": "gzip"}, **loaded, note="gzip")
    yield Ask("POST", path, chat, {"content-encoding": "compress"}, **loaded, note="compress")
    yield Ask("POST", path, form(model="chat"), FORM, **loaded, note="form")
    yield Ask("POST", path, chat, {"transfer-encoding": "chunked"}, **loaded, note="chunked")
    yield Ask("POST", path, chat, {"content-type": "text/plain"}, **loaded, note="text/plain")
    yield Ask("POST", "/tokenize", form(model="chat", content="x"), FORM, **loaded, note="form")


def _bad_bodies() -> Iterator[Ask]:
    path = "/v1/chat/completions"
    bodies = ("", "garbage", "{", "[]", "5", '"chat"', "null", "{}", '{"model":""}', '{"model":null}')
    for body in (*bodies, '{"model":5}', '{"model":["chat"]}', '{"model":"chat"} x'):
        yield Ask("POST", path, body, note=body or "empty")
    for body in ({}, {"messages": 5}, {"messages": []}, {**CHAT, "max_tokens": "x"}):
        note = json.dumps(body)
        yield Ask("POST", path, named("chat", body), about="chat", state="loaded", note=note)
    for path, (model, body) in GOOD.items():
        yield Ask("POST", path, named(model, {}), about=model, state="loaded", note="bare")
        if isinstance(body, dict):
            yield Ask("POST", path, body, note="no model")
    for path in AUDIO:
        yield Ask("POST", path, form(file="x"), FORM, note="no model")
        yield Ask("POST", path, {"model": "chat"}, about="chat", state="loaded", note="JSON")


def _names() -> Iterator[Ask]:
    path = "/v1/chat/completions"
    loaded: dict[str, Any] = {"about": "chat", "state": "loaded"}
    for name in ("nope", "CHAT", " chat", "chat ", "chat:latest", "org/nope:Q4"):
        yield Ask("POST", path, named(name, CHAT), note=name)
    yield Ask("POST", path, named("chatty", CHAT), **loaded, note="alias")
    yield Ask("POST", f"{path}?model=chat", CHAT, **loaded, note="name in the query")
    yield Ask("POST", f"{path}?model=embed", named("chat", CHAT), **loaded, note="two names")
    yield Ask("POST", f"{path}?model=chatty", named("chat", CHAT), **loaded, note="name and alias")
    yield Ask("POST", "/slots/0?action=save&model=chat", **loaded, note="no body")
    yield Ask("POST", "/slots/0?action=save&model=chat", {"filename": "x"}, **loaded)
    yield Ask("POST", "/slots/0?action=save&model=embed", named("chat", {"filename": "x"}), **loaded)
    yield Ask("POST", "/slots/x?action=erase", named("chat", {}), **loaded)
    yield Ask("POST", "/slots/0?action=dance", named("chat", {}), **loaded)
    for read in READS:
        for query in ("model=nope", "model=", "model=CHAT"):
            yield Ask("GET", f"{read}?{query}")


def _reads() -> Iterator[Ask]:
    for path in READS:
        yield Ask("GET", path)
        for state in ("cold", "loaded"):
            yield Ask("GET", f"{path}?model=chat&autoload=false", about="chat", state=state)
        yield Ask("GET", f"{path}?model=chatty", about="chat", state="loaded")
        yield Ask("GET", f"{path}?model=chat", about="chat", state="cold")
        yield Ask("GET", f"{path}?model=chat&autoload=true", about="chat", state="cold")
        yield Ask("HEAD", f"{path}?model=chat", about="chat", state="loaded")
    for path in ("/props", "/metrics"):
        yield Ask("GET", f"{path}?model=sleeper", about="sleeper", state="sleeping")


def _loading() -> Iterator[Ask]:
    cold: dict[str, Any] = {"about": "chat", "state": "cold"}
    path = "/v1/chat/completions"
    for value in ("false", "0", "no", "1", "true", ""):
        yield Ask("POST", f"{path}?autoload={value}", named("chat", CHAT), **cold)
    for path in ("/tokenize", "/v1/completions", "/apply-template"):
        yield Ask("POST", path, named("chat", GOOD[path][1]), **cold)
    yield Ask("POST", "/tokenize", {"model": "sleeper", "content": "x"}, about="sleeper", state="sleeping")
    yield Ask("POST", "/v1/chat/completions", named("sleeper", CHAT), about="sleeper", state="sleeping")
    yield Ask("POST", "/v1/chat/completions", named("broken", CHAT), note="a broken file")
    yield Ask("POST", "/v1/chat/completions", named("broken", CHAT), note="a broken file again")


def _orders() -> Iterator[Ask]:
    yield Ask("POST", "/models/load", {"model": "chat"}, about="chat", state="cold")
    yield Ask("POST", "/models/load", {"model": "chat"}, about="chat", state="loaded")
    yield Ask("POST", "/models/load", {"model": "chatty"}, about="chat", state="loaded")
    yield Ask("POST", "/models/unload", {"model": "chat"}, about="chat", state="loaded")
    yield Ask("POST", "/models/unload", {"model": "chat"}, about="chat", state="cold")
    yield Ask("POST", "/models/unload", {"model": "chatty"}, about="chat", state="loaded")
    for verb in ("load", "unload"):
        for body in ("", "garbage", "[]", "{}", '{"model":""}', '{"model":5}', '{"model":"nope"}'):
            yield Ask("POST", f"/models/{verb}", body, note=body or "empty")
        yield Ask("GET", f"/models/{verb}")
    # What the hub is not asked for: names that can't be, and models that are not there.


def _files() -> Iterator[Ask]:
    # What the hub is not asked for: names that can't be, and models that are not there.
    names = ("", "nope", "no slash", "a/b/c")
    for body in ("", "garbage", "[]", "{}", '{"model":5}', *(json.dumps({"model": name}) for name in names)):
        yield Ask("POST", "/models", body, note=body or "empty")
    for query in ("", "?model=", "?model=nope", "?model=chat"):
        yield Ask("DELETE", f"/models{query}", about="chat", state="cold")
    yield Ask("DELETE", "/models", {"model": "nope"}, note="a body")


def _conversations() -> Iterator[Ask]:
    for method in ("GET", "DELETE"):
        for path in ("/v1/stream/nobody", "/v1/stream?conv_id=nobody", "/v1/stream"):
            yield Ask(method, path)
    said = {"x-conversation-id": "talk"}
    chat = named("chat", CHAT) | {"stream": True}
    yield Ask("POST", "/v1/chat/completions", chat, said, "chat", "loaded", note="stream")
    yield Ask("POST", "/v1/streams/lookup", {"conversation_ids": ["talk", "nobody"]})
    yield Ask("GET", "/v1/stream/talk")
    yield Ask("GET", "/v1/stream/talk?from=0")
    yield Ask("GET", "/v1/stream/talk?from=x")
    yield Ask("GET", "/v1/stream/talk?from=999999")
    yield Ask("DELETE", "/v1/stream/talk")
    yield Ask("GET", "/v1/stream/talk", note="deleted")
    for body in ("", "garbage", "[]", "{}", '{"conversation_ids":"x"}', '{"conversation_ids":[5]}'):
        yield Ask("POST", "/v1/streams/lookup", body, note=body or "empty")


def _origins() -> Iterator[Ask]:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin in ORIGINS:
        said = {"origin": origin}
        yield Ask("GET", "/models", None, said, "sleeper", "sleeping", origin)
        yield Ask("GET", "/nothere", headers=said, note=origin)
        yield Ask("OPTIONS", "/v1/chat/completions", headers=said | asks, note=origin)
        yield Ask("POST", "/tokenize", {"model": "chat", "content": "x"}, said, "chat", "loaded", note=origin)
    yield Ask("OPTIONS", "/nothere")


KEY = "sk-the-clients"
WRONG: tuple[dict[str, str], ...] = (
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": KEY},
    {"authorization": f"bearer {KEY}"},
    {"authorization": f"Bearer {KEY}"},
    {"x-api-key": KEY},
    {"x-api-key": "wrong"},
    {"x-api-key": KEY, "authorization": "Bearer wrong"},
)


def keyed_requests() -> Iterator[Ask]:
    """Yield the requests for two servers that want a key and let pages of two origins call."""
    paths = ("/health", "/v1/health", "/models", "/v1/models", "/props", "/tools", "/nothere", "/metrics")
    for number, headers in enumerate(WRONG):
        note = ", ".join(f"{name}: {value}" for name, value in headers.items()) or "no key"
        for path in paths if number < 2 else ("/props",):
            yield Ask("GET", path, headers=headers, note=note)
        body = {"model": "chat", "content": "x"}
        yield Ask("POST", "/tokenize", body, headers, "chat", "loaded", note=note)
    yield Ask("POST", "/models/load", {"model": "nope"}, note="no key")
    for page in ("/", "/sw.js", "/_app/version.json", "/_app/nothere.js"):
        yield Ask("GET", page, headers={"accept-encoding": "gzip"}, note="no key")
    yield Ask("OPTIONS", "/v1/chat/completions", note="no key")
    key = {"authorization": f"Bearer {KEY}"}
    for origin in ("http://one.example", "https://two.example", "http://three.example", "null"):
        said = {"origin": origin}
        yield Ask("GET", "/props", headers=key | said, note=origin)
        yield Ask("GET", "/props", headers=said, note=f"{origin}, no key")
        yield Ask("OPTIONS", "/props", headers=said, note=origin)
        body = {"model": "chat", "content": "x"}
        yield Ask("POST", "/tokenize", body, key | said, "chat", "loaded", note=origin)
