"""What an operator says of devices: how much stays free (`--models-memory-margin`, llama-server's flag with
more to say), and how much there is (`--device-memory`).
"""

from collections.abc import Mapping

from llamastead.shared.devices.device import HOST, MIB, Device

GPU_MARGIN_MIB = 1024
HOST_MARGIN_SHARE = 10  # per cent


def parse_margins(text: str) -> Mapping[str, int]:
    """Return MiB by device; "" stands for every GPU that is not named. ValueError says what is expected.

    `512` is for each GPU, `512,gpu1=2048,host=4096` names others.
    """
    margins: dict[str, int] = {}
    for word in (part.strip() for part in text.split(",") if part.strip()):
        name, equals, number = word.rpartition("=")
        if not number.isdecimal() or (equals and not name) or name in margins:
            raise ValueError("expected MiB, such as 1024, or 1024,gpu1=2048,host=4096")
        margins[name] = int(number)
    return margins


def parse_sizes(text: str) -> Mapping[str, int | None]:
    """Return bytes by device, None for one that shares the host's memory. ValueError says what is expected.

    `gpu0=20000,Vulkan0=host` gives one a size and has the other share.
    """
    sizes: dict[str, int | None] = {}
    for word in (part.strip() for part in text.split(",") if part.strip()):
        name, _, size = word.partition("=")
        shares = size == HOST and name != HOST
        if not name or name in sizes or not (shares or (size.isdecimal() and int(size))):
            raise ValueError("expected MiB by device, or host, such as gpu0=20000,Vulkan0=host")
        sizes[name] = None if shares else int(size) * MIB
    return sizes


def margin(device: Device, margins: Mapping[str, int]) -> int:
    """Return the bytes of a device that stay free: 1024 MiB of a GPU, a tenth of the host, unless said."""
    if device.name in margins:
        return margins[device.name] * MIB
    if device.name == HOST:
        return device.total * HOST_MARGIN_SHARE // 100
    return margins.get("", GPU_MARGIN_MIB) * MIB
