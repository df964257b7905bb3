"""Nothing of the owner gets into a report: addresses, names, homes, keys, paths."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mac_recordings import ADHOC, IFCONFIG, PORTS

from distributed.checkup.selftest.sanitize import PUBLIC, Sanitizer

WORD = st.from_regex(r"[a-z][a-z0-9-]{2,12}[a-z]", fullmatch=True).filter(lambda word: word not in PUBLIC)
IPV4 = st.ip_addresses(v=4).map(str)
IPV6 = st.ip_addresses(v=6).map(str).filter(lambda text: len(text) > 6)
MAC = st.binary(min_size=6, max_size=6).map(lambda raw: ":".join(f"{byte:02x}" for byte in raw))
KEY = st.from_regex(r"ssh-ed25519 AAAA[A-Za-z0-9+/]{64}", fullmatch=True)
PRINT = st.from_regex(r"SHA256:[A-Za-z0-9+/]{43}", fullmatch=True)
FILLER = st.sampled_from(["", "no route to ", "(", "Errno 65: ", '"', "inet ", "->", "= ", "at ", "\t"])
AFTER = st.sampled_from(["", ":22", ": refused", ".", ", and", ")", '"', " netmask 0xffffff00", "\n"])


def cleaner(user: str = "", host: str = "") -> Sanitizer:
    sanitizer = Sanitizer()
    sanitizer.learn([host] if host else [], "B")
    sanitizer.learn([user] if user else [], "USER")
    sanitizer.learn_folders([f"/Users/{user}"] if user else [], "home or project")
    return sanitizer


def nested(text: str) -> dict:
    return {"checks": [{"answers": [[text, 3, None], {"output": text}]}], text or "-": True}


@settings(max_examples=300, deadline=None)
@given(st.one_of(IPV4, IPV6, MAC, KEY, PRINT), FILLER, AFTER)
def test_no_address_and_no_key_survives(secret, before, after):
    said = json.dumps(cleaner().clean(nested(f"{before}{secret}{after}")))
    assert secret not in said
    # Nor most of it: what is long enough to be found again.
    if len(secret) > 8:
        assert secret[:-2] not in said and secret[2:] not in said


@settings(max_examples=200, deadline=None)
@given(WORD, WORD, FILLER, AFTER)
def test_no_name_and_no_home_survives(user, host, before, after):
    texts = [
        f"{before}{user}@{host}.local{after}",
        f"{before}{host}{after}",
        f"{before}{host.upper()}.fritz.box{after}",
        f"{before}/Users/{user}/My Project/data, new/clip.wav{after}",
        f"{before}/home/{user}/x{after}",
        f"{before}~{user}/x{after}",
        f"'{before}/Volumes/{user} disk/clip 1.wav'{after}",
    ]
    said = json.dumps(cleaner(user, host).clean([[text, {"output": text}] for text in texts])).lower()
    for name in (user, host):
        assert not re.search(rf"(?<![a-z]){re.escape(name)}(?![a-z])", said), name


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.from_regex(r"[A-Za-z0-9_. -]{1,10}[a-z]", fullmatch=True), min_size=1, max_size=4))
def test_of_a_path_only_its_kind_stays(parts):
    path = "/" + "/".join(part.strip() for part in parts) + "/secretive"
    assert "secretive" not in cleaner().text(f"cannot open {path}: No such file")
    assert "secretive" not in cleaner().text(f"Executable={path}\nIdentifier=x")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (
            "en0 192.168.1.5, fe80::1c05:bcd3:6225:319%en0 prefixlen 64",
            "en0 private IPv4, link-local IPv6 prefixlen 64",
        ),
        ("169.254.3.4 100.64.0.7 8.8.8.8 127.0.0.1", "link-local IPv4 shared IPv4 public IPv4 loopback IPv4"),
        ("ether 8c:85:90:90:6d:26", "ether <hardware address>"),
        ("ether 8:0:20:1:2:3", "ether <hardware address>"),
        ("enx00e04c680001", "enx"),
        ("/opt/homebrew/bin/python3.12", "<path: Homebrew>"),
        ("/opt/homebrew/opt/python@3.12/bin/python3.12", "<path: Homebrew, opt>"),
        ("/Users/anna/.local/share/uv/python/x/bin/python", "<path: another installer of Python>"),
        ("Serial Number (system): C02XYZ\nfine", "<removed>\nfine"),
        ("   VLAN User Defined Name: Anna's net", "<removed>"),
        ("netif: 1EDC7252-A352-41A3-B080-2FA51574E05C", "netif: <UUID>"),
        ("Authority=Apple Development: anna@example.org (TEAM)", "Authority=Apple Development"),
        ("Authority=Developer ID: Anna (X)\nTeamIdentifier=X", "Authority=Developer ID\nTeamIdentifier"),
        ("Hardware Port: Anna's iPhone\nDevice: en5", "Hardware Port\nDevice: en5"),
        ("sleeps after 1 min (kept awake right now by SomeVPN)", "sleeps after 1 min (kept awake right now)"),
        ("write to anna.b@example.org now", "write to <e-mail> now"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn\nAAAB==\n", "<key>"),
        ("B: port 22: Connection refused", "B: port 22: Connection refused"),
        (
            "at 12:30:45, 3.12.9, 2.13.0+cpu, Mbit/s",
            "at 12:30:45, 3.12.9, 2.13.0+cpu, Mbit/s",
        ),
        ("9f86d081884c7d65", "9f86d081884c7d65"),
    ],
)
def test_what_becomes_of_it(text, clean):
    assert Sanitizer().text(text) == clean


def test_cleaning_twice_is_as_good_as_once():
    once = cleaner("anna", "mini").clean([ADHOC, PORTS, IFCONFIG, "/usr/local/bin/x, ~anna/y, mini.local, 10.0.0.1:22"])
    assert cleaner("anna", "mini").clean(once) == once


def test_hosts_are_letters_and_their_addresses_keep_their_kind():
    sanitizer = Sanitizer()
    sanitizer.learn(["192.168.3.228", "mac-mini.local", "fe80::5"], "B")
    said = sanitizer.text("192.168.3.228: no; mac-mini, MAC-MINI.local and mac-mini.fritz.box; mac-minister")
    assert said == "B (private IPv4): no; B, B and B; mac-minister"


def test_a_name_that_tells_nothing_stays():
    sanitizer = Sanitizer()
    sanitizer.learn(["root", "apple", "x"], "USER")
    assert sanitizer.text("Apple M1, root, x") == "Apple M1, root, x"


def test_outputs_of_mac_programs_keep_what_is_judged():
    said = Sanitizer().text(ADHOC + PORTS + IFCONFIG)
    for kept in ("Identifier=org.python.python", "Signature=adhoc", "Hardware Port: Wi-Fi\nDevice: en0"):
        assert kept in said
    for gone in ("homebrew/", "8c:85", "1c05", "192.168", "82:f1"):
        assert gone not in said
