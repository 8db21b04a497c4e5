"""The core's one function: what is known, what happened, what time it is → what is known now, what to do,
when next.
"""

from dataclasses import dataclass

from llamastead.supervisor.core.actions import Action
from llamastead.supervisor.core.draft import Draft
from llamastead.supervisor.core.events import Event
from llamastead.supervisor.core.handlers import handle
from llamastead.supervisor.core.schedule import look
from llamastead.supervisor.core.state import State


@dataclass(frozen=True)
class Step:
    """What comes of an event: the new state, what to do in this order, and when to call again at the
    latest.
    """

    state: State
    actions: tuple[Action, ...]
    wake_at: float | None


def step(state: State, event: Event, now: float) -> Step:
    """Take in an event at monotonic time `now` (seconds).

    Raises lifecycle.IllegalChangeError for an event that cannot happen to its instance; the state given
    stays valid.
    """
    draft = Draft(state, now)
    handle(draft, event)
    look(draft)
    return Step(draft.state, tuple(draft.actions), draft.wake_at)
