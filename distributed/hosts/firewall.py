"""macOS's application firewall, which knows programs by the path of what really runs.

The agent uses this on a host, so it needs no more than Python 3.9.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"


def real_python(base: str = sys.base_prefix, executable: str = sys.executable) -> str:
    """Find the program that this Python is, behind links and environments.

    As a framework (Homebrew, python.org, Xcode), bin/python only starts Python.app (CPython's Mac/Tools/pythonw.c).
    """
    app = Path(base, "Resources", "Python.app", "Contents", "MacOS", "Python")
    return str((app if app.exists() else Path(executable)).resolve())


def allow_lines(program: str) -> str:
    """Say what lets a program accept connections (`socketfilterfw -h`); both ask for an administrator's password."""
    path = shlex.quote(program)
    return f"`sudo {FIREWALL} --add {path}` and `sudo {FIREWALL} --unblockapp {path}`"
