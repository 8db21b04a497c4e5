"""The state under construction during one step: local to it, so that `step` stays a function of its
arguments.
"""

from dataclasses import replace
from typing import Any

from llamastead.shared.errors import ApiError
from llamastead.supervisor.core import lifecycle
from llamastead.supervisor.core.actions import Action, FailTickets
from llamastead.supervisor.core.state import Instance, State


class Draft:
    """Collects what one step changes and wants done; `now` is the step's time, `wake_at` the earliest one
    asked for.
    """

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []
        self.wake_at: float | None = None

    def do(self, *actions: Action) -> None:
        """Append actions, in order."""
        self.actions.extend(actions)

    def wake(self, at: float) -> None:
        """Ask to be called again at this time, if it is yet to come."""
        if at > self.now and (self.wake_at is None or at < self.wake_at):
            self.wake_at = at

    def set(self, instance: Instance, **fields: Any) -> Instance:
        """Change fields of an instance and return it as it is now."""
        changed = replace(instance, **fields)
        if changed != instance:
            self.state = self.state.put(changed)
        return changed

    def change(self, instance: Instance, change: lifecycle.Change, **fields: Any) -> Instance:
        """Move an instance along the table of its life and return it as it is now. Raises
        IllegalChangeError.
        """
        return self.set(instance, state=lifecycle.after(instance.state, change), **fields)

    def drop_instance(self, instance: Instance) -> None:
        """Forget an instance that has ended."""
        rest = {name: other for name, other in self.state.instances.items() if name != instance.id}
        self.state = replace(self.state, instances=rest)

    def drop_demand(self, model: str) -> None:
        """Forget the tickets of a model: they were settled by what this step does."""
        if model in self.state.demands:
            rest = {name: demand for name, demand in self.state.demands.items() if name != model}
            self.state = replace(self.state, demands=rest)

    def drop_order(self, model: str) -> None:
        """Forget the ordered load of a model: it was done, failed or was taken back."""
        if model in self.state.orders:
            rest = {name: first for name, first in self.state.orders.items() if name != model}
            self.state = replace(self.state, orders=rest)

    def fail(self, model: str, error: ApiError) -> None:
        """Settle all that wait for a model with an error, its ordered load included."""
        if model in self.state.demands:
            self.do(FailTickets(model, error))
            self.drop_demand(model)
        self.drop_order(model)
