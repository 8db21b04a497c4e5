"""What a newly read registry has that the one before had not."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from llamastead.supervisor.registry.model import ModelEntry, Registry

# Follow from the options, from the files, or are told apart.
_DERIVED = frozenset(
    {"name", "options", "router_keys", "files", "path", "mmproj", "held", "may_be_presets", "revision"}
)


@dataclass(frozen=True)
class Changes:
    """Models that came, went, or are configured otherwise: those with the preset keys that differ, `files`
    among them where a file is another than before.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def shown(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        return asdict(self)


def compare(before: Registry, after: Registry) -> Changes:
    """Return what changed, in order of name."""
    old, new = before.entries, after.entries
    both = [name for name in new if name in old and new[name] != old[name]]
    return Changes(
        tuple(name for name in new if name not in old),
        tuple(name for name in old if name not in new),
        {name: _changed_keys(old[name], new[name]) for name in both},
    )


def _changed_keys(old: ModelEntry, new: ModelEntry) -> tuple[str, ...]:
    keys = {
        name
        for ours, theirs in ((old.options, new.options), (old.router_keys, new.router_keys))
        for name in {*ours, *theirs}
        if ours.get(name) != theirs.get(name)
    }
    keys |= {
        each.name.replace("_", "-")
        for each in fields(ModelEntry)
        if each.name not in _DERIVED and getattr(old, each.name) != getattr(new, each.name)
    }
    if (old.files, old.held) != (new.files, new.held) or (not keys and old.revision != new.revision):
        keys.add("files")
    return tuple(sorted(keys))
