"""Devices as an engine lists them, for those that nothing else tells of."""

import re
from dataclasses import dataclass

from llamastead.shared.devices.device import MIB

HEADING = "Available devices:"
_DEVICE = re.compile(
    r"\s+(?P<name>[A-Za-z]+\d+): (?P<what>.*) \((?P<total>\d+) MiB, (?P<free>\d+) MiB free\)"
)
_UNIFIED = re.compile(r"ggml_vulkan: (\d+) = .*\| uma: 1 \|")


@dataclass(frozen=True)
class Listed:
    """One line of an engine's list: its own name of the device (CUDA0, Vulkan1), and bytes.

    `unified` says that its memory is the host's, so far as the engine tells.
    """

    name: str
    description: str
    total: int
    free: int
    unified: bool = False


def parse_listing(text: str) -> tuple[Listed, ...] | None:
    """Return what `llama-server --list-devices` printed on both outputs, in its order; None if that is no
    list. What has no memory of its own, as a library for the processor, is left out.
    """
    before, heading, rest = text.partition(HEADING)
    if not heading:
        return None
    unified = {f"Vulkan{index}" for index in _UNIFIED.findall(before + rest)}
    return tuple(
        Listed(
            found["name"],
            found["what"].strip(),
            int(found["total"]) * MIB,
            int(found["free"]) * MIB,
            found["name"] in unified,
        )
        for found in map(_DEVICE.fullmatch, rest.splitlines())
        if found and int(found["total"])
    )
