"""What follows from a drill's record, and nothing that was not observed. Pure."""

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

Record = dict[str, Any]

ORDERLY = frozenset({"stopped", "evicted", "idle", "abandoned"})
MEASURED = ("first_byte_ms", "total_ms", "wait_ms", "load_ms")


def figures(record: Record) -> list[Record]:
    """Return for each model, hot and cold apart, how many whole answers there were and what they took.

    Each figure is least, median and most in milliseconds, None where no answer has it.
    """
    found = []
    for model in dict.fromkeys(answer["model"] for _, answer in _answers(record)):
        for path in ("cold", "hot"):
            whole = [
                a for _, a in _answers(record) if (a["model"], a["path"]) == (model, path) and not a["error"]
            ]
            if whole:
                spreads = {
                    name: _spread([a[name] for a in whole if a[name] is not None]) for name in MEASURED
                }
                found.append({"model": model, "path": path, "answers": len(whole), **spreads})
    return found


def conclusions(record: Record) -> list[str]:
    """Return what the steps showed, a sentence each; empty without steps."""
    if not record["steps"]:
        return []
    return [*_answered(record), *_paths(record), *_changes(record), *_returns(record), *_residency(record)]


def not_observed(record: Record) -> list[str]:
    """Return what a reader might take for shown but was not, a sentence each."""
    if not record["steps"]:
        return ["No drill was run: how models are loaded and stopped was not observed."]
    found = []
    asked = dict.fromkeys(answer["model"] for _, answer in _answers(record))
    rest = [entry["model"] for entry in record["presets"] if entry["model"] not in asked]
    if rest:
        found.append(f"Not asked for: {', '.join(rest)}.")
    for path in ("hot", "cold"):
        seen = {row["model"] for row in figures(record) if row["path"] == path}
        if missing := [model for model in asked if model not in seen]:
            found.append(f"No {path} answer of: {', '.join(missing)}.")
    if all(len(step["models"]) == 1 for step in record["steps"]):
        found.append("No step had two requests at once: what happens to a model in use was not observed.")
    found.append(
        "A cold answer may have read its model from the page cache: the first load after boot takes longer."
    )
    found.append("The memory of GPUs is not part of this record.")
    return found


def what_happened(event: Record) -> str:
    """Return a change of status in words, empty for the beginning of a load."""
    match event["status"]:
        case "loaded":
            return f"{event['model']} was loaded"
        case "sleeping":
            return f"{event['model']} went to sleep"
        case "unloaded":
            end_class = event.get("end_class", "")
            verb = "was stopped" if end_class in ORDERLY or not end_class else "ended"
            return f"{event['model']} {verb}" + (f" ({end_class})" if end_class else "")
    return ""


def _answers(record: Record) -> Iterator[tuple[int, Record]]:
    for step in record["steps"]:
        for answer in step["answers"]:
            yield step["step"], answer


def _spread(values: list[float]) -> list[float] | None:
    return [min(values), round(median(values), 1), max(values)] if values else None


def _answered(record: Record) -> Iterator[str]:
    answers = list(_answers(record))
    whole = sum(not answer["error"] for _, answer in answers)
    yield f"{whole} of {len(answers)} requests were answered in full."
    for step, answer in answers:
        if answer["error"]:
            yield f"Step {step}: {answer['model']} was not answered in full: {answer['error']}."


def _paths(record: Record) -> Iterator[str]:
    for path in ("cold", "hot"):
        count = Counter(a["model"] for _, a in _answers(record) if a["path"] == path and not a["error"])
        each = ", ".join(f"{model} {number}" for model, number in count.items())
        yield f"{path.capitalize()} answers: {f'{count.total()} ({each})' if count else 'none'}."


def _changes(record: Record) -> Iterator[str]:
    for step in record["steps"]:
        if words := list(filter(None, map(what_happened, step["events"]))):
            yield f"Step {step['step']}: {', then '.join(words)}."


def _returns(record: Record) -> Iterator[str]:
    """Tell of each model that came back in another process what had become of the one before."""
    ends = {
        e["instance"]: step["step"]
        for step in record["steps"]
        for e in step["events"]
        if e["status"] == "unloaded"
    }
    last: dict[str, Record] = {}
    for step, answer in _answers(record):
        if not answer["instance"]:
            continue
        before = last.get(answer["model"])
        if before and before["instance"] != answer["instance"] and before["instance"] in ends:
            yield (
                f"Step {step}: {answer['model']} came back {answer['path']} in a new process, "
                f"{answer['instance']}; {before['instance']} had ended in step {ends[before['instance']]}."
            )
        last[answer["model"]] = answer


def _residency(record: Record) -> Iterator[str]:
    most = max(len(step["after"]) for step in record["steps"])
    limit = record["herd"]["limits"]["models_max"]
    yield (
        f"At the ends of the steps at most {most} model{'s' if most != 1 else ''} had a process; "
        + (f"the limit is {limit}." if limit else "there is no limit.")
    )
