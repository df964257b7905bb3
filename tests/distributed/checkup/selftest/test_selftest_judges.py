"""What each check says of recorded answers: healthy ones, and those of each fault that it is there for."""

from __future__ import annotations

import copy
import json
import re

import pytest
from mac_recordings import (
    BY_NC,
    DEVELOPER,
    NO_ROUTE,
    NOT_BY_NC,
    REFUSED,
    SW_VERS,
    UNSIGNED,
    YES,
    interfaces,
    link,
    mac,
    said,
)

from distributed.checkup.selftest.run import BY_NAME, CHECKS, as_row, rows_of
from distributed.checkup.selftest.sanitize import Sanitizer

PASS, FAIL, UNKNOWN = "pass", "fail", "not known"


def judged(check: str, answers) -> list[dict]:
    """By way of the sanitizer, as all that is judged."""
    return [as_row(row) for row in rows_of({"check": check, "answers": Sanitizer().clean(answers)})]


def of(check: str, *answers) -> list[dict]:
    return judged(check, [{"host": "ABC"[n], "answer": answer} for n, answer in enumerate(answers)])


def one(verdict: str, words: str, rows: list[dict], name: str = "") -> None:
    found = [row for row in rows if name in row["name"] and row["verdict"] == verdict and words in row["meaning"]]
    assert found, rows


IMPORT = {"import_s": 4.0, "whole_s": 6.0, "gap_s": 0.3, "parent_gap_s": 0.1}
SITS = {"announced": 71, "pid": 71, "group": 71, "shells": {"login": "zsh", "session": "zsh"}, "left": 0}
STEP = {"device": "cpu", "step": "aa", "sum": 12.5, "norm": 1024.1, "norm_bits": "0x1p0"}
STEPS = {"ms": [90.0], "median_ms": 90.0, "is_finite": True, "memory_before": 10**9, "memory": 10**9}
SHAPES = {"device": "mps", "fixed": STEPS, "varying": STEPS}
RATES = {"there": 900.0, "back": 910.0, "both": 870.0}
GLOO = {"formed_s": 0.3, "bytes": 64 << 20, "is_right": True, "mbit": RATES}
KILLED = {"seconds": 0.1, "timeout_s": 8.0, "noticed": "Connection closed"}
HOST = {"host": "A", "steps": 10, "seconds": 5.0, "communicating": 1.0, "losses": [3.0]}
SILENT = {"has_ended": True, "seconds": 5.1, "operation_s": 5.0}
SERVICES = {
    "open_files": {"before": 256, "after": 4096, "opened": 3996},
    "foreign_address": {"error": "EADDRNOTAVAIL"},
    "folder": {
        "sync": {"how": "F_FULLFSYNC", "error": "", "seconds": 0.02},
        "backups": {"before": "Included", "status": 0, "after": "Excluded"},
    },
    "awake": {"shown": True, "status": 0, "ended": True, "left": False},
}
# MPSAllocator.mm
FULL = (
    "MPS backend out of memory (MPS allocated: 100.00 MiB, other allocations: 448.00 KiB, max allowed: 120.00 MiB). "
    "Tried to allocate 240.00 MiB on private pool."
)
BEYOND = {"is_full": True, "is_known": True, "said": FULL}
MEMORY = {"device": "mps", "taken": 150_000_000, "estimated": 140_000_000, "beyond": BEYOND}
DEMO = {"status": 0, "message": "", "rounds": 2, "lost": [], "hosts": [HOST], "said": [], "seconds": 20.0}
CLOCKS = {"wall_gap_s": 0.6, "steady_gap_s": 0.6}
LID = {"silences": [], "connections": 1, "own": CLOCKS, "silent_at_end_s": 0.1}
NAME = {"name": "mac-mini.local", "addresses": [["IPv6", "fe80::5"], ["IPv4", "192.168.3.228"]], "seconds": 0.02}
PREFLIGHT = {"seconds": 9.0, "pairs": [["A", "B", 0.001, 870.0, None, None]], "problems": []}
FINDING = {"name": "device", "state": "ok", "detail": "mps", "remedy": "", "figures": {}}

