"""What a worker tells of its machine while it trains: how busy and how hot it is, its memory and its battery."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from distributed.checkup.programs import accelerators, cards, is_macos, thermal_pressure

EVERY_S = 10.0
AGAIN_S = 600.0  # before what gave nothing is asked again: a desktop has no battery, and a program may hang
HOTTEST = 150.0  # degrees; a sensor that says more is not connected
Reading = Callable[[], dict[str, Any]]


class Readings:
    """Reads what this machine gives. What it does not give is left out, and no reason to end a run."""

    def __init__(self, sources: tuple[Reading, ...] = (), clock: Callable[[], float] = time.monotonic):
        programs = (accelerators, thermal_pressure) if is_macos() else (cards,)
        self._sources = sources or (processors, memory, battery, sensors, *programs)
        self._clock = clock
        self._rests_until: dict[Reading, float] = {}
        psutil.cpu_percent()  # the next call tells of the time since

    def take(self) -> dict[str, Any]:
        """Return the fields of the event `machine`."""
        found: dict[str, Any] = {}
        for source in self._sources:
            if self._clock() < self._rests_until.get(source, 0.0):
                continue
            try:
                given = source()
            except Exception:  # psutil raises what each system's files and calls make it raise
                given = {}
            if not given:
                self._rests_until[source] = self._clock() + AGAIN_S
            hottest = [each["temperature"] for each in (found, given) if "temperature" in each]
            found |= given | ({"temperature": max(hottest)} if hottest else {})
        return found


def processors() -> dict[str, Any]:
    return {"cpu": round(psutil.cpu_percent())}


def memory() -> dict[str, Any]:
    now = psutil.virtual_memory()
    return {"memory_used": now.total - now.available, "memory_total": now.total}


def battery() -> dict[str, Any]:
    look = getattr(psutil, "sensors_battery", None)  # psutil has it where the system tells
    found = look() if look else None
    if found is None:
        return {}
    mains = {} if found.power_plugged is None else {"on_mains": bool(found.power_plugged)}
    return {"battery": round(found.percent)} | mains


def sensors() -> dict[str, Any]:
    """Return the temperature of the hottest sensor. A Mac shows its own to root only."""
    degrees = [sensor.current for chip in psutil.sensors_temperatures().values() for sensor in chip]
    plausible = [one for one in degrees if one is not None and 0 < one < HOTTEST]
    return {"temperature": round(max(plausible))} if plausible else {}


def tell_readings(send: Callable[[dict], None]) -> None:
    """Send the event `machine` from a thread, as long as this process lives."""

    def tell() -> None:
        readings = Readings()  # psutil keeps what it has measured by thread
        while True:
            time.sleep(EVERY_S)
            send({"type": "machine", **readings.take()})

    threading.Thread(target=tell, daemon=True).start()
