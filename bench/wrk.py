"""wrk as the load generator, where it is installed: C, so that it takes little from what it measures."""

import asyncio
import json
import math
import resource
import tempfile

from bench.client import HOST, PATIENCE_S, Load

_SCRIPT = """\
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [==[%s]==]
function done(summary, latency)
  local e = summary.errors
  io.write(string.format('\\n{"done":%%d,"microseconds":%%d,"errors":%%d,"p50":%%d,"p99":%%d}\\n',
    summary.requests, summary.duration, e.status + e.timeout, latency:percentile(50), latency:percentile(99)))
end
"""


async def repeat_with_wrk(port: int, path: str, document: object, connections: int, seconds: float) -> Load:
    """Ask the same over and over on kept connections; wrk counts in whole seconds."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_SCRIPT % json.dumps(document))
        script.flush()
        words = ["wrk", "-t1", f"-c{connections}", f"-d{math.ceil(seconds)}", "-s", script.name]
        before = _children_cpu()
        wrk = await asyncio.create_subprocess_exec(
            *words, f"http://{HOST}:{port}{path}", stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(seconds + PATIENCE_S):
                said, _ = await wrk.communicate()
        except BaseException:
            wrk.kill()
            await wrk.wait()
            raise
    found = json.loads(said.splitlines()[-1])
    micro = 1e-6
    return Load(
        found["done"],
        found["errors"],
        found["microseconds"] * micro,
        found["p50"] * micro,
        found["p99"] * micro,
        _children_cpu() - before,
    )


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
