import socket
from dataclasses import replace

import pytest
from small_run import MASTER

from distributed.hosts.interfaces import route_to
from distributed.plan import rendezvous
from distributed.plan.rendezvous import address_towards, check_is_this_machine, meeting_address
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host, Hosts
from whisper_tuner.errors import ConfigError, HostError

LOOPBACK = route_to("127.0.0.1").interface


def test_ranks_meet_where_ssh_left_this_machine(ssh_server):
    with Remote.connect(ssh_server.host) as remote:
        assert meeting_address(Hosts(master=MASTER, workers=(ssh_server.host,)), [remote]) == "127.0.0.1"


def test_ranks_meet_on_the_interface_that_the_hosts_file_names():
    hosts = Hosts(master=replace(MASTER, interface=LOOPBACK), workers=(Host(address="192.0.2.1"),))
    assert meeting_address(hosts, []) == "127.0.0.1"
    with pytest.raises(HostError, match="en77 is not an interface of this machine"):
        meeting_address(replace(hosts, master=replace(MASTER, interface="en77")), [])


def test_a_master_alone_meets_nobody():
    assert meeting_address(Hosts(master=MASTER, workers=()), []) == "127.0.0.1"


def test_a_run_begins_at_its_master():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.123 is not this machine"):
        meeting_address(Hosts(master=Host(address="192.0.2.123"), workers=()), [])


def test_another_machine_than_the_master_has_interfaces_of_its_own():
    hosts = Hosts(master=Host(address="192.0.2.123", interface="en77"), workers=(Host(address="127.0.0.1"),))
    assert address_towards(hosts, []) == "127.0.0.1"


@pytest.mark.parametrize("name", ["Studio", "studio.local", "localhost", "127.0.0.1"])
def test_names_of_this_machine(monkeypatch, name):
    monkeypatch.setattr(socket, "gethostname", lambda: "studio.fritz.box")
    check_is_this_machine(Host(address=name))


def test_a_name_of_another_machine_is_told_with_its_address(monkeypatch):
    monkeypatch.setattr(rendezvous, "addresses_of", lambda name: {"192.0.2.7"})
    with pytest.raises(ConfigError, match=r"mini \(192\.0\.2\.7\) is not this machine") as caught:
        check_is_this_machine(Host(address="mini"))
    assert socket.gethostname() in str(caught.value)
