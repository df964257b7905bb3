"""The caller's side of the agent: what is sent to start it, and what is made of its answers.

A host's answer is never trusted: one of another shape than SHAPES counts as none.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any

from distributed.ssh.machine import Machine
from whisper_tuner.errors import HostError
from whisper_tuner.text import parse_json

from .paths import PROJECT

# In this order, each after those that it imports. All must run with Python 3.9 and without packages.
SENT = (
    "whisper_tuner.errors",
    "whisper_tuner.files",
    "whisper_tuner.model.machine_memory",
    "distributed.hosts.interfaces",
    "distributed.ssh.local_network",
    "distributed.hosts.agent.files",
    "distributed.hosts.agent.holdings",
    "distributed.hosts.agent.facts",
    "distributed.hosts.agent.links",
    "distributed.hosts.agent.main",
)
GROUP_PROBE, STORE = "distributed.hosts.agent.group_probe", "exogym.comm.relayed_store"  # for the process with torch
# The alarm ends an agent whose link was cut, which brings no end of stdin.
BOOT = """import sys  # multimac agent
sys.path[:] = [entry for entry in sys.path if entry]
import json, signal, types
signal.alarm(int(sys.argv[1]))
for name, text in json.loads(sys.stdin.buffer.readline()):
    module = sys.modules[name] = types.ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    exec(compile(text, name, "exec"), module.__dict__)
module.main()"""
# $0 is BOOT, $1 the seconds that the agent may live, $2 the Python that trains, or nothing. Where that cannot, any
# other can still tell of disk, memory and clock, and the best one can make an environment: first of the minor version
# $3, for which the master's packages are sure to have builds, then the newest. The agent is told which of these it is,
# and which were passed over. The functions are those of find_python.sh.
START = """
if [ -n "$2" ]; then
    judge "$2" && exec "$2" -X utf8 -c "$0" "$1" training
    passed="$2: $said
