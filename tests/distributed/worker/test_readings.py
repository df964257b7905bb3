"""What machines tell of themselves. Outputs of programs are as published by those who recorded them on Macs."""

import resource
import threading
import time

import psutil
import pytest

from distributed.checkup import programs
from distributed.run_dir.events import event_of
from distributed.worker import readings
from distributed.worker.readings import AGAIN_S, Readings, tell_readings

M3_PRO = """+-o AGXAcceleratorG15X  <class AGXAcceleratorG15X, id 0x100000481, registered, matched, active, retain 98>
    {
      "model" = "Apple M3 Pro"
      "PerformanceStatistics" = {"In use system memory (driver)"=0,"Alloc system memory"=16749051904,\
"Tiler Utilization %"=7,"recoveryCount"=0,\
"Renderer Utilization %"=11,"Device Utilization %"=16,"In use system memory"=568164352}
    }
"""
LEVEL = "com.apple.system.thermalpressurelevel {}\n"


@pytest.mark.parametrize(
    ("read", "output", "expected"),
    [
        (programs.accelerators, M3_PRO, {"gpu": 16}),
        (programs.accelerators, "", {}),
        (programs.cards, "97, 64\n", {"gpu": 97, "temperature": 64.0}),
        (programs.cards, "100, 81\n50, 60\n", {"gpu": 75, "temperature": 81.0}),
        (programs.cards, "[N/A], 45\n", {"temperature": 45.0}),
        (programs.cards, "NVIDIA-SMI has failed", {}),
        (programs.thermal_pressure, LEVEL.format(0), {"thermal": "nominal"}),
        (programs.thermal_pressure, LEVEL.format(2), {"thermal": "fair"}),  # "heavy"
        (programs.thermal_pressure, LEVEL.format(4), {"thermal": "critical"}),
        (programs.thermal_pressure, LEVEL.format(20), {}),  # of iOS
        (programs.thermal_pressure, "", {}),
    ],
)
def test_what_programs_say_of_a_machine(monkeypatch, read, output, expected):
    monkeypatch.setattr(programs, "output_of", lambda command: output)
    assert read() == expected


def test_what_fails_is_left_out_and_rests_before_it_is_asked_again():
    asked, now = [], [0.0]

    def broken():
        asked.append(now[0])
        raise FileNotFoundError("/sys/class/hwmon")

    own = Readings((lambda: {"cpu": 5, "temperature": 40}, broken, lambda: {"temperature": 71}), lambda: now[0])
    for now[0] in (0.0, 10.0, AGAIN_S - 1, AGAIN_S):
        assert own.take() == {"cpu": 5, "temperature": 71}
    assert asked == [0.0, AGAIN_S]


def test_this_machine_is_told_at_no_cost(monkeypatch):
    """Sixty readings, which take ten minutes in a run."""
    monkeypatch.setattr(readings, "EVERY_S", 0.0)
    said, enough = [], threading.Event()

    def send(event):
        said.append(event)
        if len(said) == 60:
            enough.set()
            threading.Event().wait()

    before = time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    tell_readings(send)
    assert enough.wait(60)
    assert time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1.0
    for number, told in enumerate(said):
        event = event_of({"time": 1.0, "host": "h", **told})
        assert event and event.memory_total == psutil.virtual_memory().total
        assert 0 < event.memory_used < event.memory_total and 0 <= event.cpu <= 100, number


def test_the_first_reading_tells_of_the_time_before_it(monkeypatch):
    monkeypatch.setattr(readings, "EVERY_S", 0.5)
    said: list[dict] = []

    def send(event):
        said.append(event)
        threading.Event().wait()

    tell_readings(send)
    until = time.monotonic() + 20
    while not said and time.monotonic() < until:
        pass  # one core is busy
    assert said[0]["cpu"] > 0


def test_battery_and_mains(monkeypatch):
    monkeypatch.setattr(psutil, "sensors_battery", lambda: psutil._ntuples.sbattery(71.4, 9000, False), raising=False)
    assert readings.battery() == {"battery": 71, "on_mains": False}
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    assert readings.battery() == {}
