"""A module that runs on a machine: here, and over a real SSH session, in whose project folder it is found."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.hosts import host_process
from distributed.hosts.host_process import HostProcess, environment
from distributed.hosts.paths import PROJECT
from distributed.ssh.connection import Remote
from distributed.ssh.machine import LocalMachine

ECHOES = """
import os, sys
from distributed.control.messages import send_event
for line in sys.stdin:
    print("read a line", flush=True)
    send_event({"type": "echo", "said": line.strip(), "folder": os.getcwd(), "arguments": sys.argv[1:]})
    if line == "end\\n":
        sys.exit("it is over")
"""


@pytest.fixture(params=["here", "over SSH"])
def machine(request, tmp_path, monkeypatch):
    """It has a module `echoes` beside those of the project, and works in a folder of its own if it is a host."""
    (tmp_path / "echoes.py").write_text(ECHOES)
    path = f"{environment(PROJECT)['PYTHONPATH']}:{tmp_path}"
    monkeypatch.setattr(host_process, "environment", lambda project: {"PYTHONPATH": path})
    if request.param == "here":
        yield LocalMachine("here"), PROJECT
        return
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    server = request.getfixturevalue("ssh_server")
    project = Path(server.host.project_path)
    project.mkdir()
    with Remote.connect(replace(server.host, python_env=str(python))) as remote:
        yield remote, project


def test_a_request_is_answered_by_events_and_the_last_words_stay(machine):
    where, project = machine
    process = HostProcess(where, "echoes", "7")
    process.write("first")
    event = next(process.events())
    assert (event["said"], event["arguments"]) == ("first", ["7"])
    assert Path(event["folder"]).samefile(project) and process.last_words == "read a line"
    process.write("end")
    assert [event["said"] for event in process.events()] == ["end"]  # from where it was left
    assert process.last_words == "it is over" and process.process.wait(10) == 1