"
fi
find_python "python3.$3" python3.14 python3.13 python3.12 python3.11 python3 python3.10 python3.9
[ -z "$found" ] || exec "$found" -X utf8 -c "$0" "$1" fitting "$passed"
[ -z "$other" ] || exec "$other" -X utf8 -c "$0" "$1" other "$passed"
echo "$passed" >&2
exit 69
"""
NO_PYTHON = 69
# The minor version is the master's: for that its packages are sure to have builds.
INSTALL_PYTHON = (
    f"There: `/opt/homebrew/bin/brew install python@3.{sys.version_info.minor}` (Mac),"
    " or `apt-get install python3 python3-venv` (Debian)."
)
ANSWER_S = 600.0  # once all is sent
REMEDIES: dict[int | None, str] = {  # by the number of a system's error
    28: "The disk is full: free some space there, or set project_path to another disk. What has arrived stays: the next"
    " sync continues from there.",
    13: "No permission: check who owns the folder. On a Mac, SSH cannot reach Documents, Desktop, Downloads or"
    " external disks unless Remote Login has full disk access.",
    1: "Not permitted: on a Mac, give Remote Login full disk access, or move the project out of Documents, Desktop"
    " and Downloads.",
    30: "The file system there is read-only.",
}


class OneOf(tuple):
    """Several shapes that a value may have."""


# By operation. A tuple stands for a list of these values, a list for any number of the same.
LINK = OneOf(({"latency": float}, {"failed": str, "errno": int | None}))
MEMORY = {"total": int, "available": int | None, "machine": str}
TORCH = {"version": str, "threads": int, "cuda": int, "cuda_memory": int, "cuda_name": str, "mps": bool}
PLACE = {"address": str, "interface": str, "port": int, "datagram_port": int, "networks": [(str, str, int)]}
HELD = {"kind": str, "path": str, "files": int, "bytes": int}
SHAPES: dict[str, Any] = {
    "check": {"missing": [(int, int)], "stale": [str], "foreign": [str], "free": int, "taken": str},
    "lacking": {"missing": [(int, int)]},
    "commit": {"damaged": [str]},
    "mark": {"marks": [(str, [str])], "master": str, "busy": bool},
    "seen": {"seen": [(str, [str])]},
    "holdings": {"checkout": bool, "in_use": str, "held": [HELD], "others": int, "named": [str]},
    "facts": {
        "system": str,
        "release": str,
        "machine": str,
        "libc": str,
        "memory": MEMORY,
        "training": bool,
        "fitting": bool,
        "passed": [str],
        "python": [int],
        "executable": str,
        "program": str,
        "venv": bool,
        "versions": dict,
        "rivals": [(str, str, bool)],
    },
    "clock": {"clock": float},
    "space": {"root": str, "free": int, "held": int},
    "code": {"differ": [str]},
    "torch_facts": OneOf(({"late": bool}, {"failed": str}, {**TORCH, "mps_memory": int})),
    "open": OneOf(({"wrong": str}, PLACE)),
    "connect": {"links": [(int, LINK)]},
    "heard": {"heard": [int]},
    "burst": {"sent": int},
    "begin_groups": {"told": [(int, str, str)]},
    "form_groups": {"groups": [(int, str)]},
}
ANSWER = {"id": int, "answer": dict}
FAILURE = {"id": int, "error": str, "errno": int | None}


def agent_call(
    machine: Machine,
    op: str,
    *,
    python: str = "",
    payload: Iterable[bytes] = (),
    sending: float = 0.0,
    **request: Any,
) -> dict[str, Any]:
    """Have the agent on a machine do one operation. Raises HostError: no Python there, or what went wrong.

    python: runs it if it can; payload: what the operation reads from stdin; sending: seconds that this may take.
    """
    life = str(int(2 * (ANSWER_S + sending)))  # work that nobody waits for any more may still be finished
    head = [sources(), request_line(0, op, {**request, "last": True})]
    command = start_command(life, python)
    done = machine.run(command, input=chain(head, payload), timeout=ANSWER_S, title="the agent's work")
    messages = filter(None, map(parse_message, done.stdout.splitlines()))
    message = next((found for found in messages if found.get("id") == 0), None)
    if message is None:
        raise no_answer(machine.name, done.returncode, done.stderr or done.stdout)
    return answer_in(message, machine.name, op)


def start_command(life: str, python: str = "") -> list[str]:
    find_python = (PROJECT / "distributed/hosts/find_python.sh").read_text(encoding="utf-8")
    return ["/bin/sh", "-c", find_python + START, BOOT, life, python, str(sys.version_info.minor)]


@functools.cache
def sources() -> bytes:
    """Make the line that BOOT reads."""
    return json.dumps([[name, source(name)] for name in SENT]).encode() + b"\n"


@functools.cache
def group_probe() -> str:
    """Return what the process with torch runs: the probe, and before it the store that workers have too."""
    made = f"import sys, types\nstore = sys.modules[{STORE!r}] = types.ModuleType({STORE!r})"
    return f"{made}\nexec({source(f'gym.{STORE}')!r}, store.__dict__)\n{source(GROUP_PROBE)}"


def source(name: str) -> str:
    return (PROJECT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")


def request_line(number: int, op: str, request: dict[str, Any]) -> bytes:
    return json.dumps({"id": number, "op": op, **request}).encode() + b"\n"


def parse_message(line: str) -> dict[str, Any] | None:
    """Read an answer or an event; None for what a shell prints of its own, which may be JSON by chance."""
    try:
        message = parse_json(line)
    except ValueError:
        return None
    return message if fits(message, OneOf((ANSWER, FAILURE, {"event": str}))) else None


def answer_in(message: dict[str, Any], name: str, op: str) -> dict[str, Any]:
    """Take the answer out of a message. Raises HostError for what the agent could not do."""
    if "error" in message:
        raise HostError(name, message["error"], remedy=remedy_for(message["errno"]))
    if not fits(message["answer"], SHAPES[op]):
        raise HostError(name, f"its Python gave an answer that is not understood ({op})")
    return message["answer"]


def fits(value: Any, shape: Any) -> bool:
    """Check that what came from a host has the shape that it should."""
    match shape:
        case OneOf():
            return any(fits(value, each) for each in shape)
        case dict():
            return isinstance(value, dict) and all(key in value and fits(value[key], shape[key]) for key in shape)
        case tuple():
            return isinstance(value, list) and len(value) == len(shape) and all(map(fits, value, shape))
        case [each]:
            return isinstance(value, list) and all(fits(item, each) for item in value)
    return isinstance(value, shape)


def no_answer(name: str, status: int | None, said: str) -> HostError:
    """Make the error for an agent that ended without an answer."""
    if status == NO_PYTHON:
        passed = "".join(f"; {line}" for line in said.split("\n") if line)
        return HostError(name, f"no Python 3.9 or later was found{passed}", remedy=INSTALL_PYTHON)
    said = said.strip()[-1500:] or "it printed nothing"
    return HostError(name, f"its Python gave no answer (status {status}): {said}")


def remedy_for(errno: int | None) -> str:
    """Say what to do about an error number of a host's system; "" if nothing is known."""
    return REMEDIES.get(errno, "")
