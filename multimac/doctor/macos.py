"""What only macOS can tell of its hardware. Elsewhere every question is answered as if its program were silent."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """chip: 'Apple M2 Pro'; model: 'Mac14,10'; memory: as macOS prints it, '16 GB'. Empty where it is not said."""

    chip: str = ""
    model: str = ""
    memory: str = ""


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


def translated() -> bool:
    """Whether this very process runs under Rosetta, as Intel code on an Apple chip."""
    return output_of(["/usr/sbin/sysctl", "-n", "sysctl.proc_translated"]).strip() == "1"
