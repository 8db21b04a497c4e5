"""One proxied request through the byte path, driven by hand: models, headers, bodies, failures."""

import asyncio
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from byte_path_kit import (
    OK,
    SSE_HEAD,
    Call,
    FakeModel,
    Visit,
    answering,
    breaking,
    chunk,
    instance,
    proxy_for,
)
from waiting import until

from llamastead.gateway import proxy
from llamastead.gateway.body import Body, read_body
from llamastead.gateway.seams import AnswerCut
from llamastead.gateway.tally import Tally
from llamastead.shared.errors import ApiError
from llamastead.shared.words import UseKind

JSON = (b"content-type", b"application/json")


async def test_c154_request_and_answer_pass_unchanged_but_for_what_is_ours(path: Path) -> None:
    """One POST: as sent but for Host, hop-by-hop headers and credentials; ours are added to the answer."""
    body = b'{ "model" :"n",\t"messages":[] }  '
    answer = OK.replace(
        b"Content-Type",
        b"Server: llama.cpp\r\nX-Llamastead-Path: forged\r\nKeep-Alive: timeout=5\r\nContent-Type",
    )
    async with instance(path, answering(answer)) as made:
        setting = proxy_for(made.address)
        call = await Call(
            setting.proxy,
            target="/v1/chat/completions?a=b&model=m",
            body=body,
            headers=[
                (b"host", b"gateway"),
                (b"authorization", b"Bearer client-key"),
                (b"x-api-key", b"client-key"),
                (b"cookie", b"session=1"),
                (b"x-forwarded-for", b"192.0.2.1"),
                (b"traceparent", b"00-1-2-01"),
                (b"accept-encoding", b"br"),
                (b"connection", b"keep-alive, X-Private"),
                (b"x-private", b"1"),
                (b"te", b"trailers"),
                (b"accept", b"text/event-stream"),
                (b"x-request-id", b"forged"),
                (b"expect", b"100-continue"),
                (b"x-conversation-id", b"c1"),
                JSON,
            ],
        ).done()
        received = made.received[0]
        assert received.line == b"POST /v1/chat/completions?a=b&model=m HTTP/1.1"
        assert received.body == body
        assert sorted(received.headers) == sorted(
            [
                (b"host", b"localhost"),
                (b"x-forwarded-for", b"192.0.2.1"),
                (b"traceparent", b"00-1-2-01"),
                (b"accept-encoding", b"br"),
                (b"accept", b"text/event-stream"),
                (b"x-conversation-id", b"c1"),
                JSON,
                (b"content-length", b"%d" % len(body)),
                (b"authorization", b"Bearer instance-key"),
                (b"x-request-id", b"req-1"),
            ]
        )
        assert (call.status, call.body, call.complete) == (200, b"ok", True)
        assert call.headers == [
            (b"server", b"llama.cpp"),
            JSON,
            (b"content-length", b"2"),
            (b"x-request-id", b"req-1"),
            (b"x-llamastead-path", b"hot"),
            (b"x-llamastead-wait-ms", b"0"),
            (b"x-llamastead-load-ms", b"0"),
            (b"x-llamastead-instance", b"host-1-0"),
        ]
        assert setting.admission.asked == [("m", UseKind.INFERENCE, "req-1")]
        assert setting.admission.open_claims == 0
        await setting.pools.close()


async def test_c24_a_read_is_no_use_and_needs_no_body(path: Path) -> None:
    """GET and HEAD on a loaded model: sent without body or length, counted as a read."""
    async with instance(path, answering()) as made:
        setting = proxy_for(made.address)
        got = await Call(setting.proxy, "GET", "/slots?model=m", b"").done()
        head = await Call(setting.proxy, "HEAD", "/slots?model=m", b"").done()
        assert [request.line[:4] for request in made.received] == [b"GET ", b"HEAD"]
        assert all(not request.header(b"content-length") for request in made.received)
        assert (got.body, head.body, head.header(b"content-length")) == (b"ok", b"", [b"2"])
        assert {kind for _, kind, _ in setting.admission.asked} == {UseKind.READ}
        await setting.pools.close()


