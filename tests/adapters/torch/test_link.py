"""Who does not know the job's secret gets a closed connection, and a line in the log."""

import logging
import os
import pickle
import socket
import struct
import threading

import pytest

from nereus_adapters.torch import link
from nereus_adapters.torch.folder import PoolFolder
from nereus_adapters.torch.link import Link, Refused, new_secret
from nereus_adapters.torch.serve import Drivers
from nereus_adapters.torch.wire import Call, receive, send_value
from nereus_core.cluster import Device

pytestmark = pytest.mark.real

DEVICE = Device("node0", 0)
SECRET = new_secret()


class Bomb:
    """Whoever unpickles it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder():
    made = PoolFolder.made()
    yield made
    made.remove()


@pytest.fixture
def drivers(folder):
    """A seat's side, in this process."""
    listener = folder.listening(DEVICE)
    served = Drivers(listener, SECRET, grace_s=0.3)
    thread = threading.Thread(target=served.serve, daemon=True)
    thread.start()
    yield served
    thread.join(30)
    assert not thread.is_alive()  # it ends by itself once no driver is there
    listener.close()


def raw(folder):
    return folder.connected(DEVICE, 10)


def driver(folder):
    return Link.as_driver(raw(folder), SECRET, 10)


def rest(peer):
    """What still comes until the other side closes."""
    found = b""
    try:
        while part := peer.recv(4096):
            found += part
    except ConnectionResetError:
        pass
    peer.close()
    return found


def test_calls_and_answers_cross(folder, drivers):
    ours = driver(folder)
    send_value(ours, Call(7, "hello", {"x": list(range(1000))}))
    theirs, call = drivers.next()
    assert call == Call(7, "hello", {"x": list(range(1000))})
    send_value(theirs, "answer")
    assert receive(ours) == "answer"
    ours.close()


def test_a_peer_without_the_secret_is_refused_and_its_pickle_never_read(
    folder, drivers, tmp_path, caplog
):
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    garbage = [
        b"",
        bomb + bytes(100),
        struct.pack("!QQ", 0, len(bomb)) + bytes(32) + bomb + bytes(100),
    ]
    for text in garbage:
        peer = raw(folder)
        peer.sendall(text)
        peer.shutdown(socket.SHUT_WR)
        assert len(rest(peer)) == 40  # the greeting, and nothing more
    with pytest.raises((EOFError, ConnectionError)):
        Link.as_driver(raw(folder), new_secret(), 10)
    assert not (tmp_path / "boom").exists()
    assert sum("refused a connection" in m for m in caplog.messages) == 4
    assert sum("does not know the job's secret" in m for m in caplog.messages) == 3
    driver(folder).close()  # the one that does is let in


def test_a_driver_does_not_trust_a_seat_without_the_secret(folder):
    with folder.listening(DEVICE) as listener:
        answered = threading.Thread(target=_false_seat, args=(listener,))
        answered.start()
        with pytest.raises(Refused, match="a seat was refused: it does not know"):
            driver(folder)
        answered.join(10)


def _false_seat(listener):
    peer, _ = listener.accept()
    peer.sendall(b"NEREUS01" + bytes(32))
    peer.recv(64)
    peer.sendall(bytes(32))
    peer.close()


def test_a_silent_peer_does_not_keep_the_driver_out(folder, drivers, monkeypatch):
    monkeypatch.setattr(link, "HANDSHAKE_S", 0.2)
    silent = raw(folder)
    driver(folder).close()
    rest(silent)


def test_a_second_driver_is_refused_while_there_is_one(folder, drivers, caplog):
    first = driver(folder)
    send_value(first, Call(0, "hello", {}))
    drivers.next()
    with pytest.raises((EOFError, ConnectionError)):
        driver(folder)
    assert "this seat has its driver" in caplog.text
    send_value(first, Call(1, "hello", {}))
    assert drivers.next()[1].id == 1
    first.close()


def test_calls_of_a_driver_that_is_gone_are_forgotten(folder, drivers):
    first = driver(folder)
    send_value(first, Call(0, "hello", {}))
    first.close()
    second = None
    while second is None:
        try:
            second = driver(folder)
        except (EOFError, ConnectionError):
            continue  # the seat has not seen the end of the first yet
    send_value(second, Call(5, "hello", {}))
    assert drivers.next()[1].id == 5
    second.close()


@pytest.fixture
def pair():
    """Both ends of one link, and the sockets under them."""
    here, there = socket.socketpair()
    made = []
    seat = threading.Thread(target=lambda: made.append(Link.as_seat(there, SECRET)))
    seat.start()
    ours = Link.as_driver(here, SECRET, 10)
    seat.join(10)
    yield ours, made[0], here
    ours.close()
    made[0].close()


def recorded(ours, payload):
    """The bytes of one frame, as somebody on the way would see them; they are not sent."""
    here, there = socket.socketpair()
    kept, ours._socket = ours._socket, here
    ours.send(payload)
    ours._socket = kept
    here.close()
    return rest(there)


def test_a_repeated_frame_is_refused(pair):
    ours, theirs, here = pair
    frame = recorded(ours, b"transfer everything")
    here.sendall(frame)
    assert theirs.receive() == b"transfer everything"
    here.sendall(frame)
    with pytest.raises(Refused, match="it has number 0, expected 1"):
        theirs.receive()


def test_a_left_out_frame_is_refused(pair):
    ours, theirs, here = pair
    recorded(ours, b"first")
    here.sendall(recorded(ours, b"second"))
    with pytest.raises(Refused, match="it has number 1, expected 0"):
        theirs.receive()


@pytest.mark.parametrize("at", [17, -1], ids=["digest", "payload"])
def test_a_changed_frame_is_refused(pair, at):
    ours, theirs, here = pair
    frame = bytearray(recorded(ours, b"pay one"))
    frame[at] ^= 1
    here.sendall(frame)
    with pytest.raises(Refused, match="its digest is not by the job's secret"):
        theirs.receive()


def test_a_frame_of_the_other_direction_is_refused(pair):
    ours, theirs, _ = pair
    frame = recorded(ours, b"to the seat")
    theirs._socket.sendall(frame)
    with pytest.raises(Refused, match="its digest"):
        ours.receive()


def test_an_oversized_frame_is_refused_before_it_is_read(pair, monkeypatch):
    ours, theirs, here = pair
    here.sendall(struct.pack("!QQ", 0, 2**40) + bytes(32))
    with pytest.raises(Refused, match=f"{2**40} bytes, at most {2**31} are read"):
        theirs.receive()
    monkeypatch.setattr(link, "MAX_FRAME_BYTES", 10)
    with pytest.raises(Refused, match="11 bytes, at most 10 are sent"):
        ours.send(bytes(11))


def test_a_frame_of_another_connection_is_refused(pair):
    """Keys are of one connection: what was recorded in one cannot be played into another."""
    ours, _, _ = pair
    frame = recorded(ours, b"again")
    here, there = socket.socketpair()
    seat = threading.Thread(target=lambda: made.append(Link.as_seat(there, SECRET)))
    made = []
    seat.start()
    other = Link.as_driver(here, SECRET, 10)
    seat.join(10)
    here.sendall(frame)
    with pytest.raises(Refused, match="its digest"):
        made[0].receive()
    other.close()
    made[0].close()


def test_a_bad_frame_ends_the_connection_and_is_logged(folder, drivers, caplog):
    caplog.set_level(logging.WARNING)
    ours = driver(folder)
    ours._socket.sendall(bytes(16) + bytes(32) + b"")
    assert rest(ours._socket) == b""
    assert "a frame was refused" in caplog.text
