"""What passes between client and instance in the heads of messages, and what is added on the way."""

from collections.abc import Iterable

from llamastead.gateway.seams import Claim

HeaderList = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# The client's key and cookies are for us, the body goes on decoded and with a length of its own, Expect was
# answered here, and an instance has one name only.
_NOT_TO_INSTANCE = _HOP_BY_HOP | {
    b"host",
    b"authorization",
    b"cookie",
    b"x-api-key",
    b"content-encoding",
    b"content-length",
    b"expect",
    b"x-request-id",
}
_OURS = frozenset(
    {
        b"x-request-id",
        b"x-llamastead-path",
        b"x-llamastead-wait-ms",
        b"x-llamastead-load-ms",
        b"x-llamastead-instance",
    }
)
_NOT_TO_CLIENT = _HOP_BY_HOP | _OURS | {b"date"}  # the server puts its own
_BODILESS = (204, 304)
_UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


def request_head(
    method: str,
    target: bytes,
    headers: Iterable[tuple[bytes, bytes]],
    size: int | None,
    key: str,
    request_id: str,
) -> bytes:
    """Return the head of the request to an instance, blank line included.

    `headers` are the client's, names in lower case; `size` is the body's length in bytes, None for a request
    without body; `key` is the instance's own.
    """
    lines = [b"%s %s HTTP/1.1\r\nhost: localhost\r\n" % (method.encode(), target)]
    lines += [b"%s: %s\r\n" % header for header in _without(headers, _NOT_TO_INSTANCE)]
    if size is not None:
        lines.append(b"content-length: %d\r\n" % size)
    lines.append(
        b"authorization: Bearer %s\r\nx-request-id: %s\r\n\r\n" % (key.encode(), request_id.encode())
    )
    return b"".join(lines)


def is_event_stream(headers: HeaderList) -> bool:
    """Tell whether an answer is a stream of server-sent events."""
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> str:
    """Return a header's value, empty without one."""
    return next((value.decode("latin-1") for name, value in headers if name == wanted), "")


def event_stream_head(request_id: str) -> HeaderList:
    """Return the headers of a stream that begins before any instance is known to answer it."""
    return [(b"content-type", b"text/event-stream"), *_UNBUFFERED, (b"x-request-id", request_id.encode())]


def our_facts(headers: HeaderList) -> bytes:
    """Return in one line what of `response_headers` says how the request fared."""
    return b" ".join(b"%b=%b" % pair for pair in headers if pair[0] in _OURS and pair[0] != b"x-request-id")


def response_headers(status: int, headers: HeaderList, claim: Claim, request_id: str) -> HeaderList:
    """Return the headers of the answer to the client: the instance's (lower case) and ours, each once."""
    kept = _without(headers, _NOT_TO_CLIENT)
    if status in _BODILESS:
        kept = [header for header in kept if header[0] != b"content-length"]
    if is_event_stream(kept):
        # Proxies on the way must neither hold events back nor keep them.
        kept = [header for header in kept if header[0] not in (b"cache-control", b"x-accel-buffering")]
        kept += _UNBUFFERED
    kept += our_headers(claim, request_id)
    return kept


def our_headers(claim: Claim, request_id: str) -> HeaderList:
    """Return the headers that say how a request fared."""
    return [
        (b"x-request-id", request_id.encode()),
        (b"x-llamastead-path", claim.path.encode()),
        (b"x-llamastead-wait-ms", b"%d" % claim.wait_ms),
        (b"x-llamastead-load-ms", b"%d" % claim.load_ms),
        (b"x-llamastead-instance", claim.instance.encode()),
    ]


def socket_headers(
    headers: Iterable[tuple[bytes, bytes]], key: str, request_id: str
) -> list[tuple[str, str]]:
    """Return the headers that open a WebSocket at an instance, those of the protocol itself left out."""
    kept = [header for header in _without(headers, _NOT_TO_INSTANCE) if header[0][:14] != b"sec-websocket-"]
    passed = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in kept]
    return [*passed, ("authorization", f"Bearer {key}"), ("x-request-id", request_id)]


def _without(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> HeaderList:
    """Return the headers but for the dropped ones and those that `Connection` names as its own."""
    kept: HeaderList = []
    named: set[bytes] = set()
    for header in headers:
        if header[0] not in dropped:
            kept.append(header)
        elif header[0] == b"connection":
            named.update(word.strip().lower() for word in header[1].split(b","))
    if named - {b"close", b"keep-alive", b""}:
        kept = [header for header in kept if header[0] not in named]
    return kept