ORDINARY = {"link", "private", "home", "key", "studio", "gloo", "host", "warning", "removed", "address", "port"}
HEALTHY = {
    "ssh": [{"host": "A", "answer": "this machine"}, {"host": "B", "answer": "connected"}],
    "code": [{"host": "A", "answer": {"files": 3, "bytes": 9, "seconds": 0.1}}],
    "import of torch": [{"host": "A", "answer": [{**IMPORT, "whole_s": 41.0}, IMPORT]}],
    "system": [{"host": "A", "answer": mac()}, {"host": "B", "answer": mac(programs={"codesign": said(DEVELOPER)})}],
    "interfaces": [{"host": "A", "answer": interfaces(("IPv6", "fe80::1c05"), ("IPv4", "192.168.3.227"))}],
    "names": [{"host": "A", "answer": [NAME]}],
    "own address": [{"host": "A", "answer": {"address": "192.168.3.227", "interface": "en0"}}],
    "hosts check": PREFLIGHT,
    "connect": [{"host": "A", "answer": [link(YES, BY_NC)]}],
    "gloo": [{"pair": ["A", "B"], "answer": GLOO}],
    "killed peer": KILLED,
    "silent peer": SILENT,
    "process group": [{"host": "A", "answer": SITS}],
    "kill of a zombie": [{"host": "A", "answer": {"unreaped": "EPERM", "reaped": "ESRCH"}}],
    "services": [{"host": "A", "answer": SERVICES}],
    "arithmetic": [{"host": "A", "answer": [STEP, {**STEP, "device": "mps"}]}, {"host": "B", "answer": [STEP]}],
    "changing shapes": [{"host": "A", "answer": SHAPES}],
    "memory": [{"host": "A", "answer": MEMORY}],
    "doctor": {"findings": [FINDING]},
    "demo": DEMO,
    "lid": [{"host": "A", "answer": LID}],
}


def test_every_check_has_a_healthy_recording():
    assert set(HEALTHY) == set(BY_NAME) and {check.name for check in CHECKS} < set(BY_NAME)


@pytest.mark.parametrize("check", HEALTHY)
def test_a_healthy_mac_passes(check):
    rows = judged(check, copy.deepcopy(HEALTHY[check]))
    assert rows and {row["verdict"] for row in rows} == {PASS}, rows


@pytest.mark.parametrize("check", HEALTHY)
def test_a_user_or_host_with_a_name_from_the_answers_changes_no_verdict(check):
    """Nor does cleaning twice, as is done with what a report holds."""
    for name in sorted(set(re.findall(r"[a-z]\w+", json.dumps(HEALTHY[check]).lower())) | ORDINARY):
        sanitizer = Sanitizer()
        sanitizer.learn([name], "USER")
        once = sanitizer.clean(HEALTHY[check])
        found = [as_row(row) for row in rows_of({"check": check, "answers": once})]
        assert {row["verdict"] for row in found} == {PASS}, name
        again = [as_row(row) for row in rows_of({"check": check, "answers": sanitizer.clean(once)})]
        assert [row["meaning"] for row in again] == [row["meaning"] for row in found], name


@pytest.mark.parametrize("check", sorted(BY_NAME))
def test_a_host_without_an_answer_fails_and_nonsense_is_not_known(check):
    answers = HEALTHY[check]
    if isinstance(answers, list):
        lost = [{key: value for key, value in answers[0].items() if key != "answer"} | {"failed": "it is gone"}]
        one(FAIL, "it is gone", judged(check, lost))
    for nonsense in ({}, [{"host": "A"}], "text", [[]], 3):
        assert all(row["verdict"] is not PASS for row in judged(check, nonsense))


def test_a_check_that_hangs_or_crashes_is_a_row():
    assert rows_of({"check": "gloo", "ended": "no end within 120 s"})[0].what == "no end within 120 s"


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (mac(), PASS, "macOS 15.3.1, Apple M2 Pro, 10 cores, 17.2 GB"),
        (mac(programs={"sw_vers": said(SW_VERS.replace("15.3.1", "13.6.4"))}), FAIL, "needs macOS 14"),
        (mac(programs={"sw_vers": said("", None)}), UNKNOWN, "`sw_vers` said nothing"),
        (mac(), PASS, "signed ad-hoc"),
        (mac(programs={"codesign": said(DEVELOPER)}), PASS, "signed by a developer"),
        (mac(programs={"codesign": said(UNSIGNED, 1)}), FAIL, "not signed"),
        (mac(programs={"codesign": said("", None)}), UNKNOWN, "`codesign` said nothing"),
        (mac(is_real_python=False), FAIL, "another program than the one that runs"),
        (mac(machine="x86_64"), FAIL, "an Intel Python"),
        (mac(programs={"translated": said("1\n")}), FAIL, "an Intel Python"),
        (mac(python="3.15.0"), FAIL, "3.11 to 3.14"),
        (mac(packages={"torch": None}), FAIL, "torch is not installed"),
    ],
)
def test_system_and_python(answer, verdict, words):
    one(verdict, words, of("system", answer))


