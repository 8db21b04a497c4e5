"""The HTTP side of `stub_engine.py`: one request read, one answer written."""

import hashlib
import json
import select
import socket
import sys
import time

from stub_sessions import named_in
from stub_socket import converse, opening


def read_request(reader):
    """Return (method, path, [(name, value)], body), or None at the end of the connection."""
    first = reader.readline().split()
    if len(first) < 2:
        return None
    headers = []
    for line in iter(reader.readline, b""):
        if not line.strip():
            break
        name, _, value = line.decode("latin-1").partition(":")
        headers.append((name.strip(), value.strip()))
    named = {name.lower(): value for name, value in headers}
    if named.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int(reader.readline().split(b";")[0], 16):
            body += reader.read(size)
            reader.readline()
        reader.readline()
    else:
        body = reader.read(int(named.get("content-length", 0)))
    return first[0].decode(), first[1].decode(), headers, body


class Exchange:
    """One request and its answer."""

    OPEN = ("/health", "/v1/health")
    CHATS = ("/v1/chat/completions", "/chat/completions")
    TEXTS = ("/v1/completions", "/completions", "/completion")

    def __init__(self, engine, connection, reader, request, last):
        self.engine, self.connection, self.reader, self.last = engine, connection, reader, last
        self.method, self.target, self.headers, self.body = request
        self.path = self.target.partition("?")[0]
        self.session = None
        named = {name.lower(): value for name, value in self.headers}
        self.named = named
        self.conversation = named.get("x-conversation-id", "")
        self.given_key = named.get("authorization", "").removeprefix("Bearer ") or named.get("x-api-key", "")
        self.closes = last or named.get("connection", "").lower() == "close"

    def answer(self):
        engine = self.engine
        if engine.state == "terminated":
            self.closes = True
        elif engine.ready_at is None:
            self.refuse(503, "unavailable_error", "Loading model")
        elif self.path in self.OPEN:
            self.send(200, {"status": "ok"})
        elif engine.keys and self.given_key not in engine.keys:
            self.refuse(401, "authentication_error", "Invalid API Key")
        elif self.path.startswith("/v1/stream"):
            self.resume()
        elif self.named.get("upgrade", "").lower() == "websocket" and self.path != "/no-socket":
            self.open_socket()
        elif self.method == "GET":
            self.read()
        else:
            self.post()

    def open_socket(self):
        self.closes = True
        self.engine.journal("socket", path=self.target, headers=self.headers)
        self.connection.sendall(opening(self.named))
        converse(self.connection, self.reader, self.engine.journal)

    def resume(self):
        sessions = self.engine.sessions
        if self.path == "/v1/streams/lookup":
            self.send(200, sessions.look_up(json.loads(self.body)["conversation_ids"]))
            return
        found = named_in(self.target, self.engine.knobs["stream_paths"])
        if found is None or (self.method == "GET" and found[0] not in sessions.by_id):
            self.refuse(404, "not_found_error", "File Not Found")
        elif self.method == "DELETE":
            self.engine.journal("stream_stopped", conversation=found[0])
            sessions.stop(found[0])
            self.head(204, [("Content-Length", "0")])
        elif not found[1].isdecimal():
            self.refuse(400, "invalid_request_error", "Invalid stream offset")
        elif sessions.by_id[found[0]].has_dropped(int(found[1]), self.engine.knobs["kept_bytes"]):
            self.refuse(400, "invalid_request_error", "Stream offset lost")
        else:
            self.head(200, [("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked")])
            for piece in sessions.by_id[found[0]].pieces(int(found[1])):
                self.chunk(piece[:1])
                self.engine.wait_for_gate("replay_gate")
                self.chunk(piece[1:])
            self.connection.sendall(b"0\r\n\r\n")

    def read(self):
        engine = self.engine
        if self.path == "/metrics" and engine.options.get("--metrics"):
            self.send(200, metrics_page(engine.slots), "text/plain; version=0.0.4")
        elif self.path == "/metrics":
            self.refuse(
                501,
                "not_supported_error",
                "This server does not support metrics endpoint. Start it with `--metrics`",
            )
        elif self.path in ("/v1/models", "/models"):
            self.send(200, {"object": "list", "data": [engine.about()]})
        elif self.path == "/props":
            settings = {"n_ctx": int(engine.knobs["n_ctx"]), "params": {}}
            self.send(
                200,
                {
                    "default_generation_settings": settings,
                    "total_slots": engine.slots.free,
                    "model_path": engine.model,
                    "is_sleeping": engine.state == "sleeping",
                },
            )
        elif self.path == "/slots":
            self.send(200, [{"id": k, "is_processing": k < engine.slots.processing} for k in range(4)])
        else:
            self.closes = True
            self.refuse(404, "not_found_error", "File Not Found")

    def post(self):
        engine = self.engine
        engine.journal("request", path=self.target)
        if engine.knobs["chatter"]:
            with engine.out:
                print(engine.knobs["chatter"], file=sys.stderr, flush=True)
        with engine.slots:
            if engine.state == "sleeping":
                engine.wake()
            while engine.knobs["hang"] == "serving":
                self.stop_if_gone()
                time.sleep(0.02)
            if engine.knobs["status"]:
                self.refuse(int(engine.knobs["status"]), "server_error", "the stub was told to")
                return
            if engine.knobs["echo"]:
                self.send(
                    200,
                    {
                        "method": self.method,
                        "path": self.target,
                        "headers": self.headers,
                        "body": self.body.decode("latin-1"),
                    },
                )
                return
            if engine.knobs["count_body"]:
                digest = hashlib.sha256(self.body).hexdigest()
                self.send(200, {"bytes": len(self.body), "sha256": digest})
                return
            try:
                wish = json.loads(self.body or b"{}")
            except ValueError:
                self.refuse(400, "invalid_request_error", "[json.exception.parse_error.101] parse error")
                return
            self.infer(wish)

    def infer(self, wish):
        if self.path in self.CHATS + self.TEXTS:
            self.generate(wish)
        elif self.path == "/tokenize":
            self.send(200, {"tokens": [ord(c) for c in wish.get("content", "")]})
        elif self.path == "/detokenize":
            self.send(200, {"content": "".join(map(chr, wish.get("tokens", [])))})
        elif self.path in ("/v1/embeddings", "/embeddings", "/embedding"):
            row = {"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}
            self.send(
                200,
                {
                    "object": "list",
                    "model": wish.get("model"),
                    "data": [row],
                    "usage": {"prompt_tokens": 1, "total_tokens": 1},
                },
            )
        else:
            self.refuse(404, "not_found_error", "File Not Found")

    def generate(self, wish):
        count = wish.get("max_tokens") or wish.get("max_completion_tokens") or wish.get("n_predict")
        count = int(count or self.engine.knobs["tokens"])
        time.sleep(float(self.engine.knobs["prompt_seconds"]))
        if not wish.get("stream"):
            text = "".join(self.tokens(count))
            self.send(200, self.whole(wish, text, count))
            return
        self.session = self.engine.sessions.begin(self.conversation) if self.conversation else None
        self.head(200, [("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked")])
        try:
            for k, token in enumerate(self.tokens(count)):
                self.event(self.delta(wish, token, None if k < count - 1 else "length"))
            if self.path != "/completion":
                self.chunk(b"data: [DONE]\n\n")
        except ConnectionResetError:
            if self.session is None:
                raise
        if self.session is not None:
            self.session.end()
        self.connection.sendall(b"0\r\n\r\n")

    def tokens(self, count):
        for k in range(count):
            if k == 1:
                self.engine.crash_at("serving")
                self.engine.wait_for_gate("token_gate", self.gone)
            if k:
                time.sleep(float(self.engine.knobs["token_seconds"]))
                self.stop_if_gone()
            yield f"t{k} "

    def whole(self, wish, text, count):
        usage = {"completion_tokens": count, "prompt_tokens": 1, "total_tokens": count + 1}
        shared = {"created": 0, "model": wish.get("model", ""), "usage": usage, "id": "chatcmpl-stub"}
        if self.path in self.CHATS:
            message = {"role": "assistant", "content": text}
            return {
                "choices": [{"finish_reason": "length", "index": 0, "message": message}],
                "object": "chat.completion",
            } | shared
        if self.path == "/v1/completions":
            return {
                "choices": [{"finish_reason": "length", "index": 0, "text": text, "logprobs": None}],
                "object": "text_completion",
            } | shared
        return {
            "index": 0,
            "content": text,
            "stop": True,
            "model": wish.get("model", ""),
            "tokens_predicted": count,
        }

    def delta(self, wish, token, finish):
        shared = {"created": 0, "id": "chatcmpl-stub", "model": wish.get("model", "")}
        if self.path in self.CHATS:
            return {
                "choices": [{"finish_reason": finish, "index": 0, "delta": {"content": token}}],
                "object": "chat.completion.chunk",
            } | shared
        if self.path == "/v1/completions":
            return {
                "choices": [{"finish_reason": finish, "index": 0, "text": token, "logprobs": None}],
                "object": "text_completion",
            } | shared
        return {"index": 0, "content": token, "tokens": [], "stop": finish is not None}

    # Bytes

    def send(self, status, content, kind="application/json; charset=utf-8"):
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.head(status, [("Content-Type", kind), ("Content-Length", str(len(body)))], body)

    def refuse(self, status, kind, message):
        self.send(status, {"error": {"message": message, "type": kind, "code": status}})

    def head(self, status, headers, body=b""):
        keep = ("Connection", "close") if self.closes else ("Keep-Alive", "timeout=5, max=100")
        lines = [
            f"HTTP/1.1 {status} Stub",
            *(f"{n}: {v}" for n, v in [keep, ("Server", "llama.cpp"), *headers]),
        ]
        self.connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def event(self, content):
        self.chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

    def chunk(self, data):
        if self.session is not None:
            self.session.append(data)
            if self.hung_up():
                return
        try:
            self.connection.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        except OSError:
            # Who left just now leaves a conversation that goes on.
            if self.session is None:
                raise

    def gone(self):
        return self.session.cancelled if self.session is not None else self.hung_up()

    def hung_up(self):
        if not select.select([self.connection], [], [], 0)[0]:
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def stop_if_gone(self):
        if self.gone():
            raise ConnectionResetError


def metrics_page(slots):
    page = ""
    with slots.changed:  # who reads that nothing runs finds no mark of it either
        counts = (("requests_processing", slots.processing), ("requests_deferred", slots.deferred))
    for name, value in counts:
        page += f"# HELP llamacpp:{name} Number of requests.\n# TYPE llamacpp:{name} gauge\n"
        page += f"llamacpp:{name} {value}\n"
    return page
