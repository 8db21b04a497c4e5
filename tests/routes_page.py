"""docs/routes.md, made from the table of routes: `python tests/routes_page.py > docs/routes.md`."""

import sys
from dataclasses import replace
from pathlib import Path

from llamastead.gateway.routes import ROUTES, WEBSOCKET, Access, Route

PAGE = Path(__file__).parent.parent / "docs" / "routes.md"
# Reads that the engine can't answer asleep, so the gateway refuses them then.
WAKES = ("/slots", "/lora-adapters")

HEAD = """\
# Routes

Made from the table in `gateway/routes.py` by `tests/routes_page.py`; a test keeps it current, and
`tests/system/test_monitoring.py` tries each row on a real engine.

- **model**: whether the request names a model. A POST may name it in the body (JSON or a form), else in
  the query as `?model=`; both together must mean the same model. A GET and a WebSocket name it in the query.
- **loads**: whether a model that is not loaded is loaded for it. Otherwise such a request is a 400 `model
  is not loaded`. `?autoload=true` or `false` on the request decides, also as header
  `X-Llamastead-Autoload`, else this table and `--models-autoload`. The header's `false`, and a key of
  `--probe-key`, stand against any address: 503.
- **wakes**: whether an engine asleep is woken (`--sleep-idle-seconds`). Otherwise the gateway answers
  itself, or says 400 as above.
- **use**: whether it counts as use of the model, for the choice of what to stop and for `unload-after`.
  What does not count still can't be cut while it runs.
- **key**: which key it wants where keys are set: none, an inference key (`--api-key`, `--api-key-file`) or
  an admin key (`--admin-key`; without admin keys the inference keys do). A wrong key is 401, an inference
  key on an admin route 403.

HEAD is answered where GET is, OPTIONS everywhere. llama-server's web UI is under `/` and its pages; no key
is needed for them. Any other path is a 404, for which a key is wanted first where keys are set;
a WebSocket at a path that is not the gateway's own goes to the instance ([streams](streams.md)).

| method | path | model | loads | wakes | use | key |
|---|---|---|---|---|---|---|
"""

TAIL = """
## Watching without disturbing

`GET /v1/models/{id}` (or HEAD) is the cheap check of one model: a few hundred microseconds, no Redis, no
engine. `GET /models` is the same for all, `/metrics` and `/queue` tell about the herd. A probe that sends a
real chat should say `X-Llamastead-Autoload: false`: it then only tests models that are loaded anyway, and a
model that is not is a 503 at once, with no load and no place in the queue.

`GET /metrics?model=` is the engine's own page. Some engines count a look at it as work, so one that has
done nothing since the last look is not asked again: its last page is shown, with the gauges at 0. Counters
start again at 0 with each load, which Prometheus' `rate()` expects.
"""


def row(route: Route) -> str:
    """Return the table's line for a route."""
    asked = "with `?autoload=true`" if route.use else "no"
    cells = (
        route.method,
        f"`{route.path.replace('*', '…')}`",
        "yes" if route.needs_model else ("with `?model=`" if route.use else "no"),
        "yes" if route.may_load else asked,
        "yes" if route.may_load else ("with `?autoload=true`" if route.path in WAKES else "no"),
        {None: "–", "inference": "yes"}.get(route.use, "no"),
        {Access.OPEN: "none"}.get(route.access, str(route.access)),
    )
    return f"| {' | '.join(cells)} |\n"


def page() -> str:
    """Return the text of docs/routes.md."""
    socket = replace(WEBSOCKET, method="WebSocket")
    return HEAD + "".join(map(row, (*ROUTES, socket))) + TAIL


if __name__ == "__main__":
    sys.stdout.write(page())
