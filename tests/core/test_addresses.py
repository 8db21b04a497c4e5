"""Where instances listen, as text and back."""

import pytest

from llamastead.shared.addresses import TcpAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    "address",
    [UnixAddress("/run/i/box-1-1/e.sock"), TcpAddress("10.0.0.5", 42000), TcpAddress("fd00::5", 1)],
)
def test_an_address_survives_being_written_down(address):
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "unix:", "tcp:", "tcp:host", "tcp:host:", "tcp::80", "tcp:h:0", "tcp:h:65536", "http://h:80"]
)
def test_anything_else_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match="address is unix"):
        parse_address(text)


def test_a_url_has_brackets_around_ipv6():
    assert [TcpAddress(host, 80).authority for host in ("fd00::5", "box")] == ["[fd00::5]:80", "box:80"]
