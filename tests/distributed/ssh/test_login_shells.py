"""Our lines in the login shells that users have, over a real sshd, where only a Mac's programs are on PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
import pytest
from bsd_tools import bsd_tools
from login_shells import LOGIN_SHELLS, SYSTEM_SHELLS, installed
from waiting import wait_until

from distributed.hosts.agent_call import agent_call, request_line, sources, start_command
from distributed.ssh.connection import Remote
from distributed.ssh.machine import ANNOUNCE, ANNOUNCED, LocalMachine, quote

# Words that some shell would change, one by one: with a newline or a `!` among them a line takes another way.
NASTY = ["a b", "$HOME", "`id`", "'\"", "-x", "=ls", "~", "*", "é ü", "{a,b}", "", "a;b&c|d", "#", "%s", "%self", "a=b"]
FAMILY = "sleep 300 & sh -c 'sleep 300 & echo ready; wait' & wait"


@pytest.fixture
def tools(tmp_path):
    return bsd_tools(tmp_path / "tools")


@pytest.fixture(params=LOGIN_SHELLS)
def remote(request, ssh_server, tmp_path, tools):
    ssh_server.log_in_with(installed(request.param, tmp_path / "shells"), tools)
    with Remote.connect(ssh_server.host) as remote:
        yield remote


def test_our_lines_mean_the_same(remote, tmp_path):
    """Words, input and status arrive; a group is killed with all that it has started; the agent answers."""
    assert remote.run(["printf", "[%s]", *NASTY]).stdout == "".join(f"[{word}]" for word in NASTY)
    assert remote.run(["printf", "[%s]", *NASTY, "!!", "\\n", "new\nline"]).stdout.endswith("[!!][\\n][new\nline]")
    assert remote.run(["cat"], input=[b"in", b"put"]).stdout == "input"
    assert remote.run(["sh", "-c", "exit 3"]).returncode == 3
    assert remote.run(["/no/such/program"]).returncode in {127, 1}  # csh says 1

    process = remote.start(["sh", "-c", FAMILY], env={"A": "x y"}, cwd=str(tmp_path))
    assert next(process.lines()) == "ready"
    assert os.getpgid(process.pid) == process.pid
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3
    process.kill()
    wait_until(lambda: not any(map(running, family)))
    assert process.wait(5) not in {None, 0}

    facts = agent_call(remote, "facts", python=sys.executable, names=["torch"], project="~/project")
    assert facts["training"] and "torch" in facts["versions"]
    assert agent_call(remote, "clock")["clock"] > 0  # of a Python that it finds


@pytest.mark.parametrize("shell", SYSTEM_SHELLS)
def test_any_shell_may_be_called_sh(shell, tmp_path, tools):
    sh, path = str(installed(shell, tmp_path / "shells", called="sh")), {"PATH": str(tools)}
    told = [sources(), request_line(0, "clock", {"last": True})]
    done = subprocess.run([sh, *start_command("20")[1:]], input=b"".join(told), env=path, capture_output=True)
    assert json.loads(done.stdout)["answer"]["clock"] > 0, done.stderr
    done = subprocess.run([sh, "-c", ANNOUNCE, str(tmp_path), "sh", "-c", "pwd"], capture_output=True, text=True)
    group, folder = done.stdout.splitlines()
    assert ANNOUNCED.fullmatch(group) and folder == str(tmp_path)


@pytest.mark.parametrize("shell", LOGIN_SHELLS)
def test_a_command_takes_the_place_of_its_shell(shell, tmp_path):
    line = quote(["sh", "-c", "echo $$"])
    process = LocalMachine().start([str(installed(shell, tmp_path / "shells")), "-c", line])
    assert list(process.lines()) == [str(process.pid)]


def running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
