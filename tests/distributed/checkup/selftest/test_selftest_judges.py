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
WRONG = {**FINDING, "state": "problem", "detail": "no Metal GPU", "remedy": "Update."}
IPV4, IPV6 = ("IPv4", "192.168.3.227"), ("IPv6", "fe80::1")

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


SLOW = [{**IMPORT, "whole_s": 52.0, "gap_s": 40.0}, IMPORT]
LOST = {"name": "mac-mini.local", "failed": "[Errno 8] nodename nor servname provided", "seconds": 5.0}
NOT_SYNCED = {"sync": {"how": "F_FULLFSYNC", "error": "ENOTSUP", "seconds": 0.0}, "backups": None}
KEPT = {**SERVICES["folder"], "backups": {"before": "Included", "status": 80, "after": "Included"}}
OTHER = {"is_full": True, "is_known": False, "said": "MPS: out of memory"}
DEAR, GROWN = {**STEPS, "median_ms": 1100.0, "memory": 72 * 10**9}, {**STEPS, "memory": 9 * 10**9}
ASLEEP = {**LID, "silences": [[8.0, 31.0]], "own": {"wall_gap_s": 22.0, "steady_gap_s": 0.5}}


@pytest.mark.parametrize(
    ("check", "answer", "verdict", "words"),
    [
        ("system", mac(), PASS, "macOS 15.3.1, Apple M2 Pro, 10 cores, 17.2 GB"),
        ("system", mac(programs={"sw_vers": said(SW_VERS.replace("15.3.1", "13.6.4"))}), FAIL, "needs macOS 14"),
        ("system", mac(programs={"sw_vers": said("", None)}), UNKNOWN, "`sw_vers` said nothing"),
        ("system", mac(), PASS, "signed ad-hoc"),
        ("system", mac(programs={"codesign": said(DEVELOPER)}), PASS, "signed by a developer"),
        ("system", mac(programs={"codesign": said(UNSIGNED, 1)}), FAIL, "not signed"),
        ("system", mac(programs={"codesign": said("", None)}), UNKNOWN, "`codesign` said nothing"),
        ("system", mac(is_real_python=False), FAIL, "another program than the one that runs"),
        ("system", mac(machine="x86_64"), FAIL, "an Intel Python"),
        ("system", mac(programs={"translated": said("1\n")}), FAIL, "an Intel Python"),
        ("system", mac(python="3.15.0"), FAIL, "3.11 to 3.14"),
        ("system", mac(packages={"torch": None}), FAIL, "torch is not installed"),
        # A run bears 90 s of it, see Timeouts.silence_importing_s.
        ("import of torch", SLOW, PASS, "longest gap between beats 40.0 s"),
        ("import of torch", [{**IMPORT, "gap_s": 95.0}, IMPORT], FAIL, "after 90 s a host that imports"),
        ("import of torch", [{**IMPORT, "parent_gap_s": 95.0}, IMPORT], FAIL, "after 90 s a host that imports"),
        ("interfaces", interfaces(IPV4, IPV6), PASS, "en0 (Wi-Fi): private IPv4, link-local IPv6"),
        ("interfaces", interfaces(IPV6, IPV4), PASS, "In en0 IPv4 is not first, so gloo is bound by address"),
        ("interfaces", interfaces(IPV6), FAIL, "no interface with an IPv4 address"),
        ("names", [LOST], FAIL, "nodename"),
        ("names", [{**NAME, "addresses": [["IPv6", "fe80::5"]]}], FAIL, "has no IPv4 address"),
        ("names", [{**NAME, "seconds": 5.1}], FAIL, "took 5.1 s"),
        ("own address", {"address": "127.0.0.1", "interface": "lo0"}, UNKNOWN, "in no network"),
        ("connect", [link(YES, BY_NC)], PASS, "so does nc"),
        ("connect", [link(YES, None)], PASS, "no nc here"),
        ("connect", [link(NO_ROUTE, BY_NC)], FAIL, "Local Network privacy"),
        ("connect", [link(NO_ROUTE, NOT_BY_NC)], FAIL, "nc too"),
        ("connect", [link(REFUSED, BY_NC)], FAIL, "something blocks this Python"),
        ("connect", [link(REFUSED, NOT_BY_NC)], FAIL, "a firewall, or no way"),
        ("connect", [link(YES, BY_NC, NO_ROUTE)], FAIL, "not once its parent is gone: No route to host (65)"),
        ("connect", [link(YES, BY_NC, alone=False)], UNKNOWN, "kept its parent"),
        ("process group", {**SITS, "group": 70, "pid": 70}, FAIL, "not in the group"),
        ("process group", {**SITS, "left": 1}, FAIL, "1 of 2 processes outlived"),
        ("kill of a zombie", {"unreaped": "EINVAL", "reaped": "ESRCH"}, FAIL, "EINVAL"),
        ("services", {**SERVICES, "open_files": {"before": 9, "after": 256, "opened": 250}}, FAIL, "250 files at once"),
        ("services", {**SERVICES, "open_files": {"failed": "ValueError: no"}}, FAIL, "ValueError"),
        ("services", {**SERVICES, "foreign_address": {"error": ""}}, FAIL, "would not notice"),
        ("services", {**SERVICES, "folder": NOT_SYNCED}, FAIL, "ENOTSUP"),
        ("services", {**SERVICES, "folder": KEPT}, FAIL, "`tmutil` says Included, then Included (status 80)"),
        ("services", {**SERVICES, "folder": {"failed": "OSError: read-only"}}, FAIL, "read-only"),
        ("services", {**SERVICES, "awake": {**SERVICES["awake"], "shown": False}}, FAIL, "does not show"),
        ("services", {**SERVICES, "awake": {**SERVICES["awake"], "ended": False, "left": True}}, FAIL, "outlives"),
        ("services", {**SERVICES, "awake": None}, UNKNOWN, "on a Mac only"),
        ("memory", {**MEMORY, "taken": 500_000_000}, FAIL, "estimate of memory"),
        ("memory", {**MEMORY, "beyond": OTHER}, UNKNOWN, "MPS: out of memory"),
        ("memory", {**MEMORY, "beyond": {**OTHER, "is_full": False}}, FAIL, "would not know"),
        ("memory", {**MEMORY, "device": "cpu", "beyond": None}, PASS, "cpu: "),
        ("changing shapes", {**SHAPES, "varying": DEAR}, PASS, "runs use few shapes"),
        ("changing shapes", {**SHAPES, "fixed": GROWN}, FAIL, "memory grows at one shape"),
        ("changing shapes", {**SHAPES, "varying": {**STEPS, "is_finite": False}}, FAIL, "not finite"),
        ("lid", ASLEEP, PASS, "silent from 8 to 31 s; its clocks jumped by 22 s (wall) and 0 s (monotonic)"),
        ("lid", {**ASLEEP, "connections": 2}, PASS, "connections made: 2"),
        ("lid", {**LID, "own": None, "silent_at_end_s": 70.0}, FAIL, "it has not come back"),
    ],
)
def test_what_one_machine_says(check, answer, verdict, words):
    one(verdict, words, of(check, answer))


