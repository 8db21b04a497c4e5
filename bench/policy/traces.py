"""The traces: who sends what when. The same seed gives the same traces; `share` shortens them for tests."""

from random import Random

from bench.policy.world import Client, Model, Trace

# Seconds between an agent's answer and its next request: none, a network's, a tool's.
PAUSES = {
    "ping-pong": (0.0, 0.0),
    "ping-pong, network": (0.02, 0.1),
    "ping-pong, tools": (0.5, 2.0),
}
# Those where the next request comes as soon as the answer is there.
PING_PONG = ("ping-pong", "ping-pong, network")


def traces(seed: int = 1, share: float = 1.0) -> tuple[Trace, ...]:
    """Return all traces, with `share` of their requests."""
    return (
        _uniform(seed, share),
        _bursty(seed, share),
        *(_ping_pong(seed, share, name, pause) for name, pause in PAUSES.items()),
        _hot_and_cold(seed, share),
        _several_slots(seed, share),
        _crowd(seed, share),
    )


def _ping_pong(seed: int, share: float, name: str, pause: tuple[float, float]) -> Trace:
    """Three agents, each with a model of its own, room for one; each sends when its last answer came."""
    chance = _chance(seed, name)
    clients = tuple(
        Client(
            model,
            0.0,
            tuple((chance.uniform(*pause), chance.uniform(0.3, 1.2)) for _ in range(_of(100, share))),
        )
        for model in ("coder", "planner", "critic")
    )
    return Trace(name, {client.model: Model(load=10.0) for client in clients}, 1, clients)


def _hot_and_cold(seed: int, share: float) -> Trace:
    """Four clients keep one model busy without a break, five others are wanted now and then; room for one."""
    chance = _chance(seed, "hot")
    hot = tuple(
        Client("hot", 0.1 * k, tuple((0.0, chance.uniform(1.0, 4.0)) for _ in range(_of(150, share))))
        for k in range(4)
    )
    models = {"hot": Model(load=8.0), **{f"cold-{k}": Model(load=5.0) for k in range(5)}}
    cold = _arrivals(chance, [f"cold-{k}" for k in range(5)], _of(12, share), every=40.0, service=(0.5, 3.0))
    return Trace("hot and cold tail", models, 1, hot + cold)


def _uniform(seed: int, share: float) -> Trace:
    chance = _chance(seed, "uniform")
    names = [f"model-{k}" for k in range(6)]
    clients = _arrivals(chance, names, _of(300, share), every=2.5, service=(1.0, 4.0))
    return Trace("uniform", {name: Model(load=5.0) for name in names}, 3, clients)


def _bursty(seed: int, share: float) -> Trace:
    chance = _chance(seed, "bursty")
    names = [f"model-{k}" for k in range(6)]
    clients: list[Client] = []
    begins = 0.0
    for _ in range(_of(40, share)):
        begins += chance.expovariate(1 / 20.0)
        model = chance.choice(names)
        clients += [
            Client(model, begins + chance.uniform(0.0, 2.0), ((0.0, chance.uniform(0.5, 3.0)),))
            for _ in range(chance.randint(4, 16))
        ]
    return Trace("bursty", {name: Model(load=6.0) for name in names}, 2, tuple(clients))


def _several_slots(seed: int, share: float) -> Trace:
    """Ten models, large and small, liked and not; some answers are long; one has priority; room for three."""
    chance = _chance(seed, "several")
    models = {
        f"model-{k}": Model(load=3.0 + 2.0 * k, stop=0.3 + 0.2 * k, priority=int(k == 7)) for k in range(10)
    }
    liked = [name for k, name in enumerate(models) for _ in range(10 // (k + 1))]
    clients = _arrivals(chance, liked, _of(200, share), every=4.0, service=(0.5, 6.0))
    long = _arrivals(chance, liked, _of(20, share), every=40.0, service=(30.0, 60.0))
    steady = (Client("model-0", 0.0, tuple((0.0, chance.uniform(2.0, 5.0)) for _ in range(_of(200, share)))),)
    return Trace("several slots", models, 3, clients + long + steady)


def _crowd(seed: int, share: float) -> Trace:
    """Twelve models at once where there is room for one."""
    chance = _chance(seed, "crowd")
    models = {f"model-{k}": Model(load=8.0) for k in range(12)}
    clients = tuple(
        Client(
            name,
            chance.uniform(0.0, 5.0),
            tuple((0.0, chance.uniform(1.0, 4.0)) for _ in range(_of(20, share))),
        )
        for name in models
    )
    return Trace("crowd", models, 1, clients)


def _arrivals(
    chance: Random, names: list[str], number: int, *, every: float, service: tuple[float, float]
) -> tuple[Client, ...]:
    """Return single requests for models drawn from `names`, `every` so many seconds on average."""
    at, clients = 0.0, []
    for _ in range(number):
        at += chance.expovariate(1 / every)
        clients.append(Client(chance.choice(names), at, ((0.0, chance.uniform(*service)),)))
    return tuple(clients)


def _of(number: int, share: float) -> int:
    return max(1, round(number * share))


def _chance(seed: int, name: str) -> Random:
    return Random(f"{seed} {name}")  # noqa: S311 - traces must repeat, not surprise
