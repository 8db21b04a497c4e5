"""`llamastead drill` against a scripted gateway, and the report of a fixed record."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamastead.cli.client import Client, ClientError
from llamastead.cli.drill import plan
from llamastead.cli.findings import conclusions, not_observed
from llamastead.cli.main import main
from llamastead.cli.probe import Answer, ask
from llamastead.cli.survey import host_memory, kind_of, without_secrets
from llamastead.cli.watch import Watch

FIXED = Path(__file__).parent / "drill"
Handler = Callable[[httpx.Request], httpx.Response]
PROPS = {
    "build_info": "b1",
    "max_instances": 2,
    "models_autoload": True,
    "llamastead": {"version": "0.1.0", "host": "box", "registry_revision": "r1", "queue_timeout": 5.0},
}


def entry(name: str, *args: str, **status: Any) -> dict[str, Any]:
    """Return a model as GET /models has it."""
    words = ["/llama-server", "--host", "127.0.0.1", "--port", "0", "--alias", name, *args]
    state = {"value": "unloaded", "state": "stopped", "args": words, **status}
    return {"id": name, "aliases": [], "source": "preset", "revision": "0badcafe", "status": state}


def sent(*lines: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """Return a streamed answer of these lines."""
    return httpx.Response(200, headers=headers, text="".join(f"{line}\n" for line in lines))


class Pieces(httpx.AsyncByteStream):
    """A body that comes piece by piece."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Handler], None]:
    """A function that makes a handler the gateway of all commands."""

    def install(handler: Handler) -> None:
        def concurrent(_: Client) -> httpx.AsyncClient:
            return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://gateway")

        monkeypatch.setattr(Client, "concurrent", concurrent)
        monkeypatch.setenv("LLAMASTEAD_URL", "http://gateway")

    return install


async def answered(response: httpx.Response, kind: str = "completion", patience_s: float = 5.0) -> Answer:
    """Return what a drill notes of an answer."""
    async with httpx.AsyncClient(
        transport=httpx.MockTransport(lambda _: response), base_url="http://gateway"
    ) as http:
        return await ask(http, "a", kind, "r-1", patience_s)


