"""docker-compose.yml as a user starts it: one stack for the whole module, which every test leaves healthy."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from compose_clients import BackgroundStream, Load, Streamed, stream_chat
from compose_stack import LASTING, PATIENCE_S, ROOT, Stack, docker, kill, stack, until
from ports import free_port
from tiny import tiny_model_bytes

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

DEMO = "gemma-3-270m-q4_k_m"
TINY = ["tiny-1", "tiny-2"]


@pytest.fixture(scope="module")
def herd() -> Iterator[Stack]:
    """The stack with three gateways; the models volume has the demo model of the image, and tiny ones."""
    compose = os.environ.get("LLAMASTEAD_TEST_COMPOSE")
    if compose is None:
        pytest.skip("needs the container engine and the images that `make test-compose` brings")
    with stack("llamastead-test", free_port(), compose) as made:
        made.add_models({f"{name}.gguf": tiny_model_bytes(seed) for seed, name in enumerate(TINY)})
        made.up("--scale", "gateway=3")
        yield made


def ask(herd: Stack, model: str) -> httpx.Response:
    """Ask a short question through the balancer."""
    body = {"model": model, "prompt": "once", "max_tokens": 4}
    return httpx.post(f"{herd.url}/v1/completions", json=body, timeout=PATIENCE_S)


def answers(herd: Stack, model: str) -> bool:
    """Whether a request is answered now."""
    try:
        return ask(herd, model).status_code == 200
    except httpx.HTTPError:
        return False


def test_every_container_is_confined_and_only_loopback_is_published(herd: Stack) -> None:
    """Containers run as user, read-only, without capabilities; only the balancer has a port, on loopback."""
    assert len(herd.containers("gateway")) == 3
    for service in LASTING:
        for container in herd.containers(service):
            known = herd.inspect(container)
            host = known["HostConfig"]
            assert known["Config"]["User"] not in ("", "0", "root"), service
            assert host["ReadonlyRootfs"], service
            assert host["CapDrop"] == ["ALL"], service
            assert not host["CapAdd"], service
            assert "no-new-privileges:true" in host["SecurityOpt"], service
            published = [p for ports in known["NetworkSettings"]["Ports"].values() for p in ports or ()]
            expected = [{"HostIp": "127.0.0.1", "HostPort": str(herd.port)}] if service == "balancer" else []
            assert published == expected, service
            assert "@redis:" not in str(known["Config"]), "the password shows in docker inspect"


def test_the_demo_model_streams_chunk_by_chunk_through_the_balancer(herd: Stack) -> None:
    """The unprepared stack streams a real model's chat, and the balancer passes each token when it comes."""
    streamed = Streamed()
    stream_chat(herd.url, DEMO, 60, streamed)
    assert streamed.done
    assert streamed.text
    first, last = streamed.arrivals[0].at_s, streamed.arrivals[-1].at_s
    alone = [arrival for arrival in streamed.arrivals if arrival.events == 1]
    assert len(alone) >= 30, "tokens came in lumps"
    assert streamed.arrivals[len(streamed.arrivals) // 2].at_s < first + 0.8 * (last - first), (
        "most came at the end"
    )


def test_model_events_pass_the_balancer_at_once(herd: Stack) -> None:
    """A load shows in GET /models/sse, read through the balancer, before anything else follows."""
    model = TINY[1]
    with httpx.stream("GET", f"{herd.url}/models/sse", timeout=PATIENCE_S) as events:
        assert events.status_code == 200
        assert ask(herd, model).status_code == 200
        seen = ""
        for chunk in events.iter_text():
            seen += chunk
            if model in seen and "loaded" in seen:
                return
    pytest.fail(f"the stream ended: {seen}")


def test_gateways_scale_under_load_without_a_failed_request(herd: Stack) -> None:
    """Three gateways become one and three again while clients ask without pause; all are answered."""
    for model in TINY:
        assert ask(herd, model).status_code == 200
    with Load(herd.url, TINY, clients=6) as load:
        for gateways in (1, 3):
            herd.up("--no-recreate", "--scale", f"gateway={gateways}")
            assert len(herd.containers("gateway")) == gateways
            load.await_answers(50)
    assert load.failures == []


