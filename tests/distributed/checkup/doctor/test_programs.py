"""Outputs as macOS's manual pages and published transcripts show them; none was recorded on a Mac of ours."""

import pytest

from distributed.checkup import programs
from distributed.checkup.doctor.services import judge_display, judge_firewall, judge_sleep
from distributed.checkup.findings import Severity

OK, SKIPPED, WARNING, ERROR = Severity
HARDWARE = """{
  "SPHardwareDataType" : [
    {
      "_name" : "hardware_overview",
      "chip_type" : "Apple M2 Pro",
      "machine_model" : "Mac14,10",
      "machine_name" : "MacBook Pro",
      "number_processors" : "proc 12:0:8:4",
      "physical_memory" : "16 GB",
      "serial_number" : "SECRET"
    }
  ]
}
"""
PMSET = """System-wide power settings:
 SleepDisabled\t\t0
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 disksleep            10
 sleep                {sleep}
 displaysleep         2 (display sleep prevented by Safari)
 tcpkeepalive         1
"""
BATTERY = (
    "Now drawing from 'Battery Power'\n"
    " -InternalBattery-0 (id=22806627)\t78%; discharging; 5:05 remaining present: true\n"
)
MAINS = "Now drawing from 'AC Power'\n"


def test_the_chip_is_read_and_the_serial_number_is_not():
    assert programs.parse_hardware(HARDWARE) == programs.Hardware(chip="Apple M2 Pro", model="Mac14,10", memory="16 GB")
    assert "SECRET" not in repr(programs.parse_hardware(HARDWARE))


def test_an_intel_mac_names_its_processor():
    text = '{"SPHardwareDataType" : [{"cpu_type" : "Quad-Core Intel Core i5", "machine_model" : "Macmini8,1"}]}'
    assert programs.parse_hardware(text).chip == "Quad-Core Intel Core i5"


@pytest.mark.parametrize("text", ["", "not json", "{}", '{"SPHardwareDataType" : []}', '{"SPHardwareDataType" : [3]}'])
def test_hardware_that_is_not_told_is_empty(text):
    assert programs.parse_hardware(text) == programs.Hardware()


@pytest.mark.parametrize(
    ("setting", "source", "state", "words"),
    [
        ("0", MAINS, OK, "never sleeps by itself, on mains power"),
        ("30", MAINS, WARNING, "sleeps after 30 min, on mains power"),
        ("0", BATTERY, WARNING, "never sleeps by itself, on battery at 78%"),
        ("0", "Now drawing from 'Battery Power'\n", WARNING, "never sleeps by itself, on battery"),
        (
            "1 (sleep prevented by powerd, coreaudiod, coreaudiod)",
            "",
            WARNING,
            "sleeps after 1 min (kept awake right now by powerd, coreaudiod)",
        ),
    ],
)
def test_sleep(setting, source, state, words):
    found = judge_sleep(PMSET.format(sleep=setting), source, caffeinate=True)
    assert (found.severity, found.what) == (state, words)
    assert ("charger" in found.remedy) == ("battery" in words)


def test_sleep_that_is_switched_off_for_the_whole_system_is_never():
    settings = PMSET.format(sleep="10 (sleep prevented by powerd)").replace("\t\t0", "\t\t1")
    assert judge_sleep(settings, MAINS, caffeinate=True).what == "never sleeps by itself, on mains power"


def test_without_caffeinate_a_command_is_named():
    assert "`sudo pmset -c sleep 0`" in judge_sleep(PMSET.format(sleep=1), MAINS, caffeinate=False).remedy


@pytest.mark.parametrize("text", ["", "pmset: unknown option", "Currently in use:\n displaysleep 10\n"])
def test_sleep_that_is_not_told_is_unknown(text):
    found = judge_sleep(text, MAINS, caffeinate=True)
    assert found.severity is WARNING and "pmset" in found.what


@pytest.mark.parametrize(
    ("settings", "state", "words"),
    [
        (PMSET, OK, "sleeps after 2 min (kept on right now by Safari)"),
        (
            PMSET.replace("displaysleep         2", "displaysleep         0"),
            WARNING,
            "the display never sleeps",
        ),
        (" sleep 0\n", OK, "names no display"),
    ],
)
def test_the_display(settings, state, words):
    found = judge_display(settings)
    assert (found.severity, words in found.what) == (state, True), found
    assert ("`pmset displaysleepnow`" in found.remedy) == (state is WARNING)


@pytest.mark.parametrize(
    ("state", "block_all", "expected", "words"),
    [
        ("Firewall is disabled. (State = 0)\n", "Firewall has block all state set to disabled.\n", OK, "off"),
        (
            "Firewall is enabled. (State = 1)\n",
            "Firewall has block all state set to disabled.\n",
            WARNING,
            "on",
        ),
        ("Firewall is enabled. (State = 1)\n", "Block all DISABLED!\n", WARNING, "on"),
        (
            "Firewall is enabled. (State = 1)\n",
            "Firewall has block all state set to enabled.\n",
            ERROR,
            "blocks all",
        ),
        ("Firewall is enabled. (State = 2)\n", "", ERROR, "blocks all"),
        ("", "", WARNING, "unknown"),
    ],
)
def test_the_application_firewall(state, block_all, expected, words):
    found = judge_firewall(state, block_all, "/opt/my python")
    assert (found.severity, words in found.what) == (expected, True)
    if words == "on":
        assert "`sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add '/opt/my python'` and" in found.remedy
        assert "socketfilterfw --unblockapp '/opt/my python'`" in found.remedy


@pytest.mark.parametrize("command", [["/no/such/program"], ["sh", "-c", "echo half; exit 1"]])
def test_a_program_that_is_missing_or_fails_says_nothing(command):
    assert programs.output_of(command) == ""


def test_a_program_that_hangs_says_nothing_and_does_not_hold_us():
    assert programs.said_by(["sleep", "30"], 0.2) == {"status": None, "output": "no end within 0.2 s"}
