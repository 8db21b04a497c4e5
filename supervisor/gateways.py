"""Which gateways have gone silent, judged on the supervisor's own clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Silence:
    """Watches heartbeat numbers in two passes: suspect after some seconds of silence, dead some later.

    Only time in which Redis answered counts: `look` is called with what was just read, and after an outage
    or a take-over a new `Silence` starts from nothing.
    """

    suspect_after: float
    swept_after: float
    _moved: dict[str, tuple[int, float]] = field(default_factory=dict)
    _suspects: dict[str, float] = field(default_factory=dict)

    def look(self, beats: Mapping[str, int], now: float) -> tuple[list[str], list[str]]:
        """Return the gateways that just became suspect and those that are dead.

        `beats` is gateway → heartbeat number, `now` is monotonic seconds. A gateway whose
        number moves is neither, whatever it was before.
        """
        suspects, dead = [], []
        for gateway, beat in beats.items():
            if self._moved.get(gateway, (None, 0.0))[0] != beat:
                self._moved[gateway] = (beat, now)
                self._suspects.pop(gateway, None)
            elif gateway in self._suspects:
                if now - self._suspects[gateway] >= self.swept_after:
                    dead.append(gateway)
            elif now - self._moved[gateway][1] >= self.suspect_after:
                self._suspects[gateway] = now
                suspects.append(gateway)
        for gone in self._moved.keys() - beats.keys():
            del self._moved[gone]
            self._suspects.pop(gone, None)
        return suspects, dead
