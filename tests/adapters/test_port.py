"""A free port is found whatever range the kernel keeps for itself; an address must be ours."""

import socket

import pytest

from nereus_adapters.rollout import port


def test_a_port_lies_below_those_that_the_kernel_hands_out():
    if (first := int(port._RANGE.read_text().split()[0])) > 1024:
        assert 1024 <= port.free_port() < first


@pytest.mark.parametrize("kept", ["1024 60999", "1 65535"])
def test_the_kernel_is_asked_where_it_keeps_all_ports(tmp_path, monkeypatch, kept):
    told = tmp_path / "ip_local_port_range"
    told.write_text(kept)
    monkeypatch.setattr(port, "_RANGE", told)
    found = port.free_port()
    assert found >= 1024
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", found))


def test_an_address_of_another_host_is_refused():
    with pytest.raises(OSError, match="assign"):
        port.free_port("203.0.113.7")  # RFC 5737: of no host
