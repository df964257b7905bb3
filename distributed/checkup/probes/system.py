"""The system, its Python and packages, and what a run asks of it: open files, a disk that syncs, no sleep, killing.

Also the import of torch in a fresh process, and how long it holds up the beats of that and of its parent. The first one
on a Mac may take up to a minute, as the system scans what is new. A thread of the process itself beats only while the
import leaves it the interpreter.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import pwd
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import psutil

from distributed.checkup.programs import said_by
from distributed.control.messages import send_event
from distributed.hosts.keep_awake import CAFFEINATE, HOLD, TMUTIL
from distributed.ssh.local_network import real_python
from distributed.worker.main import OPEN_FILES, allow_open_files

from .network import ELSEWHERE
from .probe import PROBE, answer_in

PACKAGES = ("torch", "transformers", "peft", "numpy", "safetensors", "paramiko", "psutil")
MAC = {
    "sw_vers": ["/usr/bin/sw_vers"],
    "chip": ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
    "xcode_select": ["/usr/bin/xcode-select", "-p"],
    "translated": ["/usr/sbin/sysctl", "-n", "sysctl.proc_translated"],
}
MANY = OPEN_FILES - 100  # of what is allowed, Python has some itself
PMSET = "/usr/bin/pmset"
SOON_S, END_S, GONE_S = 1.0, 5.0, 3.0
BEAT_EVERY_S = 0.5
TURN_S = 0.02  # between two turns of a thread while torch is imported
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
RUN = re.compile(r"\d{8}-\d{6}-selftest(-\d+)?")


def system(request: dict) -> dict:
    """Describe the system, this Python and its packages, in the words of the system's own programs."""
    # Homebrew's and python.org's `bin/python` start another executable, in Python.app: that is the one which is signed.
    running = psutil.Process().exe()
    programs = dict(MAC) if sys.platform == "darwin" else {}
    if programs:
        programs["codesign"] = ["/usr/bin/codesign", "-dv", running]
    packages: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "system": platform.system(),
        "release": platform.mac_ver()[0] or platform.release(),
        "machine": platform.machine(),  # of this Python, which may be an Intel one on an Apple chip
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": running,
        "base": getattr(sys, "_base_executable", ""),
        "platform": sysconfig.get_platform(),
        "is_real_python": real_python() == running,  # the path that the firewall's remedy names
        "packages": packages,
        "programs": {name: said_by(command) for name, command in programs.items()},
    }


def services(request: dict) -> dict:
    """Try what a run needs of the system; of each the answer, or what `failed`."""
    looks = {"open_files": open_files, "foreign_address": foreign_address, "folder": folder, "awake": awake}
    found = {}
    for name, look in looks.items():
        try:
            found[name] = look()
        except Exception as error:  # one that fails keeps no other from answering
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
    return found


def open_files() -> dict:
    """Raise the limit as a worker does; then really open so many."""
    before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_open_files()
    opened: list[int] = []
    try:
        for _ in range(MANY):
            opened.append(os.dup(0))
    except OSError:
        pass
    finally:
        for handle in opened:
            os.close(handle)
    return {"before": before, "after": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "opened": len(opened)}


