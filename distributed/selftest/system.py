"""The system, its Python and its packages, in the words of the system's own programs."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from importlib import metadata

import psutil

from distributed.hosts.firewall import real_python

from .programs import said_by

PACKAGES = ("torch", "transformers", "peft", "numpy", "safetensors", "paramiko", "psutil")
MAC = {
    "sw_vers": ["/usr/bin/sw_vers"],
    "chip": ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
    "xcode_select": ["/usr/bin/xcode-select", "-p"],
    "translated": ["/usr/sbin/sysctl", "-n", "sysctl.proc_translated"],
}


def system(request: dict) -> dict:
    # Homebrew's and python.org's `bin/python` start another executable, in Python.app: that is the one which is signed.
    running = psutil.Process().exe()
    programs = dict(MAC) if sys.platform == "darwin" else {}
    if programs:
        programs["codesign"] = ["/usr/bin/codesign", "-dv", running]
    return {
        "system": platform.system(),
        "release": platform.mac_ver()[0] or platform.release(),
        "machine": platform.machine(),  # of this Python, which may be an Intel one on an Apple chip
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": running,
        "base": sys._base_executable,
        "platform": sysconfig.get_platform(),
        "is_real_python": real_python() == running,  # the path that the firewall's remedy names
        "packages": {name: version(name) for name in PACKAGES},
        "programs": {name: said_by(command) for name, command in programs.items()},
    }


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