def test_a_killed_supervisor_leaves_the_stream_and_the_instance_alone(herd: Stack) -> None:
    """kill -9 of the supervisor in mid-stream: the stream is whole and the instance's pid stays."""
    assert ask(herd, DEMO).status_code == 200
    before = herd.processes("supervisor", DEMO)
    # Asked before the stream: the engine's client takes its time, and a stream of so many tokens not much.
    (old,) = herd.processes("supervisor", "llamastead supervisor")
    with BackgroundStream(herd.url, DEMO, tokens=100) as streamed:
        kill(old)
        assert not streamed.done, "the stream was over before the kill"
        until(lambda: set(herd.processes("supervisor", "llamastead supervisor")) - {old}, "a new supervisor")
    assert streamed.done
    until(lambda: herd.redis_cli("HGET", "llamastead:herd", "incarnation"), "a leader")
    again = until(lambda: answers(herd, DEMO) and ask(herd, DEMO), "an answer of the adopted instance")
    assert again.headers["X-Llamastead-Instance"] == streamed.instance
    assert herd.processes("supervisor", DEMO) == before
    assert herd.inspect(herd.containers("supervisor")[0])["RestartCount"] == 0


@pytest.mark.parametrize("service", LASTING)
def test_a_killed_service_comes_back(herd: Stack, service: str) -> None:
    """A service's process is killed from outside: it starts again by itself, is healthy, answers come."""
    container = herd.containers(service)[0]
    started = herd.inspect(container)["State"]["StartedAt"]
    assert herd.kill_main_process(service) == container
    until(lambda: herd.inspect(container)["State"]["StartedAt"] != started, f"{service} started again")
    until(lambda: herd.healthy(container), f"{service} healthy")
    until(lambda: answers(herd, TINY[0]), f"an answer after {service} was killed")


def test_redis_cli_reads_the_state(herd: Stack) -> None:
    """redis-cli in the Redis container shows models, gateways and the leader, with the password only."""
    assert ask(herd, TINY[0]).status_code == 200
    assert herd.redis_cli("HGET", f"llamastead:model:{TINY[0]}", "status") == "loaded"
    until(lambda: herd.redis_cli("ZCARD", "llamastead:gateways") == "3", "three gateways")
    assert herd.redis_cli("EXISTS", "llamastead:leader") == "1"
    assert "NOAUTH" in herd.compose("exec", "-T", "redis", "redis-cli", "GET", "llamastead:leader")


def test_the_command_works_inside_the_containers(herd: Stack) -> None:
    """`docker compose exec … llamastead` reaches Redis and a gateway without being told any password."""
    redis = herd.compose("exec", "-T", "supervisor", "llamastead", "redis", "EXISTS", "llamastead:leader")
    assert redis == "1"
    models = herd.compose("exec", "-T", "gateway", "llamastead", "ps", "--json")
    assert {DEMO, *TINY} <= {model["id"] for model in json.loads(models)}


def test_a_clean_stop_leaves_nothing(herd: Stack) -> None:
    """`docker compose stop` ends every container by itself and in time; `down -v` leaves nothing at all."""
    assert ask(herd, TINY[0]).status_code == 200
    engines = herd.processes("supervisor", "llama-server")
    assert engines
    herd.compose("stop")
    for service in LASTING:
        for container in herd.containers(service):
            assert herd.inspect(container)["State"]["ExitCode"] == 0, f"{service}:\n{herd.logs()}"
    assert not [pid for pid in engines if Path(f"/proc/{pid}").exists()]
    herd.down()
    assert herd.leftovers() == ""
    assert docker("ps", "--quiet") == "" or herd.project not in docker("ps")


def test_gpus_go_to_supervisor_and_worker(herd: Stack) -> None:
    """compose.gpu.yml: one CUDA image for all roles, GPUs for supervisor and worker, the rest as it was."""
    plain = json.loads(herd.compose("config", "--format", "json"))["services"]
    files = ("-f", str(ROOT / "docker-compose.yml"), "-f", str(ROOT / "compose.gpu.yml"))
    gpu = json.loads(herd.compose(*files, "config", "--format", "json"))["services"]
    assert gpu.keys() == plain.keys()
    for name, service in gpu.items():
        devices = service.get("deploy", {}).pop("resources", {}).get("reservations", {}).get("devices", [])
        assert bool(devices) == (name in ("supervisor", "worker")), name
        if service["image"] == "llamastead:cuda":
            assert service["build"]["dockerfile"] == "Dockerfile.llama"
            assert service["build"]["args"]["LLAMA_IMAGE"].endswith(":server-cuda")
        else:
            assert service["image"] == plain[name]["image"]
            assert name in ("redis", "balancer")


def test_the_example_file_lists_what_the_compose_files_take() -> None:
    """Every variable of .env.example is taken by a compose file, and every one that they take is in it."""
    files = [(ROOT / name).read_text() for name in ("docker-compose.yml", "compose.gpu.yml")]
    taken = [
        names for text in files for names in re.findall(r"\$\{(\w+)|^ +(LLAMA\w+):$", text, re.MULTILINE)
    ]
    listed = re.findall(r"^#(LLAMA\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({filled or passed_on for filled, passed_on in taken})