def test_mac_and_linux_do_not_mix():
    linux = mac(system="Linux", machine="x86_64", programs={})
    one(FAIL, "cannot train together", of("system", mac(), linux))


def test_the_import_of_torch():
    """A run bears 90 s of it, see Timeouts.silence_importing_s."""
    slow = [{**IMPORT, "whole_s": 52.0, "gap_s": 40.0}, IMPORT]
    one(PASS, "longest gap between beats 40.0 s", of("import of torch", slow))
    for gap in ("gap_s", "parent_gap_s"):
        one(FAIL, "after 90 s a host that imports", of("import of torch", [{**IMPORT, gap: 95.0}, IMPORT]))


def test_interfaces():
    first = interfaces(("IPv4", "192.168.3.227"), ("IPv6", "fe80::1"))
    one(PASS, "en0 (Wi-Fi): private IPv4, link-local IPv6", of("interfaces", first))
    behind = interfaces(("IPv6", "fe80::1"), ("IPv4", "192.168.3.227"))
    one(PASS, "In en0 IPv4 is not first, so gloo is bound by address", of("interfaces", behind))
    one(FAIL, "no interface with an IPv4 address", of("interfaces", interfaces(("IPv6", "fe80::1"))))


def test_names():
    lost = {"name": "mac-mini.local", "failed": "[Errno 8] nodename nor servname provided", "seconds": 5.0}
    one(FAIL, "nodename", of("names", [lost]))
    one(FAIL, "has no IPv4 address", of("names", [{**NAME, "addresses": [["IPv6", "fe80::5"]]}]))
    one(FAIL, "took 5.1 s", of("names", [{**NAME, "seconds": 5.1}]))


def test_no_network_but_loopback_is_not_known():
    one(UNKNOWN, "in no network", of("own address", {"address": "127.0.0.1", "interface": "lo0"}))


def test_hosts_check():
    problem = ["error", "ssh", "B: port 22: no answer"]
    one(FAIL, "no answer", judged("hosts check", {**PREFLIGHT, "problems": [problem]}))
    assert judged("hosts check", None) == []


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (link(YES, BY_NC), PASS, "so does nc"),
        (link(YES, None), PASS, "no nc here"),
        (link(NO_ROUTE, BY_NC), FAIL, "Local Network privacy"),
        (link(NO_ROUTE, NOT_BY_NC), FAIL, "nc too"),
        (link(REFUSED, BY_NC), FAIL, "something blocks this Python"),
        (link(REFUSED, NOT_BY_NC), FAIL, "a firewall, or no way"),
        (link(YES, BY_NC, NO_ROUTE), FAIL, "not once its parent is gone: No route to host (65)"),
        (link(YES, BY_NC, alone=False), UNKNOWN, "kept its parent"),
    ],
)
def test_connections(answer, verdict, words):
    one(verdict, words, of("connect", [answer]))


def test_gloo():
    entry = {"pair": ["A", "B"]}
    one(FAIL, "ranks would not find each other", judged("gloo", [{**entry, "failed": "A: no word within 60 s"}]))
    one(FAIL, "the sum is wrong", judged("gloo", [{**entry, "answer": {**GLOO, "is_right": False}}]))
    one(FAIL, "use a cable", judged("gloo", [{**entry, "answer": {**GLOO, "mbit": {**RATES, "back": 3.0}}}]))


def test_a_killed_peer_may_be_noticed_late():
    one(PASS, "by gloo itself", judged("killed peer", KILLED))
    one(PASS, "only at gloo's time-out", judged("killed peer", {**KILLED, "seconds": 8.2}))


