"""What belongs to ssh: known_hosts, the output of `ssh -G`, ProxyJump, keys, and how a session begins."""

from __future__ import annotations

import base64
import codecs
import contextlib
import re
from pathlib import Path
from types import SimpleNamespace

import paramiko
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from damage import damaged
from fuzzing import fuzz, outcome
from hypothesis import example

from distributed.ssh.authentication import Verdict, known_keys, usable_keys, verdict_on
from distributed.ssh.host import Host, resolve
from distributed.ssh.process import RemoteProcess

KEY = b"AAAAC3NzaC1lZDI1NTE5AAAAIJjGTaYOg3pbwRtmRnkFLHQvjIjlRjSIFdCNQS4kSuVP"
KNOWN = b"""\
# our machines
mini.local,192.168.1.* ssh-ed25519 %b ben@mini
[mini.local]:2222,!10.0.0.9,10.0.0.? ssh-ed25519 %b
|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg= ssh-ed25519 %b
@revoked * ssh-ed25519 %b
@cert-authority *.example.org ssh-ed25519 %b
""" % (KEY, KEY, KEY, KEY, KEY)
SETTINGS = b"""\
host mini
user anna
hostname mini.local
port 22
identitiesonly no
identityfile ~/.ssh/id_ed25519
identityagent SSH_AUTH_SOCK
userknownhostsfile ~/.ssh/known_hosts ~/.ssh/known_hosts2
globalknownhostsfile /etc/ssh/ssh_known_hosts
proxyjump ben@jump.example.org:2200
proxycommand none
"""
PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).private_bytes(
    Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()
)


NAMES = (("mini.local",), ("[mini.local]:2222",))  # of lines 1 and 2, but for what is excluded by `!`


@fuzz("known_hosts", damaged(KNOWN), cost=8)
@example(data=KNOWN)
@example(data=b"\n".join(KNOWN.splitlines()[:4]))
@example(data=b"mini.local\0ssh-ed25519 \1")
def test_known_hosts(folder: Path, data: bytes):
    (folder / "known_hosts").write_bytes(data)
    """Lines that are whole count, whatever stands beside them, and no damage lets another key in."""
    whole = set(data.splitlines()) & set(KNOWN.splitlines())
    key = base64.b64decode(KEY)
    for name in ("mini.local", "[mini.local]:2222", "10.0.0.9"):
        known = outcome(known_keys, name, [folder / "known_hosts"])
        assert verdict_on(b"another key", known) is not Verdict.KNOWN
        lines = [number for number, names in enumerate(NAMES, 1) if name in names]
        named = any(KNOWN.splitlines()[number] in whole for number in lines)
        if KNOWN.splitlines()[4] in whole:
            assert verdict_on(key, known) is Verdict.REVOKED
        elif named:
            assert verdict_on(key, known) in (Verdict.KNOWN, Verdict.REVOKED)
            assert verdict_on(b"another key", known) is Verdict.CHANGED


@pytest.fixture(scope="module")
def said(folder: Path):
    """What the `ssh` on PATH says."""
    with pytest.MonkeyPatch.context() as patch:
        (folder / "ssh").write_text(f"#!/bin/sh\nexec cat {folder}/said\n")
        (folder / "ssh").chmod(0o755)
        patch.setenv("PATH", str(folder), prepend=":")
        yield folder / "said"


@fuzz("ssh -G", damaged(SETTINGS), cost=4)
@example(data=SETTINGS)
@example(data=b"")
@example(data=SETTINGS.replace(b"anna", b"\xe2"))
@example(data=SETTINGS.replace(b"port 22", b"port twenty"))
@example(data=SETTINGS.replace(b"2200", b"x"))
@example(data=SETTINGS.replace(b"~/", b"~nobody/"))
def test_the_settings_of_ssh(said: Path, data: bytes):
    said.write_bytes(data)
    """Each setting is a word that ssh said."""
    settings = outcome(resolve, Host(address="mini"), names="mini: ")
    if settings is None:
        assert data != SETTINGS
        return
    text = data.decode("utf-8", "surrogateescape")
    words = text.split()
    assert f"hostname {settings.hostname}" in text and f"user {settings.user}" in text
    assert settings.port in [int(word) for word in words if word.isdecimal() and len(word) < 400]
    for jump in settings.jumps:
        assert jump.address in text and (jump.user or "") in text
    if data == SETTINGS:
        jump = Host(address="jump.example.org", user="ben", port=2200)
        assert (settings.user, settings.port, settings.jumps) == ("anna", 22, (jump,))


class FakeChannel:
    """What a host sends down one session, in pieces; then its end."""

    def __init__(self, said: bytes):
        self._said, self.eof_received = said, True

    def recv(self, size: int) -> bytes:
        piece, self._said = self._said[:7], self._said[7:]
        return piece


@fuzz("first line of a session", damaged(b"process group 4711\nhello\n"))
@example(data=b"1\nhello\n")
@example(data="²\nhello\n".encode())
@example(data=b"process group " + b"9" * 5000 + b"\nhello\n")
def test_a_session_tells_its_process_group(data: bytes):
    """It is killed by that number: a shell's own words must never be taken for it, least of all `1`, which is all."""
    process = outcome(RemoteProcess, SimpleNamespace(name="mini"), FakeChannel(data), names="mini: ")
    said = codecs.getincrementaldecoder("utf-8")("replace").decode(data)  # half a character at the end never arrives
    first, _, rest = said.replace("\r\n", "\n").partition("\n")
    announced = re.fullmatch(r"process group ([1-9][0-9]{0,9})\r?", first)
    if announced and int(announced[1]) > 1:
        assert process.pid == int(announced[1])
        assert "\n".join(process.lines()) == rest.removesuffix("\n") or "\r" in said
    else:
        assert process is None


@fuzz("private key", damaged(PRIVATE), cost=2)
@example(data=PRIVATE)
@example(data=PRIVATE.replace(PRIVATE.split(b"\n")[4][40:50], b"otherhalfs"))
def test_a_private_key(folder: Path, data: bytes):
    """One that loads is the key that it was: a damaged one would be refused by every host, without a reason."""
    file, whole = folder / "id_ed25519", folder / "whole"
    file.write_bytes(data)
    whole.write_bytes(PRIVATE)
    settings = SimpleNamespace(identities=(file,), identities_only=True, agent=None)
    tried: list[str] = []
    with contextlib.ExitStack() as stack:
        found = outcome(lambda: list(usable_keys(settings, tried, stack)))
    assert len(found) + len(tried) == 1
    assert data != PRIVATE or found
    for name, key in found:  # it is the same key still, whatever became of its comment
        assert name == str(file) and key.asbytes() == paramiko.PKey.from_path(whole).asbytes()
