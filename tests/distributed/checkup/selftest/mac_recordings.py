"""Answers as Macs give them: outputs of programs from manual pages and public threads, none from a Mac of ours."""

from __future__ import annotations

import copy

SW_VERS = "ProductName:\t\tmacOS\nProductVersion:\t\t15.3.1\nBuildVersion:\t\t24D70\n"  # man sw_vers
# py2app #546, Homebrew/brew #16660: Homebrew's Python is signed ad hoc.
ADHOC = """Executable=/opt/homebrew/Cellar/python@3.12/3.12.9/Frameworks/Python.framework/Versions/3.12/Resources/\
Python.app/Contents/MacOS/Python
Identifier=org.python.python
Format=app bundle with Mach-O thin (arm64)
CodeDirectory v=20400 size=391 flags=0x2(adhoc) hashes=6+3 location=embedded
Signature=adhoc
Info.plist entries=16
TeamIdentifier=not set
Sealed Resources=none
Internal requirements count=0 size=12
"""
DEVELOPER = """Executable=/Library/Frameworks/Python.framework/Versions/3.12/Resources/Python.app/Contents/MacOS/Python
Identifier=org.python.python
Format=app bundle with Mach-O universal (x86_64 arm64)
CodeDirectory v=20500 size=461 flags=0x10000(runtime) hashes=6+5 location=embedded
Signature size=9053
Timestamp=4 Feb 2025 at 16:50:02
TeamIdentifier=BMM5U3QVKW
"""
UNSIGNED = "/Users/anna/.venv/bin/python: code object is not signed at all\n"
# nonocast/me #129 and glpi-agent #673, with other addresses.
PORTS = """
Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 8c:85:90:90:6d:26

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 82:f1:30:25:50:01

VLAN Configurations
===================
"""
IFCONFIG = """lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\tinet 127.0.0.1 netmask 0xff000000
\tinet6 ::1 prefixlen 128
\tinet6 fe80::1%lo0 prefixlen 64 scopeid 0x1
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 8c:85:90:90:6d:26
\tinet6 fe80::1c05:bcd3:6225:319%en0 prefixlen 64 secured scopeid 0x4
\tinet 192.168.3.227 netmask 0xffffff00 broadcast 192.168.3.255
\tnd6 options=201<PERFORMNUD,DAD>
"""
NO_ROUTE = {"ok": False, "errno": 65, "said": "No route to host"}
REFUSED = {"ok": False, "errno": 61, "said": "Connection refused"}
YES = {"ok": True, "seconds": 0.002}
BY_NC = {"ok": True, "status": 0, "output": "Connection to 192.168.3.228 port 49200 [tcp/*] succeeded!\n"}
NOT_BY_NC = {"ok": False, "status": 1, "output": ""}


def said(output: str, status: int | None = 0) -> dict:
    return {"status": status, "output": output}


def mac(**changes) -> dict:
    """The answer of `system`; `programs` among the changes replaces single ones."""
    about = {
        "system": "Darwin",
        "release": "15.3.1",
        "machine": "arm64",
        "cores": 10,
        "memory": 17_179_869_184,
        "python": "3.12.9",
        "implementation": "CPython",
        "executable": "/opt/homebrew/bin/python3.12",
        "is_real_python": True,
        "packages": {"torch": "2.13.0"},
        "programs": {
            "sw_vers": said(SW_VERS),
            "chip": said("Apple M2 Pro\n"),
            "translated": said("0\n"),
            "codesign": said(ADHOC),
        },
    }
    programs = changes.pop("programs", {})
    about = copy.deepcopy(about) | changes
    about["programs"] |= programs
    return about


def interfaces(*addresses: tuple[str, str]) -> dict:
    """The answer of `interfaces`, with these addresses of en0 in order."""
    lo0 = {"name": "lo0", "up": True, "speed": 0, "addresses": [["IPv4", "127.0.0.1"], ["IPv6", "::1"]]}
    en0 = {"name": "en0", "up": True, "speed": 0, "addresses": [list(each) for each in addresses]}
    return {"interfaces": [lo0, en0], "programs": {"ports": said(PORTS), "ifconfig": said(IFCONFIG)}}


def link(python: dict, nc: dict | None, later: dict | None = None, *, alone: bool = True) -> dict:
    """One of the answer of `connect`; later: by Python, once its parent is gone."""
    return {"to": "B", "python": python, "nc": nc, "detached": {"python": later or python, "nc": nc, "alone": alone}}
