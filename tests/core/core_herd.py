"""A hand-driven herd for tests of the core: it keeps the state, and each call is one step."""

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core.explain import explain, unexplained
from llamastead.supervisor.core.state import (
    Claims,
    Demand,
    Device,
    Instance,
    ModelSpec,
    Policy,
    State,
    initial,
)
from llamastead.supervisor.core.step import Step, step

EXAMPLES = int(os.environ.get("CORE_EXAMPLES", "60"))
"""How many random histories are tried."""


def shuffler(seed: int) -> Callable[[list[Any]], list[Any]]:
    """Return a function that gives back lists in random order."""
    chance = random.Random(seed)
    return lambda items: chance.sample(items, len(items))


def spec(name: str, **fields: Any) -> ModelSpec:
    """Return a registry entry with a revision of its own."""
    return ModelSpec(name, fields.pop("revision", f"rev-{name}"), **fields)


class Herd:
    """State and facts of a herd; `t` is its clock. Facts are sent whole with each `see`."""

    def __init__(self, *models: ModelSpec | str, recover: bool = True, **policy: Any) -> None:
        specs = [spec(m) if isinstance(m, str) else m for m in models]
        self.t = 0.0
        capacity: Mapping[str, int] = policy.pop("capacity", {})
        self.state: State = initial(Policy(**policy), "h-1", {s.name: s for s in specs}, seed="s")
        self.waiting: dict[str, Demand] = {}
        self.claims: dict[str, Claims] = {}
        self.last = Step(self.state, (), None)
        self.read(**{name: Device(total) for name, total in capacity.items()})
        if recover:
            self.do(ev.RecoveryDone())

    def do(self, event: ev.Event, at: float | None = None) -> tuple[act.Action, ...]:
        """Take one step and return its actions."""
        self.t = self.t if at is None else at
        self.last = step(self.state, event, self.t)
        self.state = self.last.state
        assert not unexplained(self.state)
        return self.last.actions

    def read(
        self, seen: Mapping[str, Mapping[str, int]] | None = None, **devices: Device
    ) -> tuple[act.Action, ...]:
        """Let devices be read, those that are not named as before, and say what processes use."""
        return self.do(ev.DevicesRead({**self.state.devices, **devices}, seen or {}))

    def tick(self, at: float) -> tuple[act.Action, ...]:
        """Let time pass."""
        return self.do(ev.Tick(), at)

    def see(self, at: float | None = None) -> tuple[act.Action, ...]:
        """Send the facts."""
        return self.do(ev.Observed(dict(self.waiting), dict(self.claims)), at)

    def ask(self, *models: str, at: float | None = None, tickets: int = 1) -> tuple[act.Action, ...]:
        """Enrol tickets for models, now, and send the facts."""
        self.t = self.t if at is None else at
        for model in models:
            old = self.waiting.get(model)
            self.waiting[model] = Demand(old.first if old else self.t, tickets + (old.tickets if old else 0))
        return self.see()

    def give_back(self, model: str, at: float | None = None) -> tuple[act.Action, ...]:
        """Let all tickets of a model leave."""
        del self.waiting[model]
        return self.see(at)

    def lease(self, model: str, count: int = 1, last_used: float | None = None) -> tuple[act.Action, ...]:
        """Let a model's instance be held so often (0: by nobody, used last now)."""
        used = self.t if last_used is None else last_used
        self.claims[self.of(model).id] = Claims(count, used)
        return self.see()

    def of(self, model: str) -> Instance:
        """Return the instance of a model."""
        found = self.state.instance_of(model)
        assert found is not None, model
        return found

    def serve(self, model: str, at: float | None = None, used: float | None = None) -> None:
        """Bring a model that was just started to ready, grant its tickets, and let them be done."""
        own = self.of(model).id
        self.do(ev.BecameReady(own), at)
        granted = self.waiting.pop(model, None)
        self.do(ev.Granted(own, 1 if granted else 0))
        self.claims[own] = Claims(0, used if used is not None else (self.t if granted else None))
        self.see()

    def exit(self, instance: str, at: float | None = None, **fields: Any) -> tuple[act.Action, ...]:
        """Let the process of an instance be gone."""
        self.claims.pop(instance, None)
        return self.do(exited(instance, **fields), at)

    def why(self, model: str) -> str:
        """Return why a model's entry waits, as a person reads it."""
        return next(row.text for row in explain(self.state, self.t) if row.model == model)

    def change(self, **specs: ModelSpec | None) -> tuple[act.Action, ...]:
        """Send a registry in which these entries differ (None: they are gone)."""
        models: Mapping[str, ModelSpec | None] = {**self.state.models, **specs}
        return self.do(ev.RegistryChanged({name: s for name, s in models.items() if s is not None}))

    def force(self, instance: str, **fields: Any) -> None:
        """Set fields of an instance outright, to build a situation."""
        self.state = self.state.put(replace(self.state.instances[instance], **fields))


def exited(instance: str, **fields: Any) -> ev.Exited:
    """Return the end of an instance: asked for, if nothing else is said."""
    from llamastead.shared.words import EndClass

    return ev.Exited(
        instance, fields.pop("end_class", EndClass.STOPPED), fields.pop("reason", "stopped"), **fields
    )


def kinds(actions: tuple[act.Action, ...]) -> list[type]:
    """Return the kinds of some actions, in their order."""
    return [type(action) for action in actions]


def ready(herd: Herd, *models: str, at: float = 0.0, used: float | None = None) -> None:
    """Load models for one request each, which is done at once."""
    for model in models:
        herd.ask(model, at=at)
        herd.serve(model, used=used if used is not None else at)


def started(actions: tuple[act.Action, ...]) -> list[str]:
    """Return the models that a step starts."""
    return [action.model for action in actions if isinstance(action, act.Start)]


def stopped(herd: Herd, actions: tuple[act.Action, ...]) -> list[str]:
    """Return the models that a step asks to stop."""
    return [herd.state.instances[a.instance].model for a in actions if isinstance(a, act.TryStop)]