@pytest.mark.parametrize(
    ("target", "body", "asked"),
    [
        ("/completion", b'{"model":"m"}', "m"),
        ("/completion?model=n", b'{"model":"m"}', "m"),
        ("/completion?model=m", b'{"prompt":""}', "m"),
        ("/completion?model=m", b'{"model":null}', "m"),
        ("/lora-adapters?model=m", b"[]", "m"),
        ("/completion?model=m", b"", "m"),
        ("/completion", b'{"model":"cold"}', "cold"),
        ("/completion", b'{"model":"late"}', "late"),
    ],
)
async def test_the_model_is_taken_from_the_body_then_from_the_query(
    path: Path, target: str, body: bytes, asked: str
) -> None:
    """Names in body and query, also a name and its alias; one only Redis knows is found on a second look."""
    async with instance(path, answering()) as made:
        setting = proxy_for(made.address)
        setting.catalog.later["late"] = FakeModel("late")
        await Call(setting.proxy, "POST", target, body).done()
        assert setting.admission.asked[0][0] == asked
        await setting.pools.close()


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "message"),
    [
        ("POST", "/completion", b"{}", 400, "model name is missing from the request"),
        ("POST", "/completion", b"", 400, "model name is missing from the request"),
        ("POST", "/completion", b'{"model":""}', 400, "model name is missing from the request"),
        ("GET", "/slots", b"", 400, "model name is missing from the request"),
        ("POST", "/completion", b'{"model":5.50}', 400, "`model` must be a string, not 5.50"),
        ("POST", "/completion?model=m", b'{"model":["m"]}', 400, "`model` must be a string, not an array"),
        ("POST", "/completion", b'{"model":"m"', 400, "not valid JSON: line 1, column 13"),
        ("POST", "/completion", b"model=m", 400, "not valid JSON: line 1, column 1"),
        ("POST", "/completion", b'{"model":"\\ud800"}', 400, "model '\\ud800' not found"),
        ("GET", "/slots?model=cold", b"", 400, "model is not loaded"),
        (
            "POST",
            "/completion?model=cold",
            b'{"model":"m"}',
            400,
            "the body names model 'm', the query another",
        ),
        (
            "POST",
            "/completion?model=zebra",
            b'{"model":"m"}',
            400,
            "the body names model 'm', the query another",
        ),
        ("POST", "/completion?autoload=false", b'{"model":"cold"}', 400, "model is not loaded"),
    ],
)
async def test_r9_what_cant_be_placed_is_refused_before_anything_is_counted(
    method: str, target: str, body: bytes, status: int, message: str
) -> None:
    """Requests without a usable model, also two names (C148): what and where is said, and nothing claimed."""
    setting = proxy_for("unix:/nowhere")
    with pytest.raises(ApiError) as refused:
        await Call(setting.proxy, method, target, body).done()
    assert (refused.value.status, setting.admission.asked) == (status, [])
    assert message in refused.value.message


@pytest.mark.parametrize("name", ["M", " m", "m ", "m\\u0000", "gpt-4", "ｍ"])
@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/embeddings", "/tokenize"])
async def test_c147_an_unknown_name_is_refused_as_it_was_written(name: str, target: str) -> None:
    """Names that differ in case or space: refused with the exact name, Redis asked once, nothing loaded."""
    setting = proxy_for("unix:/nowhere")
    body = f'{{"model":"{name}"}}'.encode()
    with pytest.raises(ApiError) as refused:
        await Call(setting.proxy, target=target, body=body).done()
    written = json.loads(body)["model"]
    assert (refused.value.status, refused.value.message) == (400, f"model '{written}' not found")
    assert (setting.catalog.looked, setting.admission.asked) == ([written], [])


@pytest.mark.parametrize(
    ("method", "target", "autoload", "loads"),
    [
        ("POST", "/completion?model=cold", True, True),
        ("POST", "/completion?model=cold", False, False),
        ("POST", "/completion?model=cold&autoload=true", False, True),
        ("POST", "/completion?model=cold&autoload=0", True, False),
        ("GET", "/slots?model=cold", True, False),
        ("GET", "/slots?model=cold&autoload=1", True, True),
    ],
)
async def test_who_may_load(path: Path, method: str, target: str, autoload: bool, loads: bool) -> None:
    """A model that isn't loaded: POST follows the setting, GET loads only when told to, the query wins."""
    async with instance(path, answering()) as made:
        setting = proxy_for(made.address, autoload=autoload)
        call = Call(setting.proxy, method, target, b"")
        if loads:
            assert (await call.done()).status == 200
        else:
            with pytest.raises(ApiError, match="model is not loaded"):
                await call.done()
        await setting.pools.close()


@pytest.mark.parametrize(
    ("method", "target", "headers", "autoload", "served"),
    [
        ("POST", "/completion?model=m", [], True, True),
        ("POST", "/completion?model=m", [(b"x-llamastead-autoload", b"false")], True, False),
        ("POST", "/completion?model=m&autoload=false", [], True, False),
        ("POST", "/completion?model=m&autoload=true", [(b"x-llamastead-autoload", b"false")], True, False),
        ("POST", "/completion?model=m&autoload=true", [(b"x-api-key", b"probe")], True, False),
        ("POST", "/completion?model=m", [(b"x-api-key", b"another")], True, True),
        ("POST", "/completion?model=m", [], False, False),
        ("GET", "/slots?model=m", [], True, False),
    ],
)
async def test_c84_who_may_not_load_gets_no_model_that_is_on_its_way_out(
    path: Path, method: str, target: str, headers: list[tuple[bytes, bytes]], autoload: bool, served: bool
) -> None:
    """A model that drains: who may load it waits for it, all others are told that it is not loaded: with 503
    where the header or the key forbid it, whatever the address says.
    """
    async with instance(path, answering()) as made:
        setting = proxy_for(made.address, autoload=autoload)
        setting.catalog.models["m"].leaving = True
        call = Call(setting.proxy, method, target, b"", headers=headers)
        if served:
            assert (await call.done()).status == 200
        else:
            with pytest.raises(ApiError, match="model is not loaded") as refused:
                await call.done()
            assert refused.value.status == (503 if headers else 400)
            assert setting.admission.asked == []
        await setting.pools.close()


