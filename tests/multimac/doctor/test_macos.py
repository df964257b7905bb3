"""Outputs as macOS's manual pages and published transcripts show them; none was recorded on a Mac of ours."""

import pytest

from multimac.doctor import macos

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
SERVICES = """\tdisabled services = {{
\t\t"com.apple.ftpd" => disabled
\t\t"com.openssh.sshd" => {state}
\t\t"com.apple.screensharing" => disabled
\t}}
"""
BATTERY = (
    "Now drawing from 'Battery Power'\n"
    " -InternalBattery-0 (id=22806627)\t78%; discharging; 5:05 remaining present: true\n"
)


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
    ("setting", "expected"),
    [
        (
            "1 (sleep prevented by powerd, coreaudiod, coreaudiod)",
            macos.Sleep(minutes=1, held_by=("powerd", "coreaudiod")),
        ),
        ("30", macos.Sleep(minutes=30)),
        ("0", macos.Sleep(minutes=0)),
    ],
)
def test_sleep_settings(setting, expected):
    assert macos.parse_sleep(PMSET.format(sleep=setting)) == expected


def test_sleep_that_is_switched_off_for_the_whole_system_is_never():
    assert macos.parse_sleep(PMSET.format(sleep=10).replace("\t\t0", "\t\t1")) == macos.Sleep(minutes=0)


@pytest.mark.parametrize("text", ["", "pmset: unknown option", "Currently in use:\n displaysleep 10\n"])
def test_sleep_that_is_not_told_is_unknown(text):
    assert macos.parse_sleep(text) is None


def test_power_source():
    assert macos.parse_power(BATTERY) == macos.Power(on_battery=True, percent=78)
    assert macos.parse_power("Now drawing from 'AC Power'\n") == macos.Power(on_battery=False)
    assert macos.parse_power("") is None


@pytest.mark.parametrize(
    ("state", "expected"), [("enabled", True), ("disabled", False), ("false", True), ("true", False), ("odd", None)]
)
def test_remote_login(state, expected):
    """Newer systems say enabled and disabled; up to macOS 12 it is the value of `disabled`."""
    assert macos.parse_remote_login(SERVICES.format(state=state)) is expected


def test_remote_login_that_nobody_ever_switched_is_unknown():
    assert macos.parse_remote_login('\tdisabled services = {\n\t\t"com.apple.ftpd" => disabled\n\t}\n') is None


@pytest.mark.parametrize(
    ("state", "block_all", "expected"),
    [
        ("Firewall is disabled. (State = 0)\n", "Firewall has block all state set to disabled.\n", "off"),
        ("Firewall is enabled. (State = 1)\n", "Firewall has block all state set to disabled.\n", "on"),
        ("Firewall is enabled. (State = 1)\n", "Block all DISABLED!\n", "on"),
        ("Firewall is enabled. (State = 1)\n", "Firewall has block all state set to enabled.\n", "blocks all"),
        ("Firewall is enabled. (State = 2)\n", "", "blocks all"),
        ("", "", None),
    ],
)
def test_the_application_firewall(state, block_all, expected):
    assert macos.parse_firewall(state, block_all) == expected


def test_flags_of_sysctl():
    assert [macos.parse_flag(text) for text in ("1\n", "0\n", "")] == [True, False, None]


@pytest.mark.parametrize("command", [["/no/such/program"], ["sh", "-c", "echo half; exit 1"]])
def test_a_program_that_is_missing_or_fails_says_nothing(command):
    assert macos.output_of(command) == ""


def test_a_program_that_hangs_says_nothing_and_does_not_hold_us():
    assert macos.output_of(["sleep", "30"], timeout=0.2) == ""
