"""Shows in Redis why each queue entry waits, so that any gateway can say so."""

from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.core.explain import explain
from llamastead.supervisor.core.state import State


class WaitBoard:
    """Writes `wait` (a sentence) and `wait_reason` (its word) of models that wait, when it changes."""

    def __init__(self, store: LeaderStore) -> None:
        self._store = store
        self._shown: dict[str, str] = {}

    async def show(self, state: State, now: float) -> None:
        """Bring the board in line with the reasons the core gave last; `now` is monotonic seconds."""
        explained = {entry.model: entry for entry in explain(state, now)}
        for model in self._shown.keys() - explained.keys():
            del self._shown[model]
            if model in state.models:
                await self._store.put_model(model, {"wait_reason": "", "wait": ""})
        for model, entry in explained.items():
            if model in state.models and self._shown.get(model) != entry.reason:
                self._shown[model] = entry.reason
                await self._store.put_model(model, {"wait_reason": entry.reason, "wait": entry.text})