@pytest.mark.parametrize(
    ("method", "target", "served"),
    [
        ("GET", "/metrics?model=m", False),  # the application answers it from what it kept
        ("GET", "/props?model=m", True),
        ("GET", "/slots?model=m", False),
        ("GET", "/slots?model=m&autoload=true", True),
        ("POST", "/completion?model=m", True),
    ],
)
async def test_c79_reads_do_not_wake_a_sleeper(path: Path, method: str, target: str, served: bool) -> None:
    """A model asleep: what its engine answers asleep passes, what wakes it only if told to."""
    async with instance(path, answering()) as made:
        setting = proxy_for(made.address)
        setting.catalog.models["m"].asleep = True
        call = Call(setting.proxy, method, target, b"")
        if served:
            assert (await call.done()).status == 200
        else:
            with pytest.raises(ApiError, match="model is not loaded"):
                await call.done()
        await setting.pools.close()


async def test_c84_a_probe_wakes_no_sleeper(path: Path) -> None:
    """Send inference to a model asleep with a key that may load nothing: 503, and nobody is asked for it."""
    async with instance(path, answering()) as made:
        setting = proxy_for(made.address)
        setting.catalog.models["m"].asleep = True
        call = Call(setting.proxy, "POST", "/completion?model=m", b"", headers=[(b"x-api-key", b"probe")])
        with pytest.raises(ApiError, match="model is not loaded") as refused:
            await call.done()
        assert refused.value.status == 503
        assert setting.admission.asked == []
        await setting.pools.close()


async def test_c84_admission_is_told_what_may_not_be_loaded(path: Path) -> None:
    """Send a probe to a model that the copy calls loaded: admission hears what to answer if it is gone."""
    async with instance(path, answering()) as made:
        setting = proxy_for(made.address)
        for headers, told in (([], None), ([(b"x-api-key", b"probe")], (503, False))):
            call = Call(setting.proxy, "POST", "/completion?model=m", b"", headers=headers)
            assert (await call.done()).status == 200
            no_load = setting.admission.no_loads[-1]
            assert (no_load and (no_load.error.status, no_load.may_wake)) == told
        await setting.pools.close()


async def test_c141_a_form_passes_byte_for_byte(path: Path) -> None:
    """An upload with the model behind the file: found there, and the body arrives unchanged."""
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + bytes(range(256)) * 999
    ) + b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    pieces = [body[at : at + 65536] for at in range(0, len(body), 65536)]
    async with instance(path, answering()) as made:
        setting = proxy_for(made.address)
        await Call(
            setting.proxy,
            target="/v1/audio/transcriptions",
            body=pieces,
            headers=[(b"content-type", b"multipart/form-data; boundary=b")],
        ).done()
        assert made.received[0].body == body
        await setting.pools.close()


async def test_c145_a_compressed_body_goes_on_decoded_and_an_answers_coding_is_its_own(path: Path) -> None:
    """A gzip request: sent on plain with its own length and no coding; the answer keeps its own coding."""
    body, coded = b'{"model":"m"}', gzip.compress(b"ok")
    answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (
        len(coded),
        coded,
    )
    async with instance(path, answering(answer)) as made:
        setting = proxy_for(made.address)
        headers = [JSON, (b"content-encoding", b"gzip"), (b"accept-encoding", b"gzip")]
        call = await Call(setting.proxy, body=gzip.compress(body), headers=headers).done()
        received = made.received[0]
        assert received.body == body
        assert received.header(b"content-length") == [b"%d" % len(body)]
        assert received.header(b"content-encoding") == []
        assert received.header(b"accept-encoding") == [b"gzip"]
        assert (call.header(b"content-encoding"), call.body) == ([b"gzip"], coded)
        await setting.pools.close()


