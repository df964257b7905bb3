"""What only macOS can tell: for each program one function that runs it, and one that reads its output.

The readers take text and are tested everywhere. None of these programs needs sudo. Off a Mac every question is answered
by the same "don't know" as when the program is silent.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 10.0
CAFFEINATE = Path("/usr/bin/caffeinate")
FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """chip: 'Apple M2 Pro'; model: 'Mac14,10'; memory: as macOS prints it, '16 GB'. Empty where it is not said."""

    chip: str = ""
    model: str = ""
    memory: str = ""


@dataclass(frozen=True, kw_only=True)
class Sleep:
    """minutes: idle time until the system sleeps, 0 for never; held_by: what keeps it awake just now."""

    minutes: int
    held_by: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Power:
    on_battery: bool
    percent: int | None = None  # of the battery; None on a desktop


def is_macos() -> bool:
    return platform.system() == "Darwin"


def output_of(command: Sequence[str], timeout: float = TIMEOUT_S) -> str:
    """What a program prints; empty if it is not there, fails, or does not end."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def hardware() -> Hardware:
    return parse_hardware(output_of(["/usr/sbin/system_profiler", "SPHardwareDataType", "-json"]))


def parse_hardware(text: str) -> Hardware:
    """Serial number and identifiers, which stand beside these, are never taken."""
    try:
        overview = json.loads(text)["SPHardwareDataType"][0]
        said = {key: str(overview.get(key) or "") for key in ("chip_type", "cpu_type", "machine_model")}
        memory = str(overview.get("physical_memory") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return Hardware()
    return Hardware(chip=said["chip_type"] or said["cpu_type"], model=said["machine_model"], memory=memory)


def translated() -> bool | None:
    """Whether this very process runs under Rosetta, as Intel code on an Apple chip."""
    return parse_flag(output_of(["/usr/sbin/sysctl", "-n", "sysctl.proc_translated"]))


def parse_flag(text: str) -> bool | None:
    """`sysctl -n` of a switch. None: it is not known (an Intel Mac has no sysctl.proc_translated)."""
    return {"0": False, "1": True}.get(text.strip())


def sleep() -> Sleep | None:
    return parse_sleep(output_of(["/usr/bin/pmset", "-g"]))


def parse_sleep(text: str) -> Sleep | None:
    """`pmset -g`: the settings in use for the present power source."""
    if re.search(r"^\s*SleepDisabled\s+1\s*$", text, re.MULTILINE):
        return Sleep(minutes=0)
    found = re.search(r"^\s*sleep\s+(\d+)(?:\s+\(sleep prevented by ([^)]*)\))?", text, re.MULTILINE)
    if not found:
        return None
    holders = tuple(name.strip() for name in (found[2] or "").split(",") if name.strip())
    return Sleep(minutes=int(found[1]), held_by=tuple(dict.fromkeys(holders)))


def power() -> Power | None:
    return parse_power(output_of(["/usr/bin/pmset", "-g", "batt"]))


def parse_power(text: str) -> Power | None:
    """`pmset -g batt`: a desktop has the first line alone."""
    source = re.search(r"Now drawing from '([^']+)'", text)
    if not source:
        return None
    percent = re.search(r"(\d+)%", text)
    return Power(on_battery=source[1] == "Battery Power", percent=int(percent[1]) if percent else None)


def remote_login() -> bool | None:
    """Whether Remote Login is switched on. `systemsetup -getremotelogin` wants root, and says so with status 0."""
    return parse_remote_login(output_of(["/bin/launchctl", "print-disabled", "system"]))


def parse_remote_login(text: str) -> bool | None:
    """`launchctl print-disabled system`; macOS 12 and older print true (disabled) and false."""
    found = re.search(r'"com\.openssh\.sshd" => (\w+)', text)
    return {"enabled": True, "false": True, "disabled": False, "true": False}.get(found[1]) if found else None


def firewall() -> str | None:
    return parse_firewall(output_of([FIREWALL, "--getglobalstate"]), output_of([FIREWALL, "--getblockall"]))


def parse_firewall(state: str, block_all: str) -> str | None:
    """'off', 'on' (asks for each program), 'blocks all', or None for what is not understood."""
    found = re.search(r"State = (\d)", state)
    if not found:
        return None
    if found[1] == "2" or re.search(r"block all\b.*\benabled|(blocking|set to block) all", block_all, re.IGNORECASE):
        return "blocks all"
    return "on" if found[1] == "1" else "off"
