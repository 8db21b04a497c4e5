"""nginx and HAProxy with their default buffering, as operators put them in front."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ports import free_port, listens

PROXIES = ("nginx", "nginx-1.0", "haproxy")  # nginx speaks HTTP/1.0 unless it is told not to
_NGINX = """\
daemon off; worker_processes 1; {user} pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 64; }}
http {{
  access_log off; client_body_temp_path {folder}/n1; proxy_temp_path {folder}/n2;
  fastcgi_temp_path {folder}/n3; uwsgi_temp_path {folder}/n4; scgi_temp_path {folder}/n5;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://127.0.0.1:{upstream}; proxy_http_version {version}; proxy_read_timeout {silence}s;
    }}
  }}
}}
"""
_HAPROXY = """\
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server {silence}s
frontend clients
  bind 127.0.0.1:{port}
  default_backend herd
backend herd
  server gateway 127.0.0.1:{upstream}
"""


@asynccontextmanager
async def behind(name: str, folder: Path, upstream: int, silence_s: int = 60) -> AsyncIterator[int]:
    """Run a proxy of the port `upstream`; yield its own port once it listens. It cuts an answer that is
    silent for `silence_s`.
    """
    name, _, version = name.partition("-")
    program = shutil.which(name, path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    assert program is not None, f"{name} is not installed: apt-get install nginx-light haproxy"
    port = free_port()
    config = folder / f"{name}.conf"
    text = {"nginx": _NGINX, "haproxy": _HAPROXY}[name]
    fields = {"folder": folder, "port": port, "upstream": upstream, "user": _user(), "silence": silence_s}
    config.write_text(text.format(**fields, version=version or "1.1"))
    words = {
        "nginx": [program, "-p", str(folder), "-c", str(config), "-e", str(folder / "nginx.log")],
        "haproxy": [program, "-db", "-f", str(config)],
    }[name]
    log = (folder / f"{name}.out").open("wb")
    with log:
        process = await asyncio.create_subprocess_exec(*words, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(20):
            while not await listens(port):
                assert process.returncode is None, (folder / f"{name}.out").read_text()
                await asyncio.sleep(0.01)
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _user() -> str:
    # As root nginx's workers would run as somebody who may not write here.
    return "user root;" if Path("/proc/self").stat().st_uid == 0 else ""
