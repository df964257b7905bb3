"""distributed_hosts.json."""

from __future__ import annotations

import json
from pathlib import Path

from damage import damaged_json
from fuzzing import fuzz, outcome, parsed
from hypothesis import example

from distributed.plan.hosts_file import load_hosts

SHORT = {"master": "192.168.1.20", "workers": ["192.168.1.30"]}
LONG = {
    "master": {"host": "mini.local", "interface": "en0", "device": "mps"},
    "workers": [{"host": "10.0.0.2", "ssh_user": "anna", "ssh_port": 2222, "project_path": "~/tuner"}, "10.0.0.3"],
    "ssh_user": "ben",
    "ssh_key_path": "~/.ssh/id_ed25519",
    "python_env": "/opt/venv",
}


@fuzz("distributed_hosts.json", damaged_json(SHORT, LONG))
@example(data=b"9" * 5000)
@example(data=b"[" * 3000)
@example(data='{"master": "\u2028\u2028", "workers": [7]}'.encode())
@example(data=b"\xef\xbb\xbf" + json.dumps(SHORT).encode())
@example(data=json.dumps({**SHORT, "ssh_user": "\ud800"}).encode())
@example(data=json.dumps({**SHORT, "master": "mini\0.local"}).encode())
@example(data=json.dumps({**SHORT, "ssh_key_path": "~\0"}).encode())
@example(data=json.dumps({**SHORT, "python_env": "/opt/venv\u202e"}).encode())
@example(data=json.dumps({f"key {number}": 0 for number in range(30_000)}).encode())
def test_a_hosts_file_names_what_ssh_can_be_asked_for(folder: Path, data: bytes):
    file = folder / "hosts.json"
    file.write_bytes(data)
    hosts = outcome(load_hosts, file, names=file, of=data)
    if hosts is None:
        assert data not in [json.dumps(document).encode() for document in (SHORT, LONG)]
        return
    document = parsed(data.decode("utf-8-sig"))
    told = [one if isinstance(one, dict) else {"host": one} for one in (document["master"], *document["workers"])]
    told = [{key: document[key] for key in document if key not in ("master", "workers")} | one for one in told]
    assert [(host.address, host.user, host.port) for host in hosts.all] == [
        (one["host"], one.get("ssh_user"), one.get("ssh_port")) for one in told
    ]
    for host in hosts.all:
        texts = (host.address, host.user, host.key_path, host.python, host.project_path, host.interface)
        assert all(text is None or str(text).isprintable() for text in texts)
        assert host.port is None or 0 < host.port < 65536
    assert load_hosts(file) == hosts
