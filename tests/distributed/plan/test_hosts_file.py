"""The hosts file, and where the ranks of its hosts meet."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import MASTER

from distributed.hosts.interfaces import route_to
from distributed.plan import hosts_file
from distributed.plan.hosts_file import address_towards, check_is_this_machine, load_hosts, meeting_address
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host, Hosts
from whisper_tuner.errors import ConfigError, HostError

LOOPBACK = route_to("127.0.0.1").interface
GOOD = {"master": "127.0.0.1", "workers": ["mini.local"]}


def write(tmp_path: Path, values: object) -> Path:
    path = tmp_path / "hosts.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values, indent=1))
    return path


def test_example_loads():
    hosts = load_hosts(Path(__file__).parents[3] / "distributed_hosts.example.json")
    assert [host.address for host in hosts.all] == ["mac-studio.local", "mac-mini.local", "192.168.1.30"]
    assert hosts.workers[1].user == "anna"
    assert hosts.workers[1].device == "cpu"
    assert hosts.master.key_path == Path("~/.ssh/id_ed25519").expanduser()


def test_a_worker_overrides_the_common_values(tmp_path):
    own = {"host": "b", "ssh_user": "eve", "project_path": "/data/w", "ssh_port": 2222, "interface": "en7"}
    without = {"host": "a", "ssh_port": None}
    hosts = load_hosts(write(tmp_path, {**GOOD, "workers": [without, own], "ssh_user": "anna"}))
    a, b = hosts.workers
    assert (a.user, a.project_path, a.port) == ("anna", "~/multimac-whisper", None)
    assert (b.user, b.project_path, b.port, b.interface) == ("eve", "/data/w", 2222, "en7")


@pytest.mark.parametrize("path", ["~/tuner", "/..w/a b"])
@pytest.mark.parametrize("more", ["/", "/.", "//"])
def test_what_adds_nothing_to_a_path_is_left_out(tmp_path, path, more):
    assert load_hosts(write(tmp_path, {**GOOD, "project_path": path + more})).master.project_path == path
    inside = path.replace("/", more.rstrip("/") + "/")
    assert load_hosts(write(tmp_path, {**GOOD, "project_path": inside})).master.project_path == path


def test_python_of_an_environment():
    assert Host(address="a").python == "~/multimac-whisper/.venv/bin/python"
    assert Host(address="a", project_path="/p").python == "/p/.venv/bin/python"
    assert Host(address="a", python_env="/env").python == "/env/bin/python"
    assert Host(address="a", python_env="/opt/bin/python3.12").python == "/opt/bin/python3.12"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"workers": []}, ["'master' is missing"]),
        ({**GOOD, "zzz": "x"}, ["unknown key 'zzz'", "Known keys: master"]),
        ({"master": "a", "workers": ["-oProxyCommand=x"]}, ["must be an address"]),
        ({"master": "a", "workers": [{"host": ""}]}, [":5:", "must be an address"]),
        ({"master": "a", "workers": [{"host": 5}]}, [":5:", "must be an address, not 5"]),
        ({**GOOD, "ssh_user": "an\u00a0na"}, [":6:", "cannot be seen: 'an\\xa0na'", "Type it again"]),
        ({"master": "a", "workers": [{"host": "b", "ssh_port": True}]}, ["'ssh_port' must be a number"]),
        ({**GOOD, "project_path": "~/../x"}, ["'project_path' must be a path"]),
        ({**GOOD, "project_path": "/."}, ["'project_path' must be a path"]),
        ({**GOOD, "project_path": "/x/.."}, ["'project_path' must be a path"]),
        ({**GOOD, "python_env": "venv"}, ["'python_env' must be a path", "For example ~/multimac-whisper/.venv;"]),
        ({**GOOD, "python_env": "~/multimac-whisper/"}, [":6:", "'python_env' is the project folder", "/.venv;"]),
        ({**GOOD, "project_path": "~/"}, ["'project_path' must be a path"]),
        ({**GOOD, "project_path": "~anna/x"}, ["'project_path' must be a path"]),
        ({**GOOD, "ssh_user": None}, ["'ssh_user' must be text"]),
        ({"master": "a", "workers": ["b", "B"]}, ["B is listed twice"]),
        ({"master": "a", "workers": ["a"]}, ["a is listed twice", "only under 'master'"]),
    ],
)
def test_mistakes_are_named(tmp_path, values, words):
    with pytest.raises(ConfigError) as caught:
        load_hosts(write(tmp_path, values))
    assert str(tmp_path / "hosts.json") in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_tells_what_lies_beside_it_and_how_to_get_one(tmp_path):
    (tmp_path / "distributed_hosts.json").touch()
    with pytest.raises(ConfigError, match=r"hosts file, did you mean '.*/distributed_hosts\.json'\?") as caught:
        load_hosts(tmp_path / "distributed_host.json")
    assert "`multimac hosts pair` writes one" in caught.value.remedy
    example = Path(__file__).parents[3] / "distributed_hosts.example.json"
    assert f"copy {example}, and" in caught.value.remedy
    with pytest.raises(ConfigError, match=f"not JSON.*\n.*{example} shows"):
        load_hosts(tmp_path / "distributed_hosts.json")


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
    monkeypatch.setattr(hosts_file, "addresses_of", lambda name: {"192.0.2.7"})
    with pytest.raises(ConfigError, match=r"mini \(192\.0\.2\.7\) is not this machine") as caught:
        check_is_this_machine(Host(address="mini"))
    assert socket.gethostname() in str(caught.value)
