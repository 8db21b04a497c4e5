"""How much of each device stays free."""

import pytest

from llamastead.shared.devices.device import HOST, Device
from llamastead.shared.margins import margin, parse_margins, parse_sizes

GIB, MIB = 1 << 30, 1 << 20


def test_margins_are_for_all_gpus_or_by_name() -> None:
    """Say nothing, one number, and names beside it: GPUs and host get what is theirs."""
    gpu, other, host = (Device(name, 20 * GIB, 0) for name in ("gpu0", "gpu1", HOST))
    assert [margin(d, parse_margins("")) for d in (gpu, host)] == [GIB, 2 * GIB]
    assert [margin(d, parse_margins("512")) for d in (gpu, host)] == [512 * MIB, 2 * GIB]
    named = parse_margins("512, gpu1=2048,host=4096")
    assert [margin(d, named) for d in (gpu, other, host)] == [512 * MIB, 2 * GIB, 4 * GIB]


@pytest.mark.parametrize("text", ["x", "-1", "=5", "gpu0=", "1,2", "1.5"])
def test_a_margin_that_is_none_is_refused(text: str) -> None:
    """Give what is no MiB, no name, or twice: the error says what is expected."""
    with pytest.raises(ValueError, match="expected MiB"):
        parse_margins(text)


def test_sizes_are_by_name_and_a_device_may_share_the_host_s() -> None:
    """Give one a size and have another share; the host's own size can be said too."""
    assert parse_sizes("gpu0=1024, Vulkan0=host,host=2048") == {"gpu0": GIB, "Vulkan0": None, HOST: 2 * GIB}
    assert parse_sizes("") == {}


@pytest.mark.parametrize("text", ["1024", "gpu0=", "gpu0=0", "gpu0=x", "gpu0=1,gpu0=2", "=5", "host=host"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    """Give no name, no MiB, or a name twice: the error says what is expected."""
    with pytest.raises(ValueError, match="expected MiB by device"):
        parse_sizes(text)
