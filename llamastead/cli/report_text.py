"""The report as Markdown: a record in, text out, nothing else. Pure."""

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llamastead.cli.findings import conclusions, figures, not_observed, what_happened
from llamastead.shared.words import WIRE_STATUS, WireStatus

Record = dict[str, Any]

# States in which a process has all of its weights in memory.
RESIDENT: frozenset[str] = frozenset(
    state for state, wire in WIRE_STATUS.items() if wire is WireStatus.LOADED
)
NOTE = (
    "A cold answer waited for room and for its model's load; a hot one found the model loaded. The "
    "difference is the price of residency and no difference in computing speed."
)
# An underscore within a word marks nothing.
_MARKS = re.compile(r"[\\`*<>\[\]|]|(?<!\w)_|_(?!\w)")
PROCESSES = (
    "Processes, each after its last answer. Resident memory counts pages of mapped model files, and nothing "
    "that lies on a GPU."
)
SIGNATURES = ("Carried out by", "Accepted by")


def markdown(record: Record) -> str:
    """Return the report of a drill's record, or of one without steps."""
    parts = [_head(record), _limits(record), _presets(record), _memory(record)]
    if record["steps"]:
        parts += [_steps(record), _figures(record)]
    parts += [_available(record), _conclusions(record), _signatures()]
    return "\n".join(itertools.chain(*parts))


def _head(record: Record) -> Iterator[str]:
    herd = record["herd"]
    yield from ("# Acceptance of a herd of models", "")
    facts = [
        ("date", record["began"] + (f" to {record['ended']}" if "ended" in record else "")),
        ("gateway", record["url"]),
        ("host", herd["host"]),
        ("Llamastead", herd["version"]),
        ("engine build", herd["engine"]),
        ("registry revision", herd["registry_revision"]),
    ]
    if record["steps"]:
        facts += [
            ("sequence", " ".join(record["sequence"])),
            ("request ids", f"{record['id']}-STEP-PLACE"),
        ]
    yield from _table(("fact", "value"), facts)


def _limits(record: Record) -> Iterator[str]:
    yield from ("## Limits", "")
    rows = [(name, _limit(name, value)) for name, value in record["herd"]["limits"].items()]
    yield from _table(("limit", "value"), rows)


def _presets(record: Record) -> Iterator[str]:
    yield from ("## Presets", "")
    rows = [
        (p["model"], p["revision"], p["kind"], p["source"], ", ".join(p["aliases"]), size(p["size_bytes"]))
        for p in record["presets"]
    ]
    yield from _table(("model", "revision", "kind", "source", "aliases", "file size"), rows)
    yield from ("Arguments, each instance's own address and key apart:", "")
    for entry in record["presets"]:
        yield f"- {code(entry['model'])}: {code(shlex.join(entry['args']))}"
    yield ""


def _memory(record: Record) -> Iterator[str]:
    yield from ("## Memory map", "")
    memory = record["memory"]
    if memory:
        limit = size(memory["limit"]) if memory["limit"] else "none"
        yield (
            f"Host memory: {size(memory['total'])} in all, {size(memory['available'])} available at the "
            f"beginning; limit of the control group: {limit}."
        )
    else:
        yield "Host memory: not known, the herd was reached by its address."
    yield ""
    processes = _processes(record)
    if processes:
        rows = [
            (instance, p["model"], str(p["pid"]), _steps_of(record, instance), size(p.get("rss_bytes")))
            for instance, p in processes.items()
        ]
        yield from (PROCESSES, "")
        yield from _table(("process", "model", "pid", "answered in step", "resident memory"), rows)
        started = [(instance, p["args"]) for instance, p in processes.items() if p.get("args")]
        if started:
            yield from ("Started as:", "")
            yield from (f"- {code(instance)}: {code(shlex.join(args))}" for instance, args in started)
            yield ""


