"""Clients that keep asking, for watching that nothing fails while the stack changes."""

import json
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

import httpx

TIMEOUT_S = 60.0


@dataclass
class Arrival:
    """What one read of a stream brought: seconds since the request, and how many events."""

    at_s: float
    events: int


@dataclass
class Streamed:
    """One streamed answer: its reads, its text, whether its end was there, and the instance that gave it."""

    arrivals: list[Arrival] = field(default_factory=list)
    text: str = ""
    done: bool = False
    instance: str = ""
    first: threading.Event = field(default_factory=threading.Event)


def stream_chat(url: str, model: str, tokens: int, into: Streamed) -> None:
    """Ask for exactly `tokens` tokens as a stream and note in `into` what arrives when."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    began, rest = time.monotonic(), ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S) as answer:
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code}: {answer.read().decode()}")
        into.instance = answer.headers["X-Llamastead-Instance"]
        for chunk in answer.iter_text():
            *events, rest = (rest + chunk).split("\n\n")
            payloads = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
            into.arrivals.append(Arrival(time.monotonic() - began, len(payloads)))
            for payload in payloads:
                into.done = into.done or payload == "[DONE]"
                choices = json.loads(payload).get("choices") if payload != "[DONE]" else None
                into.text += (choices[0]["delta"].get("content") or "") if choices else ""
            if into.text:
                into.first.set()


class BackgroundStream:
    """A streamed chat in a thread; leaving the block waits for its end and raises what it raised."""

    def __init__(self, url: str, model: str, tokens: int) -> None:
        self.streamed = Streamed()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(url, model, tokens), daemon=True)

    def _run(self, url: str, model: str, tokens: int) -> None:
        try:
            stream_chat(url, model, tokens, self.streamed)
        except BaseException as failure:
            self._failure = failure
        finally:
            self.streamed.first.set()

    def __enter__(self) -> Streamed:
        """Start it and wait for its first text."""
        self._thread.start()
        assert self.streamed.first.wait(TIMEOUT_S), "no text came"
        return self.streamed

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the end of the stream."""
        self._thread.join(TIMEOUT_S)
        if self._failure is not None and value is None:
            raise self._failure


class Load:
    """Clients that ask short questions without pause; `answered` counts, `failures` tells what went wrong."""

    def __init__(self, url: str, models: list[str], clients: int) -> None:
        self.url, self.answered, self.failures = url, 0, list[str]()
        self._changed, self._over = threading.Condition(), threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(models[n % len(models)], n % 2 == 1), daemon=True)
            for n in range(clients)
        ]

    def _run(self, model: str, stream: bool) -> None:
        body = {"model": model, "prompt": "once upon a time", "max_tokens": 16, "stream": stream}
        with httpx.Client(base_url=self.url, timeout=TIMEOUT_S) as client:
            while not self._over.is_set():
                try:
                    answer = client.post("/v1/completions", json=body)
                    whole = (
                        answer.text.endswith("data: [DONE]\n\n") if stream else bool(answer.json()["choices"])
                    )
                    wrong = (
                        ""
                        if answer.status_code == 200 and whole
                        else f"{answer.status_code} {answer.text[:300]}"
                    )
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    wrong = repr(error)
                with self._changed:
                    self.answered += 1
                    if wrong:
                        self.failures.append(wrong)
                    self._changed.notify_all()

    def await_answers(self, number: int) -> None:
        """Wait until that many more questions were answered, or failed."""
        with self._changed:
            goal = self.answered + number
            assert self._changed.wait_for(lambda: self.answered >= goal, TIMEOUT_S), "the answers stopped"

    def __enter__(self) -> "Load":
        """Start the clients."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let each client finish its question."""
        self._over.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
