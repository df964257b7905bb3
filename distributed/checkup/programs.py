"""What the system's own programs say, most of all macOS's: no other source tells of its hardware."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

LIMIT_S = 10.0
MOST = 20_000  # characters
IOREG = ["/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"]
NVIDIA_SMI = ["nvidia-smi", "--query-gpu=utilization.gpu,temperature.gpu", "--format=csv,noheader,nounits"]
NOTIFYUTIL = ["/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel"]
# The levels of macOS in OSThermalNotification.h are nominal, moderate, heavy, trapping and sleeping. For programs
# NSProcessInfo.thermalState has four names, and calls both of the middle ones fair.
THERMAL_STATES = ("nominal", "fair", "fair", "serious", "critical")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """chip: 'Apple M2 Pro'; model: 'Mac14,10'; memory: as macOS prints it, '16 GB'. Empty where it is not said."""

    chip: str = ""
    model: str = ""
    memory: str = ""


def is_macos() -> bool:
    return platform.system() == "Darwin"


def said_by(command: Sequence[str], limit_s: float = LIMIT_S, *, errors: bool = True, most: int | None = MOST) -> dict:
    """Run a program: its `status`, None if it did not run or did not end, and its `output`, with that of stderr."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"status": None, "output": f"no end within {limit_s:g} s"}
    except OSError as error:
        return {"status": None, "output": error.strerror or str(error)}
    output = done.stdout + (done.stderr if errors else b"")
    return {"status": done.returncode, "output": output.decode("utf-8", "replace")[:most]}


def output_of(command: Sequence[str]) -> str:
    """Return what a program prints on stdout; empty if it is not there, fails, or does not end."""
    said = said_by(command, errors=False, most=None)
    return said["output"] if said["status"] == 0 else ""


def hardware() -> Hardware:
    """Read the chip, model and memory; serial number and identifiers, which stand beside these, are never taken."""
    try:
        overview = json.loads(output_of(["/usr/sbin/system_profiler", "SPHardwareDataType", "-json"]))
        about = overview["SPHardwareDataType"][0]
        chip, model, memory = (str(about.get(key) or "") for key in ("chip_type", "machine_model", "physical_memory"))
        return Hardware(chip=chip or str(about.get("cpu_type") or ""), model=model, memory=memory)
    except (ValueError, LookupError, TypeError, AttributeError):
        return Hardware()


def translated() -> bool:
    """Tell whether this very process runs under Rosetta, as Intel code on an Apple chip."""
    return output_of(["/usr/sbin/sysctl", "-n", "sysctl.proc_translated"]).strip() == "1"


def accelerators() -> dict[str, float]:
    """Read how busy this Mac's GPU is, as `gpu` in per cent; {} if it does not say."""
    return _mean_load(re.findall(r'"Device Utilization %"\s*=\s*(\d+)', output_of(IOREG)))


def cards() -> dict[str, float]:
    """Read how busy NVIDIA's cards are, as `gpu` in per cent, and the `temperature` of the hottest one."""
    rows = [line.split(", ") for line in output_of(NVIDIA_SMI).splitlines()]
    loads, degrees = ([row[column] for row in rows if row[column:]] for column in (0, 1))
    known = [float(text) for text in degrees if text.isdigit()]  # "[N/A]" of a card that does not tell
    return _mean_load(loads) | ({"temperature": max(known)} if known else {})


def _mean_load(loads: Sequence[str]) -> dict[str, float]:
    known = [int(load) for load in loads if load.isdigit()]
    return {"gpu": round(sum(known) / len(known))} if known else {}


def thermal_pressure() -> dict[str, str]:
    """Read how much heat holds this Mac back, as `thermal`. `pmset -g therm` says nothing of it on Apple's chips."""
    *_, level = output_of(NOTIFYUTIL).split() or [""]
    known = level.isdigit() and int(level) < len(THERMAL_STATES)
    return {"thermal": THERMAL_STATES[int(level)]} if known else {}