def _steps(record: Record) -> Iterator[str]:
    yield from ("## Steps", "")
    columns = ("step", "model", "path", "process", "wait", "load", "ready after", "first byte", "total")
    rows = []
    for step in record["steps"]:
        for answer in step["answers"]:
            ready = [
                e["at_ms"] for e in step["events"] if (e["model"], e["status"]) == (answer["model"], "loaded")
            ]
            rows.append(
                (
                    str(step["step"]),
                    answer["model"],
                    "failed" if answer["error"] else answer["path"],
                    answer["instance"],
                    time(answer["wait_ms"]),
                    time(answer["load_ms"] if answer["path"] == "cold" else None),
                    time(ready[0] if ready else None),
                    time(answer["first_byte_ms"]),
                    time(answer["total_ms"]),
                )
            )
    yield from _table(columns, rows)
    yield from _events(record)


def _events(record: Record) -> Iterator[str]:
    rows = [
        (
            str(step["step"]),
            "; ".join(_event(event) for event in step["events"]),
            _states(step["before"]),
            _states(step["after"]),
        )
        for step in record["steps"]
    ]
    yield from _table(("step", "loads and stops", "processes before", "processes after"), rows)


def _figures(record: Record) -> Iterator[str]:
    yield from ("## Hot and cold, by model", "")
    rows = [
        (
            row["model"],
            row["path"],
            str(row["answers"]),
            *(_spread(row[name]) for name in ("first_byte_ms", "total_ms")),
            *(_spread(row[name] if row["path"] == "cold" else None) for name in ("wait_ms", "load_ms")),
        )
        for row in figures(record)
    ]
    yield from ("Least, median and most where there are several answers.", "")
    yield from _table(("model", "path", "answers", "first byte", "total", "wait", "load"), rows)
    yield from (NOTE, "")


def _available(record: Record) -> Iterator[str]:
    yield from ("## Configured, resident, ready", "")
    at_last = record["steps"][-1]["after"] if record["steps"] else record["running"]
    names = dict.fromkeys([*(entry["model"] for entry in record["presets"]), *at_last])
    rows = []
    for name in names:
        state = at_last.get(name, "none")
        rows.append((name, "yes", state, _yes(state in RESIDENT), _yes(state == "ready")))
    yield from _table(("model", "configured", "process", "resident", "ready"), rows)


def _conclusions(record: Record) -> Iterator[str]:
    if record["steps"]:
        yield from ("## Observed", "", *(f"- {text(line)}" for line in conclusions(record)), "")
    yield from ("## Not observed", "", *(f"- {text(line)}" for line in not_observed(record)), "")


def _signatures() -> Iterator[str]:
    yield from ("## Signatures", "")
    yield from _table(("", "name", "date", "signature"), [(role, "", "", "") for role in SIGNATURES])


def _processes(record: Record) -> dict[str, Record]:
    return {
        answer["instance"]: answer["process"]
        for step in record["steps"]
        for answer in step["answers"]
        if answer["process"]
    }


def _steps_of(record: Record, instance: str) -> str:
    steps = [s["step"] for s in record["steps"] if instance in {a["instance"] for a in s["answers"]}]
    return ", ".join(map(str, steps))


def _event(event: Record) -> str:
    words = what_happened(event) or f"{event['model']} began to load"
    return f"{time(event['at_ms'])}: {words}"


def _states(running: dict[str, str]) -> str:
    return ", ".join(f"{name} {state}" for name, state in running.items()) or "none"


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _limit(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if name == "models_max" and value == 0 else f"{value:g}"


def _spread(values: Sequence[float] | None) -> str:
    if values is None:
        return ""
    return " – ".join(time(value) for value in values) if values[0] != values[-1] else time(values[0])


def time(milliseconds: float | None) -> str:
    """Return a time for people, empty for None."""
    if milliseconds is None:
        return ""
    return f"{milliseconds:.0f} ms" if milliseconds < 10_000 else f"{milliseconds / 1000:.1f} s"


def size(count: int | None) -> str:
    """Return bytes for people, `unknown` for None."""
    if count is None:
        return "unknown"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def code(words: str) -> str:
    """Return words as Markdown code, whatever they contain."""
    fence = "``" if "`" in words else "`"
    pad = " " if "`" in words else ""
    return f"{fence}{pad}{words}{pad}{fence}"


def text(words: str) -> str:
    """Return words so that Markdown shows them as they are, in one line."""
    plain = " ".join(words.split())
    return _MARKS.sub(r"\\\g<0>", plain)


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    columns = list(columns)
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(map(text, row))} |"
    yield ""
