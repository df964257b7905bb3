"""Local Network privacy of macOS 15 and later: programs that may not use the local network get errno 65 (Apple TN3179).

It looks like a missing route. What Apple ships itself is exempt, so its nc tells the two apart (nativelink #1694).
The agent uses this on a host, so it needs no more than Python 3.9.
"""

from __future__ import annotations

import subprocess
import sys

NO_ROUTE = 65  # EHOSTUNREACH on macOS
NC = "/usr/bin/nc"
NC_S = 2
DENIED = "macOS does not let this Python use the local network (errno 65), though Apple's own nc connects"
WAYS_OUT = (
    "Start from Terminal.app, not from another terminal, an editor or tmux; or run `ssh localhost` first and start"
    " from there; or allow the terminal in System Settings > Privacy & Security > Local Network."
)


def is_denied(error: OSError, address: str, port: int) -> bool:
    """Tell whether it is macOS's privacy that keeps this process from a connection, and not the network."""
    if sys.platform != "darwin" or error.errno != NO_ROUTE:
        return False
    command = [NC, "-z", "-G", str(NC_S), address, str(port)]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.run(command, timeout=NC_S + 1, **quiet).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
