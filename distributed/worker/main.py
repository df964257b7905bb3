"""One rank, started by the launcher: `python -m distributed.worker.main RUN`.

Its RunSpec is the first line of stdin; by RUN a run's workers on one machine know each other.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import platform
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from distributed.control.channel import ControlChannel
from distributed.control.messages import send_event
from distributed.hosts.agent.files import hold
from distributed.hosts.keep_awake import MADE_ANEW, exclude_from_backups, keep_awake
from distributed.hosts.paths import PACKAGES
from distributed.plan.run_spec import CHECKPOINTS, RunSpec
from exogym.errors import ExogymError
from whisper_tuner.errors import ExitStatus, TunerError

OPEN_FILES = 4096  # a group that was given up keeps 8 and more until gloo's time-out, and a Mac allows 256

REMEDIES = {
    "PeerLost": "Another host went silent: look for its last lines in launcher.log.",
    "RanksDiverged": "`multimac hosts check` compares code and packages; then start again, or resume.",
    "NotFinite": "Try a lower learning_rate; `runs show` has the loss so far.",
    "CheckpointError": "Start a new run, or put the run's checkpoints back on that host.",
    "SettingError": "`multimac config show NAME` explains every setting.",
}


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    allow_open_files()
    line = sys.stdin.buffer.readline()
    if not line:
        return ExitStatus.RUN
    channel = ControlChannel(sys.stdin.buffer)
    try:
        work(RunSpec.from_json(line.decode()), channel)
    except Exception as error:
        kind, status, foreseen = type(error).__name__, ExitStatus.ERROR, {"foreseen": True}
        if isinstance(error, TunerError):
            status, message = error.exit_status, str(error)
        elif isinstance(error, ExogymError):
            remedy = REMEDIES.get(kind)
            status, message = ExitStatus.RUN, f"{error}\n  {remedy}" if remedy else str(error)
        else:
            traceback.print_exc()
            message, foreseen = f"{kind}: {error}", {}
        send_event({"type": "error", "kind": kind, "message": message, **foreseen})
        return status


def allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def work(spec: RunSpec, channel: ControlChannel) -> NoReturn:
    """Be a rank until the launcher ends this process."""
    hold(Path())
    gc.disable()  # a sixth of the time of so many imports
    from .in_use import InUse
    from .readings import tell_readings
    from .train import run  # torch and transformers: seconds, in which the channel is already watched

    gc.enable()
    send_event(
        {
            "type": "hello",
            "pid": os.getpid(),
            "system": platform.system(),
            "source": loaded_source_hash(),
            "awake": keep_awake(os.getpid()),
        }
    )
    InUse(spec.yield_when, send_event).start()
    if told := spare_backups(Path(spec.run_dir)):
        send_event({"type": "notice", "what": told})
    tell_readings(send_event)
    save = run(spec, events=send_event, channel=channel)
    channel.saving.wait()  # only one rank is asked to; for the others the end comes with `quit`
    save()
    send_event({"type": "saved"})
    while True:
        threading.Event().wait()


def spare_backups(run_dir: Path) -> str:
    """Exclude what can be made anew, from the project folder, where a worker runs. Returns what is to be told."""
    checkpoints = run_dir / CHECKPOINTS
    with contextlib.suppress(OSError):  # whoever writes a checkpoint says why
        checkpoints.mkdir(parents=True, exist_ok=True, mode=0o700)
    return exclude_from_backups(*map(Path, MADE_ANEW), checkpoints)


def loaded_source_hash() -> str:
    """Hash our source files that this process has loaded: a host may load another copy than the one it was sent."""
    digest = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and name.split(".")[0] in PACKAGES:
            digest.update(name.encode() + b"\0" + hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a group with a lost peer must not hold up the end
