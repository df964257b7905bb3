"""Of a machine whose addresses a test chooses."""

import pytest

from distributed.launcher import training as meetings
from distributed.launcher.training import Meeting, is_own
from whisper_tuner.errors import HostError

OLD, NEW = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def own(monkeypatch):
    addresses = {OLD}
    monkeypatch.setattr(meetings, "is_own", addresses.__contains__)
    return addresses


def test_an_address_that_this_machine_has_is_its_own():
    assert is_own("127.0.0.1") and not is_own("192.0.2.7")


def test_it_stays_where_it_is_while_the_address_is_there(own):
    meeting = Meeting(OLD)
    own.add(NEW)
    assert not meeting.moved([NEW]) and meeting.address == OLD and not meeting.line


def test_it_waits_for_a_connection_and_moves_there(own):
    meeting = Meeting(OLD)
    own.clear()
    assert not meeting.moved([]) and not meeting.moved([OLD])  # a connection that is dead, and does not know it yet
    own.add(NEW)
    assert meeting.moved([OLD, NEW]) == (
        "the address of this machine was 127.0.0.1, and is now 127.0.0.2: the hosts meet there"
    )
    assert meeting.address == NEW and meeting.line == f'{{"type": "meeting", "address": "{NEW}"}}'
    assert not meeting.moved([NEW])


def test_the_interface_that_the_user_named_is_waited_for(own, monkeypatch):
    def address_on(interface, peer):
        if NEW not in own:
            raise HostError(peer, f"{interface} has no IPv4 address")
        return NEW

    monkeypatch.setattr(meetings, "address_on", address_on)
    meeting = Meeting(OLD, "en7")
    own.clear()
    own.add("127.0.0.3")
    assert not meeting.moved(["127.0.0.3"])
    own.add(NEW)
    assert meeting.moved(["127.0.0.3"]) and meeting.address == NEW


def test_where_hosts_are_kept_apart_it_goes_to_the_usual_network_and_back(own):
    meeting = Meeting(OLD)
    assert not meeting.left([]) and not meeting.left([OLD])
    own.add(NEW)
    assert meeting.left([NEW, "127.0.0.3"]) == "not all hosts reach each other by 127.0.0.1: they meet at 127.0.0.2 now"
    assert meeting.address == NEW
    assert meeting.left([NEW]) and meeting.address == OLD
    own.remove(OLD)
    assert meeting.moved([NEW]) and not meeting.left([NEW])


def test_from_an_address_that_goes_again_at_once_it_moves_on(own):
    meeting = Meeting(OLD)
    own.clear()
    own.add("192.0.2.7")
    assert meeting.moved(["192.0.2.7"])
    own.clear()
    own.add(NEW)
    assert meeting.moved([NEW]) and meeting.address == NEW
