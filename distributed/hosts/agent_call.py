"""Asks a host's own Python: sends host_agent.py there as text, with one JSON request, and reads one JSON answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from distributed.ssh.machine import Machine
from whisper_tuner.errors import HostError
from whisper_tuner.json_text import parse_json

AGENT = Path(__file__).with_name("agent.py")
BOOT = """import sys
f = sys.stdin.buffer
exec(compile(f.read(int(f.readline())), "host_agent", "exec"), {"__name__": "__main__"})"""
# A shim (pyenv) is slow, so it is asked once for the interpreter behind it. Without the command line tools, macOS's
# /usr/bin/python3 only opens a dialogue: it comes last, and only after asking.
FIND_PYTHON = """
fit() {
    case "$1" in /usr/bin/python3) [ "$(uname)" != Darwin ] || xcode-select -p >/dev/null 2>&1 || return 1 ;; esac
    "$1" -c 'import sys; sys.version_info < (3, 9) and sys.exit(1); print(sys.executable)' 2>/dev/null
}
for p in "$(command -v python3)" /opt/homebrew/bin/python3 /usr/local/bin/python3 "$HOME"/.local/bin/python3.* \
    "$HOME"/.pyenv/versions/3.*/bin/python3 /usr/bin/python3 /usr/bin/python3.[1-9]*; do
    [ -x "$p" ] && real=$(fit "$p") && exec "$real" -X utf8 -c "$0"
done
exit 69
"""
NO_PYTHON = 69

_pythons: WeakKeyDictionary[Machine, str] = WeakKeyDictionary()  # that answered: they need no search


def ask(
    machine: Machine, op: str, *, timeout: float = 600.0, payload: Sequence[bytes] = (), **request: Any
) -> dict[str, Any]:
    """One operation of host_agent.py on a machine. Raises HostError: no Python there, or what went wrong."""
    source = AGENT.read_bytes()
    head = str(len(source)).encode() + b"\n" + source + json.dumps({"op": op, **request}).encode() + b"\n"
    python = _pythons.get(machine)
    command = [python, "-X", "utf8", "-c", BOOT] if python else ["/bin/sh", "-c", FIND_PYTHON, BOOT]
    done = machine.run(command, input=b"".join([head, *payload]), timeout=timeout)
    try:
        answer = parse_json(done.stdout)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise no_answer(machine.name, done.returncode, done.stderr or done.stdout)
    if "error" in answer:
        raise HostError(machine.name, answer["error"], remedy=remedy_for(answer.get("errno")))
    if isinstance(python := answer.pop("python", None), str):
        _pythons[machine] = python
    return answer


def no_answer(name: str, status: int | None, said: str) -> HostError:
    """What to say of a FIND_PYTHON that ended without an answer."""
    if status == NO_PYTHON:
        remedy = "There: `brew install python@3.12` (Mac) or `apt-get install python3 python3-venv` (Debian)."
        return HostError(name, "no Python 3.9 or later was found", remedy=remedy)
    said = said.strip()[-1500:] or "it printed nothing"
    return HostError(name, f"its Python gave no answer (status {status}): {said}")


def remedy_for(errno: object) -> str:
    """What to do about an error number of a host's system; "" if nothing is known."""
    remedies = {
        28: "The disk is full: free some space there, or set project_path to another disk.",
        13: "No permission: check who owns the folder. On a Mac, SSH cannot reach Documents, Desktop, Downloads or"
        " external disks unless Remote Login has full disk access.",
        1: "Not permitted: on a Mac, give Remote Login full disk access, or move the project out of Documents, Desktop"
        " and Downloads.",
        30: "The file system there is read-only.",
    }
    return remedies.get(errno, "") if isinstance(errno, int) else ""
