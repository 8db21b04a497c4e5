"""docs/compatibility.md: the table of answers that differ, and what no single answer shows.

`PYTHONPATH=tests python tests/system/compat_page.py` prints it.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from compat_table import DIFFERENCES

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


@dataclass(frozen=True)
class Behaviour:
    """A difference that no single answer shows; `test` is what tries ours."""

    what: str
    theirs: str
    ours: str
    test: str


BEHAVIOUR: tuple[Behaviour, ...] = (
    Behaviour(
        "a busy model and a request for another one, with one place",
        "new requests for the busy one are let in first, for as long as they come",
        "after `--max-wait` the busy one takes nobody new in, finishes, and makes room",
        "system/test_scheduling_one_place.py::test_r8_a_busy_model_does_not_starve_another",
    ),
    Behaviour(
        "`POST /models/load` while all places are busy, or several at once",
        "500 `model limit reached`",
        "waits in the queue like any demand",
        "core/test_core_orders.py::test_loads_queue_like_any_demand_instead_of_failing",
    ),
    Behaviour(
        "`POST /models/load` right after an unload",
        "400 `already running`, then the model goes down: the load is lost",
        "loaded as soon as the old process is gone",
        "core/test_core_orders.py::test_a_load_ordered_right_after_an_unload_waits_until_the_old_one_is_gone",
    ),
    Behaviour(
        "`POST /models/unload` during a load",
        "shown as a failure with exit code 1",
        "stopped, no failure; those who wait are told",
        "system/test_scheduling_one_place.py::test_c33_an_unload_ends_a_load_at_once",
    ),
    Behaviour(
        "`POST /models/unload` of a model that answers",
        "cut",
        'drained: running answers finish; `"force": true` cuts',
        "core/test_core_orders.py::test_unload_of_a_busy_model_answers_at_once_and_drains",
    ),
    Behaviour(
        "an engine dies in the middle of a stream",
        "status 200 and a bare text after the last event",
        "an error event in the stream's own form, then the connection closes",
        "system/test_clients.py::test_c129_the_node_client_takes_pings_and_shows_errors",
    ),
    Behaviour(
        "`/v1/stream` of a conversation that still waits in the queue",
        "404; 503 only while the model loads",
        "503 with `Retry-After` in the queue and in the load",
        "system/test_conversations.py::test_c135_one_that_waits_says_so_and_survives_its_socket",
    ),
    Behaviour(
        "`POST /models` of a repository that is not there",
        "200, fails later",
        "refused at once with a short reason",
        "system/test_downloads.py::test_what_cannot_be_had_is_refused_at_once",
    ),
    Behaviour(
        "reading the metrics of a model that sleeps when idle (builds up to b10434)",
        "keeps it awake, or wakes it",
        "neither",
        "system/test_monitoring.py::test_c79_a_model_that_is_scraped_falls_asleep_on_time",
    ),
)


HEAD = """\
# Compatibility with llama-server's router

Made by `tests/system/compat_page.py`. The tests start the router of `llama-server` and Llamastead on the
same models, send both the same requests and compare status, headers and the shape of the body. They fail on a
difference that is not listed here, and on a listed one that no longer occurs. They run against b10068;
`make test-engine ENGINE=/path/to/llama-server` runs them against another build.

Not compared: `Server`, `Date`, `Connection`, `Keep-Alive`, `Content-Length`, `Accept-Ranges`, empty headers,
ids, times and other values that change from answer to answer. `X-Request-Id` and `X-Llamastead-…` are ours.

## Answers that differ

| what | llama-server's router | Llamastead | why |
|---|---|---|---|
"""


FILES = """
## Files and flags that are read otherwise

`llamastead check` tells where a file is concerned; docs/presets.md and docs/flags.md have the whole. What is
not here is compared in `tests/shell/test_registry_against_router.py`.

| what | llama-server's router | Llamastead | why |
|---|---|---|---|
"""
READ_OTHERWISE: tuple[tuple[str, str, str, str], ...] = (
    (
        "`samplers = top_k;top_p`",
        "ends at the `;`",
        "the whole list: a comment starts a line or follows a blank",
        "The list was cut without a word.",
    ),
    (
        "quotes around a value",
        "part of it",
        "removed",
        "Paths with blanks are quoted everywhere else.",
    ),
    (
        "keys before the first section",
        "a model called `default`",
        "for all models",
        "Nobody meant a model.",
    ),
    (
        "`host`, `port`, `tools`, `ui`, `models-max` and the like in a section",
        "in `status.args`, partly without effect",
        "ignored, with a warning",
        "They are the herd's, or would open an engine to others.",
    ),
    (
        "`hf-token`",
        "in `status.args` and on the engine's command line",
        "in its environment",
        "Anybody on the machine could read it.",
    ),
    (
        "`model-UD-Q4_K_XL.gguf` in the cache",
        "`org/repo:Q4_K_XL`",
        "`org/repo:UD-Q4_K_XL`, the other an alias",
        "What was asked for is what is listed, and two files never share a name.",
    ),
    (
        "a folder per quantisation, files without it in their names",
        "not listed",
        "listed",
        "The standard tools place them so.",
    ),
    (
        "several models in one sub-folder of `--models-dir`",
        "the last one seen",
        "the one named like the folder, else each as `folder/file`",
        "Nothing is guessed.",
    ),
    (
        "shards in the models folder itself",
        "one entry each",
        "one entry",
        "Only the first one loads.",
    ),
    (
        "a projector where only the model is a link",
        "not found",
        "found beside the link's target",
        "Stores keep them together.",
    ),
    (
        "a missing shard or projector",
        "found out by the engine",
        "refused before a start, with its name",
        "The weights would be read for nothing.",
    ),
    (
        "`ctx-size = lots` in a preset",
        "found out by the engine",
        "told at the start, too",
        "So it is known before the first request.",
    ),
    (
        "an alias that is taken, on reload",
        "left out, with a warning",
        "the file changes nothing, with the line",
        "A file holds as a whole or not at all.",
    ),
    (
        "`AIP_MODE=PREDICTION` and its like (Vertex AI)",
        "the port and a route in Vertex AI's form",
        "not heeded",
        "Give `--port`, and a proxy that wraps requests.",
    ),
    (
        "a preset repository (`-hf`)",
        "only while the hub answers",
        "fetched once, then from the cache",
        "An outage must not stop a start.",
    ),
)


MORE = """
## What happens otherwise

What no single answer shows. The left column was observed from outside at b11434, and at older builds where
they are named; a test tries the right one.

| when | llama-server's router | Llamastead |
|---|---|---|
"""


def page() -> str:
    """Return the text of docs/compatibility.md."""
    rows = [f"| {rule.what} | {rule.theirs} | {rule.ours} | {rule.why} |" for rule in DIFFERENCES]
    more = [f"| {one.what} | {one.theirs} | {one.ours} |" for one in BEHAVIOUR]
    files = [f"| {' | '.join(row)} |" for row in READ_OTHERWISE]
    return "\n".join((HEAD.rstrip(), *rows, MORE.rstrip(), *more, FILES.rstrip(), *files, ""))


if __name__ == "__main__":
    sys.stdout.write(page())