def faulty_gloo(**changes) -> list[dict]:
    return [{"pair": ["A", "B"], **({} if "failed" in changes else {"answer": {**GLOO, **changes}}), **changes}]


@pytest.mark.parametrize(
    ("check", "answers", "verdict", "words"),
    [
        ("hosts check", {**PREFLIGHT, "problems": [["error", "ssh", "B: port 22: no answer"]]}, FAIL, "no answer"),
        ("gloo", faulty_gloo(failed="A: no word within 60 s"), FAIL, "ranks would not find each other"),
        ("gloo", faulty_gloo(is_right=False), FAIL, "the sum is wrong"),
        ("gloo", faulty_gloo(mbit={**RATES, "back": 3.0}), FAIL, "use a cable"),
        ("killed peer", KILLED, PASS, "by gloo itself"),
        ("killed peer", {**KILLED, "seconds": 8.2}, PASS, "only at gloo's time-out"),
        ("silent peer", {**SILENT, "has_ended": False, "seconds": 10.0}, FAIL, "does not keep to a single"),
        ("doctor", {"findings": [WRONG]}, FAIL, "no Metal GPU. Update."),
        ("doctor", {"findings": [{**FINDING, "state": "warning"}]}, PASS, "warning: mps"),
        ("doctor", {"findings": [{**FINDING, "state": "skipped"}]}, UNKNOWN, "mps"),
        ("demo", {**DEMO, "status": 6, "message": "no"}, FAIL, "status 6: no"),
        ("demo", {**DEMO, "lost": [["B", "silent"]]}, FAIL, "a host was lost: B: silent"),
        ("demo", {**DEMO, "rounds": 1}, FAIL, "two were asked for"),
    ],
)
def test_what_several_say(check, answers, verdict, words):
    one(verdict, words, judged(check, answers))


def test_one_machine_alone_has_no_hosts_check():
    assert judged("hosts check", None) == []


def test_hosts_that_are_unlike():
    linux = mac(system="Linux", machine="x86_64", programs={})
    one(FAIL, "cannot train together", of("system", mac(), linux))
    other = {**STEP, "step": "bb", "sum": 12.5 + 1e-7}
    one(PASS, "bits of the AdamW step differ among A, B", of("arithmetic", [STEP], [other]))
    one(FAIL, "B: another result", of("arithmetic", [STEP], [{**STEP, "norm": 1025.0}]))
    one(FAIL, "A: another result", of("arithmetic", [STEP, {**STEP, "device": "mps", "sum": 14.0}]), "mps")