async def test_c142_a_chunked_body_gets_a_length(path: Path) -> None:
    """A request whose length nobody announced: sent on with one, and without Transfer-Encoding."""
    async with instance(path, answering()) as made:
        setting = proxy_for(made.address)
        pieces = [b'{"model":', b'"m"', b"}"]
        await Call(setting.proxy, body=pieces, headers=[JSON, (b"transfer-encoding", b"chunked")]).done()
        received = made.received[0]
        assert received.header(b"content-length") == [b"13"]
        assert received.header(b"transfer-encoding") == []
        assert received.body == b"".join(pieces)
        await setting.pools.close()


async def test_c144_too_large_a_body_is_413_and_nothing_is_forwarded() -> None:
    """One byte over the limit: refused, nothing claimed."""
    setting = proxy_for("unix:/nowhere", max_body=12)
    with pytest.raises(ApiError) as refused:
        await Call(setting.proxy).done()
    assert (refused.value.status, setting.admission.asked) == (413, [])


async def test_c123_c126_events_get_their_headers_once_and_come_as_they_are(path: Path) -> None:
    """An event stream in odd pieces: bytes unchanged, no buffering and no caching said once each."""
    events = [b"data: 1\n", b"\ndata: 2\n\n", b": ping\n\n", b"data: [DONE]\n\n"]

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD)
        for event in events:
            await visit.send(chunk(event))
        await visit.send(chunk(b""))

    async with instance(path, script) as made:
        setting = proxy_for(made.address)
        call = await Call(setting.proxy).done()
        assert call.body == b"".join(events)
        assert call.header(b"cache-control") == [b"no-cache"]
        assert call.header(b"x-accel-buffering") == [b"no"]
        assert call.header(b"transfer-encoding") == []
        assert call.complete


@pytest.mark.parametrize("pings", [{"ping_interval": 0.0}, {"ping_delay": 0.05}])
async def test_a_stream_does_not_keep_its_requests_body(
    path: Path, monkeypatch: pytest.MonkeyPatch, pings: dict[str, float]
) -> None:
    """Begin a stream with a long prompt: while it runs nothing of the prompt is held, from the ping delay on
    if there are pings: until then they may ask whether it is one for a stream.
    """
    bodies: list[Body] = []
    finish = asyncio.Event()

    async def noting(*args: Any, **more: Any) -> Body:
        bodies.append(await read_body(*args, **more))
        return bodies[-1]

    monkeypatch.setattr(proxy, "read_body", noting)

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await finish.wait()
        await visit.send(chunk(b""))

    async with instance(path, script) as made:
        setting = proxy_for(made.address, settings=pings)
        prompt = b'{"model":"m","prompt":"' + b"x" * 500_000 + b'"}'
        call = Call(setting.proxy, body=prompt).start()
        await call.something_sent.wait()
        assert made.received[0].body == prompt
        await until(lambda: [body.data for body in bodies] == [b""], "the prompt to be let go")
        finish.set()
        assert (await call.done()).complete


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_c153_no_framing_header_where_no_body_is(path: Path, status: bytes) -> None:
    """204 and 304 with a length of the instance's: the client gets none."""
    async with instance(path, answering(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")) as made:
        setting = proxy_for(made.address)
        call = await Call(setting.proxy).done()
        assert (call.status, call.body, call.complete) == (int(status[:3]), b"", True)
        assert call.header(b"content-length") == []
        await setting.pools.close()


async def test_what_becomes_of_requests_is_counted_by_model_and_status(path: Path) -> None:
    """Two answers, a wait, a refused request, one that may not load, one that is no use, one that breaks off:
    each is counted once, and what was not told yet comes with the next batch.
    """
    tally = Tally()
    async with instance(path, answering()) as made:
        setting = proxy_for(made.address, tally=tally)
        await Call(setting.proxy).done()
        await Call(setting.proxy, "POST", "/props").done()
        first = tally.batch()
        assert first == (1, {"m": {"answers:200": 1}})
        waited = setting.admission._grant
        setting.admission._grant = lambda: replace(waited(), path="cold", wait_ms=1200)  # type: ignore[method-assign]
        await Call(setting.proxy).done()
        setting.admission.refusal = ApiError(429, "queue is full")
        with pytest.raises(ApiError):
            await Call(setting.proxy).done()
        with pytest.raises(ApiError):
            await Call(setting.proxy, target="/tokenize?autoload=false", body=b'{"model":"cold"}').done()
        await setting.pools.close()
        assert tally.batch() == first
    tally.sent(1)
    counts = {"answers:200": 1, "answers:429": 1, "waits": 1, "waited_ms": 1200}
    assert tally.batch() == (2, {"m": counts, "cold": {"answers:400": 1}})
    tally.sent(2)
    async with instance(path, breaking(OK[:-1])) as made:
        with pytest.raises(AnswerCut):
            await Call(proxy_for(made.address, tally=tally).proxy).done()
    assert tally.batch() == (3, {"m": {"answers:200": 1, "answers_cut": 1}})
    tally.sent(3)
    assert tally.batch() == (0, {})