def test_a_fixed_record_becomes_a_fixed_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Report a record with evictions, a failure and odd names: the Markdown is that in the file."""
    assert main(["report", str(FIXED / "record.json")]) == 0
    assert capsys.readouterr().out == (FIXED / "report.md").read_text()


def test_the_report_as_json_has_figures_apart_and_only_what_was_observed(tmp_path: Path) -> None:
    """Write it as JSON: the record as it was, hot and cold figures per model, the same sentences."""
    record = json.loads((FIXED / "record.json").read_text())
    assert main(["report", str(FIXED / "record.json"), "--json", "-o", str(tmp_path / "r.json")]) == 0
    shown = json.loads((tmp_path / "r.json").read_text())
    assert shown["record"] == record
    assert [(row["model"], row["path"], row["answers"]) for row in shown["figures"]] == [
        ("A", "cold", 2),
        ("A", "hot", 1),
        ("B", "cold", 1),
        ("C_v2", "cold", 1),
    ]
    assert shown["figures"][0]["first_byte_ms"] == [4180.0, 6240.6, 8301.2]
    assert shown["conclusions"] == conclusions(record)
    assert shown["not_observed"] == not_observed(record)


def test_a_record_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Report of a missing file, of text, and of other JSON: one line each that names the file."""
    for content in (None, "no JSON", '{"form": 99}', "[]"):
        path = tmp_path / "x.json"
        if content is not None:
            path.write_text(content)
        assert main(["report", str(path)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"llamastead: {path} ")
        assert error.count("\n") == 1


def test_a_place_that_cannot_be_written_is_refused_before_the_drill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Give -o in a folder that isn't there: refused at once, nothing is asked of any gateway."""
    assert main(["drill", "a", "--url", "nowhere:1", "-o", str(tmp_path / "no" / "x.json")]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_a_step_is_a_name_before_it_is_two() -> None:
    """Plan steps with +: both at once, except where the whole is a model's name; an empty name is refused."""
    assert plan(["a", "a+b", "x+y"], {"a", "b", "x+y"}) == [["a"], ["a", "b"], ["x+y"]]
    for word in ("", "a+", "+", "a++b"):
        with pytest.raises(ClientError, match="needs models"):
            plan([word], {"a"})


def test_the_kind_of_a_model_is_in_its_options() -> None:
    """Look at options as the listing has them: completion unless they say embedding or rerank."""
    assert kind_of(entry("a")) == "completion"
    assert kind_of(entry("a", "--pooling", "rank")) == "completion"
    assert kind_of(entry("a", "--embeddings")) == "embedding"
    assert kind_of(entry("a", "--embeddings", "--pooling", "rank")) == "rerank"
    assert kind_of(entry("a", "--reranking")) == "rerank"


def test_secrets_are_not_written_down() -> None:
    """Hide values of tokens and keys and users in URLs; options that only sound alike stay."""
    words = [
        "--hf-token",
        "hf_1",
        "--api-key",
        "k",
        "--keep",
        "8",
        "--model-url",
        "https://me:pw@host/m.gguf",
    ]
    assert without_secrets(words) == [
        *("--hf-token", "***", "--api-key", "***", "--keep", "8", "--model-url", "https://***@host/m.gguf")
    ]
    assert without_secrets(["--image-max-tokens", "9"]) == ["--image-max-tokens", "9"]


def test_the_memory_of_this_machine_is_read() -> None:
    """Read it: something is there, not more is available, and a limit is below it."""
    memory = host_memory()
    total, available = memory["total"], memory["available"]
    assert total
    assert available
    assert 0 < available <= total
    assert memory["limit"] is None or 0 < memory["limit"] < total


async def test_an_answer_is_noted_with_the_gateways_figures() -> None:
    """Answer a completion with a comment before it: path, instance and times are noted, no error."""
    head = {
        "x-llamastead-path": "cold",
        "x-llamastead-instance": "box-1-1",
        "x-llamastead-wait-ms": "70",
        "x-llamastead-load-ms": "60",
    }
    whole = sent(": ping", "", 'data: {"choices": []}', "", "data: [DONE]", "", headers=head)
    answer = await answered(whole)
    assert (answer.path, answer.instance, answer.wait_ms, answer.load_ms) == ("cold", "box-1-1", 70, 60)
    assert (answer.status, answer.error) == (200, "")
    assert answer.first_byte_ms is not None
    assert 0 <= answer.first_byte_ms <= answer.total_ms


async def test_answers_that_are_not_whole_say_what_is_wrong() -> None:
    """Cut a stream, end one with an error, refuse, break off, say nothing: each is an error with a reason."""
    failed = {"error": {"message": "it broke"}}
    assert (await answered(sent("data: {}"))).error == "the answer ended early"
    assert (await answered(sent("data: {}", f"data: {json.dumps(failed)}"))).error == "it broke"
    assert (await answered(httpx.Response(503, json=failed))).error == "it broke"
    assert (await answered(httpx.Response(500, text="?"))).error == "status 500"
    assert (await answered(httpx.Response(200), "embedding")).error == "the answer is empty"
    assert (await answered(httpx.Response(200, json={"data": []}), "embedding")).error == ""

    def broken() -> Iterator[bytes]:
        yield b"data: {}\n"
        raise httpx.ReadError("reset")

    cut = await answered(httpx.Response(200, stream=Pieces(broken())))
    assert cut.error == "the answer broke off: reset"


async def test_an_answer_that_never_comes_ends_with_the_patience() -> None:
    """Have the gateway hold an answer back for ever: the request ends when its time is over, and says so."""

    class Silent(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await forever.wait()
            raise AssertionError

    forever = asyncio.Event()
    async with httpx.AsyncClient(transport=Silent(), base_url="http://gateway") as http:
        answer = await ask(http, "a", "completion", "r-1", 0.05)
    assert answer.error == "no answer within 0.05 s"
    assert answer.total_ms >= 50


async def test_changes_of_status_are_followed_until_the_stream_ends() -> None:
    """Stream progress, a reload and changes: only the changes count, and the end is an error."""
    told: list[dict[str, Any]] = [
        {"model": "a", "event": "model_status", "data": {"status": "loading", "instance": "i1"}},
        {"model": "a", "event": "status_change", "data": {"status": "loading", "progress": {"value": 0.5}}},
        {"model": "*", "event": "models_reload"},
        {
            "model": "a",
            "event": "status_change",
            "data": {"status": "unloaded", "instance": "i1", "end_class": "killed"},
        },
    ]
    stream = sent(*(f"data: {json.dumps(event)}" for event in told))
    async with httpx.AsyncClient(
        transport=httpx.MockTransport(lambda _: stream), base_url="http://gateway"
    ) as http:
        watch = Watch(http)
        with pytest.raises(ClientError, match="ended during the drill"):
            await watch.run()
    assert [change.record(change.at) for change in watch.take()] == [
        {"at_ms": 0.0, "model": "a", "status": "loading", "instance": "i1"},
        {"at_ms": 0.0, "model": "a", "status": "unloaded", "instance": "i1", "end_class": "killed"},
    ]
    assert watch.take() == []


def test_a_drill_without_events_ends_with_the_reason(
    scripted: Callable[[Handler], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Refuse the event stream, then end it early: the drill ends with one line, not with half a record."""
    refusal = httpx.Response(401, json={"error": {"message": "no such key"}})
    for stream, complaint in ((refusal, "no such key"), (sent(": hello"), "the stream of events ended")):

        def handler(request: httpx.Request, stream: httpx.Response = stream) -> httpx.Response:
            match request.url.path:
                case "/models":
                    return httpx.Response(200, json={"data": [entry("a")]})
                case "/props":
                    return httpx.Response(200, json=PROPS)
                case "/models/sse":
                    return stream
            return httpx.Response(200, stream=Pieces(iter(())))

        scripted(handler)
        assert main(["drill", "a"]) == 1
        assert complaint in capsys.readouterr().err


def test_a_report_without_a_drill_says_so(
    scripted: Callable[[Handler], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Report a herd that is known by its address only: configuration, nothing observed, memory unknown."""

    def handler(request: httpx.Request) -> httpx.Response:
        listed = {"data": [entry("a", "--ctx-size", "9", value="loaded", state="draining")]}
        return httpx.Response(200, json=PROPS if request.url.path == "/props" else listed)

    scripted(handler)
    assert main(["report"]) == 0
    out, err = capsys.readouterr()
    assert "no drill was run" in err
    assert "No drill was run" in out
    assert "- `a`: `--ctx-size 9`\n" in out
    assert "| a | yes | draining | yes | no |\n" in out
    assert "Host memory: not known" in out
    assert "## Steps" not in out
    assert "## Observed" not in out
