"""One rank, started by the launcher: `python -m distributed.worker.main RUN`.

Its RunSpec is the first line of stdin; by RUN a run's workers on one machine know each other.
"""

from __future__ import annotations

import gc
import os
import platform
import signal
import sys
import threading
import traceback
from pathlib import Path

from distributed.control.channel import ControlChannel
from distributed.control.messages import send_event
from distributed.hosts.keep_awake import keep_awake
from distributed.plan.run_spec import RunSpec
from exogym.errors import ExogymError
from whisper_tuner.errors import ExitStatus, TunerError

from .source_hash import loaded_source_hash

REMEDIES = {
    "PeerLost": "Another host fell silent: see what its own lines say.",
    "RanksDiverged": "`multimac hosts check` compares code and packages; then start again, or resume.",
    "NotFinite": "Try a lower learning_rate; `runs show` has the loss so far.",
    "CheckpointError": "Start a new run, or put the run's checkpoints back on that host.",
    "SettingError": "`multimac config show NAME` explains every setting.",
}


def _explained(error: ExogymError) -> str:
    remedy = REMEDIES.get(type(error).__name__)
    return f"{error}\n  {remedy}" if remedy else str(error)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    line = sys.stdin.buffer.readline()
    if not line:
        return ExitStatus.RUN
    channel = ControlChannel(sys.stdin.buffer)
    try:
        spec = RunSpec.from_json(line.decode())
        gc.disable()  # a sixth of the time of so many imports
        from .train import run  # torch and transformers: seconds, in which the channel is already watched

        gc.enable()
        about = {"pid": os.getpid(), "system": platform.system(), "source": loaded_source_hash()}
        about["awake"] = keep_awake(os.getpid())
        send_event({"type": "hello", **about})
        save = run(spec, events=send_event, channel=channel)
        channel.saving.wait()  # only one rank is asked to; for the others the end comes with `quit`
        save(Path(spec.run_dir))
        send_event({"type": "saved"})
        threading.Event().wait()
    except TunerError as error:
        send_event({"type": "error", "kind": type(error).__name__, "foreseen": True, "message": str(error)})
        return error.exit_status
    except ExogymError as error:
        send_event({"type": "error", "kind": type(error).__name__, "foreseen": True, "message": _explained(error)})
        return ExitStatus.RUN
    except Exception as error:
        traceback.print_exc()
        send_event({"type": "error", "kind": type(error).__name__, "message": f"{type(error).__name__}: {error}"})
        return ExitStatus.ERROR


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a group with a lost peer must not hold up the end