def foreign_address() -> dict:
    """Listen on another machine's address: by that error a launcher knows that its machine has lost an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return {"error": _error(lambda: probe.bind((ELSEWHERE, 0)))}


def folder() -> dict:
    """Sync a new folder of the project, where runs are, since folders for temporary files are never backed up.

    On a Mac, ask Time Machine about it before and after it is excluded. The mark goes with the folder.
    """
    is_mac = sys.platform == "darwin"

    def sync() -> None:
        if sys.platform == "darwin":
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            os.fsync(handle)

    def excluded() -> str:
        found = re.search(r"\[(\w+)\]", said_by([TMUTIL, "isexcluded", made])["output"])
        return found[1] if found else ""

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".selftest-") as made:
        handle = os.open(made, os.O_RDONLY)
        try:
            began = time.perf_counter()
            error = _error(sync)
            seconds = time.perf_counter() - began
        finally:
            os.close(handle)
        backups = None
        if is_mac:
            before = excluded()
            status = said_by([TMUTIL, "addexclusion", made])["status"]
            backups = {"before": before, "status": status, "after": excluded()}
    how = "F_FULLFSYNC" if is_mac else "fsync"
    return {"sync": {"how": how, "error": error, "seconds": seconds}, "backups": backups}


def awake() -> dict | None:
    """Hold this Mac awake as a host is, by a process that ends with its stdin. None elsewhere."""
    if sys.platform != "darwin":
        return None

    def caffeinated() -> set[str]:
        """Return only process ids: the rest of the output names programs and devices of the owner's."""
        return set(re.findall(r"pid (\d+)\(caffeinate\)", said_by([PMSET, "-g", "assertions"])["output"]))

    before = caffeinated()
    holder = subprocess.Popen(["/bin/sh", "-c", HOLD, CAFFEINATE], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert holder.stdin
    try:
        time.sleep(SOON_S)
        during = caffeinated() - before
        holder.stdin.close()
        status = holder.wait(END_S)
        return {"shown": bool(during), "status": status, "ended": True, "left": bool(during & caffeinated())}
    except subprocess.TimeoutExpired:
        return {"shown": bool(during), "status": None, "ended": False, "left": True}
    finally:
        holder.kill()
        holder.wait()


def _error(act: Callable[[], object]) -> str:
    """Return the name of the system's error, "" without one."""
    try:
        act()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return ""


def sit(request: dict) -> dict:
    """Say what process and group this is, with a child in it, and wait to be killed."""
    child = subprocess.Popen(SLEEPER)
    try:
        login = pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        login = ""
    shells = {"login": Path(login).name, "session": Path(os.environ.get("SHELL", "")).name}
    send_event({"type": "sits", "pid": os.getpid(), "group": os.getpgid(0), "child": child.pid, "shells": shells})
    while True:
        time.sleep(60)


def alive(request: dict) -> list[int]:
    """Return which of `pids` are still there after GONE_S; zombies are not."""
    deadline = time.monotonic() + GONE_S
    while (left := [pid for pid in request["pids"] if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def zombie(request: dict) -> dict:
    """Kill a group whose only member has ended: before somebody waits for it, and after. Names of the errors."""
    child = subprocess.Popen(["/bin/sh", "-c", "exit 0"], start_new_session=True)
    deadline = time.monotonic() + GONE_S
    while _lives(child.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    unreaped = _error(lambda: os.killpg(child.pid, signal.SIGKILL))
    child.wait()
    return {"unreaped": unreaped, "reaped": _error(lambda: os.killpg(child.pid, signal.SIGKILL))}


def beats(request: dict) -> dict:
    """Beat for `seconds`; return the longest gap on each clock. While a machine sleeps there are no beats.

    time.monotonic stands still while a Mac sleeps (man 3 clock).
    """
    until = time.time() + request["seconds"]
    wall, steady = time.time(), time.monotonic()
    gaps = [0.0, 0.0]
    while time.time() < until:
        time.sleep(BEAT_EVERY_S)
        now, then = time.time(), time.monotonic()
        gaps = [max(gaps[0], now - wall), max(gaps[1], then - steady)]
        wall, steady = now, then
        send_event({"type": "beat", "wall": now})
    return {"wall_gap_s": gaps[0], "steady_gap_s": gaps[1]}


def forget(request: dict) -> dict:
    """Remove the folder of a run of the self-test below runs/, and no other one."""
    if not RUN.fullmatch(request["run"]):
        raise ValueError(f"{request['run']!r} is no run of the self-test")
    folder = Path("runs") / request["run"]
    shutil.rmtree(folder, ignore_errors=True)
    return {"left": folder.exists()}


@contextlib.contextmanager
def longest_gap() -> Iterator[list[float]]:
    """Measure within a `with` the longest time between two turns of a thread: afterwards, the list's only item."""
    longest, over = [0.0], threading.Event()

    def turn() -> None:
        last, is_over = time.perf_counter(), False
        while not is_over:
            is_over = over.wait(TURN_S)
            now = time.perf_counter()
            longest[0], last = max(longest[0], now - last), now

    thread = threading.Thread(target=turn, daemon=True)
    thread.start()
    try:
        yield longest
    finally:
        over.set()
        thread.join()


def imports(request: dict) -> list[dict]:
    """Import torch in a new process, twice: the first time may take long, the second one is the usual case."""
    found = []
    for _ in range(2):
        began, ask = time.perf_counter(), [*PROBE, "system.import_torch"]
        with longest_gap() as gap:
            done = subprocess.run(
                ask, input='{"life_s": 100}\n', stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        whole_s = time.perf_counter() - began
        found.append({**answer_in(done.stdout), "whole_s": whole_s, "parent_gap_s": gap[0]})
    return found


def import_torch(request: dict) -> dict:
    assert "torch" not in sys.modules, "something has imported torch before"
    began = time.perf_counter()
    with longest_gap() as gap:
        import torch  # noqa: F401
    return {"import_s": time.perf_counter() - began, "gap_s": gap[0]}
