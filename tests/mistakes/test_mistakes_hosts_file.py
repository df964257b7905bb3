"""The hosts file: exit status 3, before any host is looked at."""

from __future__ import annotations

import pytest

from whisper_tuner.errors import ExitStatus

EXAMPLE = "distributed_hosts.example.json"
ALONE = '{{"master": "localhost",\n "workers": [{}]}}'

# name: (hosts file, None for none; the message names; the remedy says)
MISTAKES = {
    "it is missing": (None, "hosts.json: there is no such hosts file", EXAMPLE),
    "not JSON": ('{"master": "localhost",\n "workers": [}', "hosts.json:2: not JSON", EXAMPLE),
    "a list": ('["localhost"]', "hosts.json: the file must hold one object", EXAMPLE),
    "not UTF-8": (b'{"master": "caf\xe9"}', "hosts.json: cannot be read", "UTF-8"),
    "no workers": ('{"master": "localhost"}', "hosts.json: 'workers' is missing", 'Add "workers"'),
    "workers that are no list": (
        '{"master": "localhost",\n "workers": "mini"}',
        "hosts.json:2: 'workers' must",
        "brackets",
    ),
    "an unknown key": (
        '{"master": "localhost",\n "workers": [],\n "ssh_usr": "anna"}',
        "hosts.json:3: unknown key 'ssh_usr', did you mean 'ssh_user'?",
        "Known keys: master",
    ),
    "an unknown key of a worker": (
        ALONE.format('{"host": "mini", "port": 22}'),
        "hosts.json:2: workers[0]: unknown key 'port', did you mean 'ssh_port'?",
        "Known keys: host",
    ),
    "a key twice": (
        '{"master": "a",\n "master": "b", "workers": []}',
        "hosts.json:2: key 'master' appears twice",
        "Remove",
    ),
    "a host twice": (ALONE.format('"mini",\n "mini"'), "hosts.json:3: mini is listed twice", "Remove"),
    "a host at two ports": (
        ALONE.format('{"host": "mini", "ssh_port": 22},\n {"host": "mini", "ssh_port": 23}'),
        "hosts.json:3: mini is listed twice",
        "a name of its own",
    ),
    "the master among the workers": (
        ALONE.format('"localhost"'),
        "hosts.json:2: localhost is listed twice",
        "only under 'master'",
    ),
    "a worker without an address": (
        ALONE.format('{"ssh_user": "anna"}'),
        "hosts.json:2: workers[0] must be an address, or an object with a 'host'",
        '"host"',
    ),
    "a user in the address": (
        ALONE.format('"anna@mini"'),
        "hosts.json:2: workers[0]: 'host' must be an address, not \"anna@mini\"",
        "'ssh_user'",
    ),
    "a port that is none": (
        ALONE.format('{"host": "mini",\n "ssh_port": 70000}'),
        "hosts.json:3: workers[0]: 'ssh_port' must be a number from 1 to 65535, not 70000",
        "22",
    ),
    "a number for a text": (
        ALONE.format('{"host": "mini",\n "ssh_user": 7}'),
        "hosts.json:3: workers[0]: 'ssh_user' must be text, not 7",
        "quotes",
    ),
    "a relative path": (
        ALONE.format('{"host": "mini",\n "project_path": "tuner"}'),
        "hosts.json:3: workers[0]: 'project_path' must be a path from / or ~/, not \"tuner\"",
        "~/multimac-whisper",
    ),
    "an unknown device": (
        ALONE.format('{"host": "mini",\n "device": "gpu"}'),
        "hosts.json:3: workers[0]: 'device' must be auto, mps, cuda or cpu, not \"gpu\"",
        "auto",
    ),
}


@pytest.mark.parametrize(("text", "place", "remedy"), MISTAKES.values(), ids=MISTAKES.keys())
def test_hosts_file(desk, text, place, remedy):
    if text is not None:
        desk.write("hosts.json", text)
    desk.refuses("hosts check --hosts hosts.json", ExitStatus.CONFIG, place, remedy)


def test_the_master_is_another_machine(desk, no_torch):
    """Told by the preflight, beside what is wrong with the hosts; what is wrong with the file comes before."""
    train = "distributed-train both --hosts hosts.json"
    desk.refuses(train, ExitStatus.CONFIG, "hosts.json: there is no such hosts file", EXAMPLE)
    desk.write("hosts.json", '{"master": "192.0.2.1", "workers": []}')
    remedy = ("Run this on 192.0.2.1", 'set "master"')
    desk.refuses(train, ExitStatus.CONFIG, "192.0.2.1 is not this machine", remedy)
