"""How much of each device stays free: `--models-memory-margin`, llama-server's flag with more to say."""

from collections.abc import Mapping

from llamastead.shared.devices.device import HOST, Device

MIB = 1 << 20
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


def margin(device: Device, margins: Mapping[str, int]) -> int:
    """Return the bytes of a device that stay free: 1024 MiB of a GPU, a tenth of the host, unless said."""
    if device.name in margins:
        return margins[device.name] * MIB
    if device.name == HOST:
        return device.total * HOST_MARGIN_SHARE // 100
    return margins.get("", GPU_MARGIN_MIB) * MIB
