import json
from pathlib import Path

import pytest

from distributed.plan.hosts_file import load_hosts
from distributed.ssh.host import Host
from whisper_tuner.errors import ConfigError

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
    hosts = load_hosts(write(tmp_path, {**GOOD, "workers": ["a", own], "ssh_user": "anna"}))
    a, b = hosts.workers
    assert (a.user, a.project_path, a.port) == ("anna", "~/multimac-whisper", None)
    assert (b.user, b.project_path, b.port, b.interface) == ("eve", "/data/w", 2222, "en7")


@pytest.mark.parametrize("path", ["~/tuner", "/data/w", "/..w/a b", "/.w"])
@pytest.mark.parametrize("more", ["/", "/.", "/./", "//"])
def test_what_adds_nothing_to_a_path_is_left_out(tmp_path, path, more):
    assert load_hosts(write(tmp_path, {**GOOD, "project_path": path + more})).master.project_path == path
    inside = path.replace("/", more.rstrip("/") + "/")
    assert load_hosts(write(tmp_path, {**GOOD, "project_path": inside})).master.project_path == path


def test_a_port_of_null_is_none(tmp_path):
    hosts = load_hosts(write(tmp_path, {"master": "a", "workers": [{"host": "b", "ssh_port": None}]}))
    assert hosts.workers[0].port is None


def test_python_of_an_environment():
    assert Host(address="a").python == "~/multimac-whisper/.venv/bin/python"
    assert Host(address="a", project_path="/p").python == "/p/.venv/bin/python"
    assert Host(address="a", python_env="/env").python == "/env/bin/python"
    assert Host(address="a", python_env="/opt/bin/python3.12").python == "/opt/bin/python3.12"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ('{"master": "a",\n "workers": [}', [":2:", "not JSON"]),
        ([1], ["one object"]),
        ({"workers": []}, ["'master' is missing"]),
        ({"master": "a"}, ["'workers' is missing"]),
        ({"master": "a", "workers": "b"}, [":3:", "must be a list"]),
        ({**GOOD, "ssh_usr": "x"}, [":6:", "unknown key 'ssh_usr', did you mean 'ssh_user'?"]),
        ({**GOOD, "zzz": "x"}, ["unknown key 'zzz'", "Known keys: master"]),
        ({"master": "a", "workers": [{"host": "b", "prot": 1}]}, ["workers[0]", "unknown key 'prot'"]),
        ({"master": "a", "workers": [{"ssh_user": "b"}]}, ["workers[0]", "an object with a 'host'"]),
        ({"master": "a", "workers": [3]}, ["workers[0] must be an address, or an object"]),
        ({"master": "a", "workers": ["anna@b"]}, ["'host' must be an address, not \"anna@b\"", "ssh_user"]),
        ({"master": "a", "workers": ["-oProxyCommand=x"]}, ["must be an address"]),
        ({"master": "a", "workers": [""]}, ["must be an address"]),
        ({"master": "a", "workers": [{"host": ""}]}, [":5:", "must be an address"]),
        ({"master": "a", "workers": [{"host": 5}]}, [":5:", "must be an address, not 5"]),
        ({**GOOD, "ssh_user": "an\u00a0na"}, [":6:", "cannot be seen: 'an\\xa0na'", "Type it again"]),
        ({"master": "a", "workers": [{"host": "b", "ssh_port": "22"}]}, ["'ssh_port' must be a number"]),
        ({"master": "a", "workers": [{"host": "b", "ssh_port": True}]}, ["'ssh_port' must be a number"]),
        ({"master": "a", "workers": [{"host": "b", "device": "gpu"}]}, ["'device' must be"]),
        ({**GOOD, "project_path": "here"}, ["'project_path' must be a path from / or ~/"]),
        ({**GOOD, "project_path": "~/../x"}, ["'project_path' must be a path"]),
        ({**GOOD, "project_path": "/"}, ["'project_path' must be a path"]),
        ({**GOOD, "project_path": "/."}, ["'project_path' must be a path"]),
        ({**GOOD, "project_path": "~/."}, ["'project_path' must be a path"]),
        ({**GOOD, "project_path": "/x/.."}, ["'project_path' must be a path"]),
        ({**GOOD, "python_env": "venv"}, ["'python_env' must be a path", "For example ~/multimac-whisper/.venv;"]),
        ({**GOOD, "python_env": "~/multimac-whisper/"}, [":6:", "'python_env' is the project folder", "/.venv;"]),
        ({**GOOD, "project_path": "~/"}, ["'project_path' must be a path"]),
        ({**GOOD, "project_path": "~anna/x"}, ["'project_path' must be a path"]),
        ({**GOOD, "ssh_user": None}, ["'ssh_user' must be text"]),
        ({"master": "a", "workers": ["b", "B"]}, ["B is listed twice"]),
        ({"master": "a", "workers": ["a"]}, ["a is listed twice", "only under 'master'"]),
        ('{"master": "a",\n"master": "b", "workers": []}', [":2:", "key 'master' appears twice"]),
    ],
)
def test_mistakes_are_named(tmp_path, values, words):
    with pytest.raises(ConfigError) as caught:
        load_hosts(write(tmp_path, values))
    assert str(tmp_path / "hosts.json") in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_missing_file_points_to_the_example(tmp_path):
    with pytest.raises(ConfigError, match=r"example\.json"):
        load_hosts(tmp_path / "none.json")