def test_a_silent_peer():
    one(FAIL, "does not keep to a single", judged("silent peer", {**SILENT, "has_ended": False, "seconds": 10.0}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"open_files": {"before": 256, "after": 256, "opened": 250}}, "250 files at once"),
        ({"open_files": {"failed": "ValueError: no"}}, "ValueError"),
        ({"foreign_address": {"error": ""}}, "would not notice"),
        ({"folder": {"sync": {"how": "F_FULLFSYNC", "error": "ENOTSUP", "seconds": 0.0}, "backups": None}}, "ENOTSUP"),
        (
            {"folder": {**SERVICES["folder"], "backups": {"before": "Included", "status": 80, "after": "Included"}}},
            "`tmutil` says Included, then Included (status 80)",
        ),
        ({"folder": {"failed": "OSError: read-only"}}, "read-only"),
        ({"awake": {**SERVICES["awake"], "shown": False}}, "does not show"),
        ({"awake": {**SERVICES["awake"], "ended": False, "left": True}}, "outlives"),
    ],
)
def test_what_a_run_asks_of_the_system(changes, words):
    one(FAIL, words, of("services", {**SERVICES, **changes}))
    found = of("services", {**SERVICES, "awake": None})
    one(UNKNOWN, "on a Mac only", found, "keeping awake")


def test_memory():
    one(FAIL, "estimate of memory", of("memory", {**MEMORY, "taken": 500_000_000}))
    other = {"is_full": True, "is_known": False, "said": "MPS: out of memory"}
    one(UNKNOWN, "MPS: out of memory", of("memory", {**MEMORY, "beyond": other}))
    one(FAIL, "would not know", of("memory", {**MEMORY, "beyond": {**other, "is_full": False}}))
    one(PASS, "cpu: ", of("memory", {**MEMORY, "device": "cpu", "beyond": None}))


def test_process_groups():
    one(FAIL, "not in the group", of("process group", {**SITS, "group": 70, "pid": 70}), "process group")
    one(FAIL, "1 of 2 processes outlived", of("process group", {**SITS, "left": 1}), "group kill")
    one(FAIL, "EINVAL", of("kill of a zombie", {"unreaped": "EINVAL", "reaped": "ESRCH"}))


def test_arithmetic():
    other = {**STEP, "step": "bb", "sum": 12.5 + 1e-7}
    one(PASS, "bits of the AdamW step differ among A, B", of("arithmetic", [STEP], [other]))
    one(FAIL, "B: another result", of("arithmetic", [STEP], [{**STEP, "norm": 1025.0}]))
    one(FAIL, "A: another result", of("arithmetic", [STEP, {**STEP, "device": "mps", "sum": 14.0}]), "mps")


def test_shapes():
    dear = {**STEPS, "median_ms": 1100.0, "memory": 72 * 10**9}
    one(PASS, "runs use few shapes", of("changing shapes", {**SHAPES, "varying": dear}))
    grown = {**STEPS, "memory": 9 * 10**9}
    one(FAIL, "memory grows at one shape", of("changing shapes", {**SHAPES, "fixed": grown}))
    one(FAIL, "not finite", of("changing shapes", {**SHAPES, "varying": {**STEPS, "is_finite": False}}))


def test_rows_of_doctor():
    wrong = {**FINDING, "state": "problem", "detail": "no Metal GPU", "remedy": "Update."}
    one(FAIL, "no Metal GPU. Update.", judged("doctor", {"findings": [wrong]}), "doctor: device")
    one(PASS, "warning: mps", judged("doctor", {"findings": [{**FINDING, "state": "warning"}]}))
    one(UNKNOWN, "mps", judged("doctor", {"findings": [{**FINDING, "state": "skipped"}]}))


def test_the_demo():
    one(FAIL, "status 6: no", judged("demo", {**DEMO, "status": 6, "message": "no"}))
    one(FAIL, "a host was lost: B: silent", judged("demo", {**DEMO, "lost": [["B", "silent"]]}))
    one(FAIL, "two were asked for", judged("demo", {**DEMO, "rounds": 1}))


def test_the_lid():
    slept = {"wall_gap_s": 22.0, "steady_gap_s": 0.5}
    asleep = {**LID, "silences": [[8.0, 31.0]], "own": slept}
    one(PASS, "silent from 8 to 31 s; its clocks jumped by 22 s (wall) and 0 s (monotonic)", of("lid", asleep))
    one(PASS, "connections made: 2", of("lid", {**asleep, "connections": 2}))
    one(FAIL, "it has not come back", of("lid", {**LID, "own": None, "silent_at_end_s": 70.0}))
