"""Outputs as macOS's manual pages and published transcripts show them; none was recorded on a Mac of ours."""

import pytest

from multimac.doctor import macos
from multimac.doctor.checks import State
from multimac.doctor.services import judge_display, judge_firewall, judge_sleep

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
    assert macos.parse_hardware(HARDWARE) == macos.Hardware(chip="Apple M2 Pro", model="Mac14,10", memory="16 GB")
    assert "SECRET" not in repr(macos.parse_hardware(HARDWARE))


def test_an_intel_mac_names_its_processor():
    text = '{"SPHardwareDataType" : [{"cpu_type" : "Quad-Core Intel Core i5", "machine_model" : "Macmini8,1"}]}'
    assert macos.parse_hardware(text).chip == "Quad-Core Intel Core i5"


@pytest.mark.parametrize("text", ["", "not json", "{}", '{"SPHardwareDataType" : []}', '{"SPHardwareDataType" : [3]}'])
def test_hardware_that_is_not_told_is_empty(text):
    assert macos.parse_hardware(text) == macos.Hardware()


@pytest.mark.parametrize(
    ("setting", "source", "state", "words"),
    [
        ("0", MAINS, State.OK, "never sleeps by itself, on mains power"),
        ("30", MAINS, State.WARNING, "sleeps after 30 min, on mains power"),
        ("0", BATTERY, State.WARNING, "never sleeps by itself, on battery at 78%"),
        ("0", "Now drawing from 'Battery Power'\n", State.WARNING, "never sleeps by itself, on battery"),
        (
            "1 (sleep prevented by powerd, coreaudiod, coreaudiod)",
            "",
            State.WARNING,
            "sleeps after 1 min (kept awake right now by powerd, coreaudiod)",
        ),
    ],
)
def test_sleep(setting, source, state, words):
    found = judge_sleep(PMSET.format(sleep=setting), source, caffeinate=True)
    assert (found.state, found.detail) == (state, words)
    assert ("charger" in found.remedy) == ("battery" in words)


def test_sleep_that_is_switched_off_for_the_whole_system_is_never():
    settings = PMSET.format(sleep="10 (sleep prevented by powerd)").replace("\t\t0", "\t\t1")
    assert judge_sleep(settings, MAINS, caffeinate=True).detail == "never sleeps by itself, on mains power"


def test_without_caffeinate_a_command_is_named():
    assert "`sudo pmset -c sleep 0`" in judge_sleep(PMSET.format(sleep=1), MAINS, caffeinate=False).remedy


@pytest.mark.parametrize("text", ["", "pmset: unknown option", "Currently in use:\n displaysleep 10\n"])
def test_sleep_that_is_not_told_is_unknown(text):
    found = judge_sleep(text, MAINS, caffeinate=True)
    assert found.state is State.WARNING and "pmset" in found.detail


@pytest.mark.parametrize(
    ("settings", "state", "words"),
    [
        (PMSET, State.OK, "sleeps after 2 min (kept on right now by Safari)"),
        (PMSET.replace("displaysleep         2", "displaysleep         0"), State.WARNING, "the display never sleeps"),
        (" sleep 0\n", State.OK, "names no display"),
    ],
)
def test_the_display(settings, state, words):
    found = judge_display(settings)
    assert (found.state, words in found.detail) == (state, True), found
    assert ("`pmset displaysleepnow`" in found.remedy) == (state is State.WARNING)


@pytest.mark.parametrize(
    ("state", "block_all", "expected", "words"),
    [
        ("Firewall is disabled. (State = 0)\n", "Firewall has block all state set to disabled.\n", State.OK, "off"),
        ("Firewall is enabled. (State = 1)\n", "Firewall has block all state set to disabled.\n", State.WARNING, "on"),
        ("Firewall is enabled. (State = 1)\n", "Block all DISABLED!\n", State.WARNING, "on"),
        (
            "Firewall is enabled. (State = 1)\n",
            "Firewall has block all state set to enabled.\n",
            State.PROBLEM,
            "blocks all",
        ),
        ("Firewall is enabled. (State = 2)\n", "", State.PROBLEM, "blocks all"),
        ("", "", State.WARNING, "unknown"),
    ],
)
def test_the_application_firewall(state, block_all, expected, words):
    found = judge_firewall(state, block_all, "/opt/my python")
    assert (found.state, words in found.detail) == (expected, True)
    if words == "on":
        assert "`sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add '/opt/my python'` and" in found.remedy
        assert "socketfilterfw --unblockapp '/opt/my python'`" in found.remedy


@pytest.mark.parametrize("command", [["/no/such/program"], ["sh", "-c", "echo half; exit 1"]])
def test_a_program_that_is_missing_or_fails_says_nothing(command):
    assert macos.output_of(command) == ""


def test_a_program_that_hangs_says_nothing_and_does_not_hold_us():
    assert macos.output_of(["sleep", "30"], timeout=0.2) == ""
