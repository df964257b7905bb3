"""What this host is, what its Python has, and what lies in the project folder; nothing is changed.

What torch can use is asked in a process of its own, which may also form groups of gloo's with other hosts: importing it
takes seconds, and forming a group may hang. That process is killed with the agent.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from distributed.ssh.local_network import real_python
from whisper_tuner.model.machine_memory import machine_memory

from .files import sha256
from .holdings import measured

OURS = ("distributed", "exogym", "whisper_tuner")
LOOK_AT_TORCH = """
import json, signal, sys
signal.alarm(int(sys.argv[1]))
import torch
cuda, mps = torch.cuda, torch.backends.mps.is_available()
card = cuda.get_device_properties(0) if cuda.is_available() else None
print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(),
                  "cuda": cuda.device_count() if card else 0, "cuda_memory": card.total_memory if card else 0,
                  "cuda_name": card.name if card else "", "mps": mps,
                  "mps_memory": torch.mps.recommended_max_memory() if mps else 0}), flush=True)
"""


def facts(names: list, project: str) -> dict:
    """Tell what this host is, and what the Python that runs this has of the packages `names`."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "system": platform.system(),
        "release": platform.mac_ver()[0] or platform.release(),
        "machine": platform.machine(),
        "libc": platform.libc_ver()[1],
        "memory": machine_memory(),
        "training": "training" in sys.argv[2:3],
        "fitting": "fitting" in sys.argv[2:3],
        "passed": "".join(sys.argv[3:4]).splitlines(),
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "program": real_python(),  # as a firewall knows it
        "venv": sys.prefix != sys.base_prefix,
        "versions": versions,
        "rivals": rivals(Path(project).expanduser()),
    }


def rivals(project: Path) -> list:
    """[name, place, whether it would be loaded instead of ours] of other packages with our names.

    Workers get the project by PYTHONPATH: only what stands before that wins (a .pth file or an import hook).
    """
    standard = str(Path(os.__file__).parent)
    stdlib = next((i for i, entry in enumerate(sys.path) if entry == standard), 0)
    path_finder = importlib.machinery.PathFinder
    before = sys.meta_path.index(path_finder) if path_finder in sys.meta_path else 0
    found = []
    for name in OURS:
        for finder in sys.meta_path[:before]:
            spec = finder.find_spec(name, None) if hasattr(finder, "find_spec") else None
            if spec and spec.origin:
                found.append([name, spec.origin, True])
        for position, entry in enumerate(sys.path):
            if entry in ("", str(project), str(project / "gym")):
                continue
            spec = path_finder.find_spec(name, [entry])
            if spec and spec.origin:
                found.append([name, str(Path(spec.origin).parent.parent), position < stdlib])
    return [entry for position, entry in enumerate(found) if entry not in found[:position]]


def space(project: str, held: list) -> dict:
    """Write a file where the project is or will be; how much is free there, and what its folders `held` hold."""
    root = Path(project).expanduser()
    folder = next(place for place in (root, *root.parents) if place.exists())
    try:
        next(folder.iterdir(), None)
        with tempfile.TemporaryFile(prefix=".preflight-", dir=str(folder)) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{folder} cannot be used for {root}") from None
    return {
        "root": str(root),
        "free": shutil.disk_usage(str(folder)).free,
        "held": measured([root / name for name in held])["bytes"],
    }


def code(project: str, files: list) -> dict:
    """Tell which of the files [name, sha256] are missing or different under the project folder."""
    root = Path(project).expanduser()
    differ = []
    for name, digest in files:
        try:
            same = sha256(root / name) == digest
        except OSError:
            same = False
        if not same:
            differ.append(name)
    return {"differ": differ}


class TorchProcess:
    child: subprocess.Popen | None = None

    def torch_facts(self, seconds: int, program: str = "") -> dict:
        """Tell what torch can use. The process ends on an alarm of its own; `program` runs in it afterwards."""
        self.child = subprocess.Popen(
            [sys.executable, "-c", LOOK_AT_TORCH + program, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},  # what it says may be read only at its end
        )
        facts = self.read()
        if facts is not None:
            return facts
        _, err = self.child.communicate()
        if self.child.returncode == -signal.SIGALRM:
            return {"late": True}
        last = err.decode("utf-8", "replace").strip().splitlines() or [f"status {self.child.returncode}"]
        return {"failed": last[-1][:300]}

    def ask(self, op: str, **request) -> dict:
        """Have `program` do one of its operations."""
        assert self.child and self.child.stdin
        self.child.stdin.write(json.dumps({"op": op, **request}).encode() + b"\n")
        self.child.stdin.flush()
        answer = self.read()
        if answer is None:
            raise OSError(None, "the process with torch has ended")
        return answer

    def read(self) -> dict | None:
        """Read its next line of JSON, whatever else torch prints; None at its end."""
        assert self.child and self.child.stdout
        for line in self.child.stdout:
            if line.startswith(b"{"):
                return json.loads(line.decode())
        return None

    def kill(self) -> None:
        if self.child:
            self.child.kill()
