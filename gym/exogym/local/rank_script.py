"""`python -m exogym.local.rank_script train.py [args]` runs a script as one rank; `exogym.launch` starts it for each.

It writes down an exception for the launcher to show, and ends when the launcher is killed.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from pathlib import Path

POLL_S = 0.5


def end_with_parent() -> None:
    """End this process when its launcher is killed, which then cannot stop its ranks."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> None:
    """Run a script, or a module where `-m` stands in front of it, as Python itself does."""
    end_with_parent()  # at once: importing torch takes seconds, in which the launcher may be killed
    from torch.distributed.elastic.multiprocessing.errors import record

    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    if is_module:
        record(runpy.run_module)(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        record(runpy.run_path)(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
