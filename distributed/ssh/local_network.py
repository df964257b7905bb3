"""What keeps a Mac's programs from the network: Local Network privacy, and the application firewall.

By macOS 15 and later, programs that may not use the local network get errno 65 (Apple TN3179). It looks like a missing
route. What Apple ships itself is exempt, so its nc tells the two apart (nativelink #1694). The agent uses this on a
host, so it needs no more than Python 3.9.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

NO_ROUTE = 65  # EHOSTUNREACH on macOS
NC = "/usr/bin/nc"
NC_S = 2
DENIED = "macOS does not let this Python use the local network (errno 65), though Apple's own nc connects"
WAYS_OUT = (
    "Start from Terminal.app, not from another terminal, an editor or tmux; or run `ssh localhost` first and start"
    " from there; or allow the terminal in System Settings > Privacy & Security > Local Network."
)
FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"


def is_denied(error: OSError, address: str, port: int) -> bool:
    """Tell whether it is macOS's privacy that keeps this process from a connection, and not the network."""
    if sys.platform != "darwin" or error.errno != NO_ROUTE:
        return False
    command = [NC, "-z", "-G", str(NC_S), address, str(port)]
    try:
        done = subprocess.run(command, timeout=NC_S + 1, stdin=subprocess.DEVNULL, capture_output=True)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def real_python(base: str = sys.base_prefix, executable: str = sys.executable) -> str:
    """Find the program that this Python is, behind links and environments: by its path the firewall knows it.

    As a framework (Homebrew, python.org, Xcode), bin/python only starts Python.app (CPython's Mac/Tools/pythonw.c).
    """
    app = Path(base, "Resources", "Python.app", "Contents", "MacOS", "Python")
    return str((app if app.exists() else Path(executable)).resolve())


def allow_lines(program: str) -> str:
    """Say what lets a program accept connections (`socketfilterfw -h`); both ask for an administrator's password."""
    path = shlex.quote(program)
    return f"`sudo {FIREWALL} --add {path}` and `sudo {FIREWALL} --unblockapp {path}`"
