"""The report that a run leaves at its end. A process of its own writes it: whatever happens there does the run no harm.

The command that starts a run names the module that writes it, since it belongs to what a person sees.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPORT = "--report="  # an option of the launcher; a module's name follows
LONGEST_S = 120.0  # it usually takes a second or two; a run of a day must not wait for a disk that hangs
AT_ONCE_S = 10.0  # of a run that was to stop at once
NOT_WRITTEN = "the report was not written: "


def report_event(module: str, run_dir: Path, longest_s: float = LONGEST_S) -> dict | None:
    """Have a report written, and make the event to tell.

    `python -m MODULE RUN_DIR` prints the path, nothing, or with status 1 a reason.
    """
    command = [sys.executable, "-m", module, str(run_dir)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            timeout=longest_s,
        )
    except subprocess.TimeoutExpired:
        return {"type": "warning", "what": f"{NOT_WRITTEN}it took over {longest_s:.0f} s"}
    except OSError as error:
        return {"type": "warning", "what": f"{NOT_WRITTEN}{error}"}
    said = done.stdout.strip().splitlines()
    if done.returncode:
        reason = said[-1] if said else f"its process ended with status {done.returncode}; see launcher.log"
        return {"type": "warning", "what": NOT_WRITTEN + reason}
    return {"type": "report", "path": said[-1]} if said else None
