import base64
import subprocess
from pathlib import Path

import pytest

from distributed.ssh.authentication import Verdict, known_keys, verdict_on
from distributed.ssh.host import SshSettings
from whisper_tuner.errors import MissingProgram

KEY, OTHER = (b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + letter * 32 for letter in (b"A", b"B"))


def line(names: str, blob: bytes = KEY, marker: str = "") -> str:
    return f"{marker} {names} ssh-ed25519 {base64.b64encode(blob).decode()} comment".strip()


def verdict(tmp_path: Path, name: str, *lines: str) -> Verdict:
    file = tmp_path / "known_hosts"
    file.write_text("\n".join(lines) + "\n")
    return verdict_on(KEY, known_keys(name, [file]))


@pytest.mark.parametrize(
    ("name", "lines", "expected"),
    [
        ("mac", [line("mac")], Verdict.KNOWN),
        ("mac", [line("other,mac,10.0.0.1")], Verdict.KNOWN),
        ("MAC", [line("mac")], Verdict.KNOWN),
        ("mac", [], Verdict.UNKNOWN),
        ("mac", ["# comment", "garbage", line("mac2")], Verdict.UNKNOWN),
        ("mac", [line("mac", OTHER)], Verdict.CHANGED),
        ("mac", [line("mac", OTHER), line("mac")], Verdict.KNOWN),
        ("mac", [line("mac"), line("mac", marker="@revoked")], Verdict.REVOKED),
        ("mac", [line("*", marker="@revoked")], Verdict.REVOKED),
        ("mac", [line("mac", OTHER, marker="@revoked")], Verdict.UNKNOWN),
        ("mac", [line("*", marker="@cert-authority")], Verdict.UNKNOWN),
        ("a.local", [line("*.local")], Verdict.KNOWN),
        ("a.local", [line("*.local,!a.local")], Verdict.UNKNOWN),
        ("[mac]:2222", [line("[mac]:2222")], Verdict.KNOWN),
        ("m", [line("[mac]:2222")], Verdict.UNKNOWN),
        ("mac", [line("[mac]:2222")], Verdict.UNKNOWN),
    ],
)
def test_verdicts(tmp_path, name, lines, expected):
    assert verdict(tmp_path, name, *lines) is expected


@pytest.mark.parametrize("name", ["mac.local", "[mac.local]:2222"])
def test_names_hashed_by_ssh_keygen(tmp_path, name):
    file = tmp_path / "known_hosts"
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    kind, blob, *_ = key.with_suffix(".pub").read_text().split()
    file.write_text(f"{name} {kind} {blob}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
    assert name not in file.read_text()
    [entry] = known_keys(name, [file])
    assert (entry.kind, entry.blob, entry.place) == (kind, base64.b64decode(blob), f"{file}:1")
    assert known_keys("other", [file]) == []


def test_authorities_are_reported_and_missing_files_are_empty(tmp_path):
    file = tmp_path / "known_hosts"
    file.write_text(line("x") + "\n" + line("*.local", marker="@cert-authority") + "\n")
    [authority] = known_keys("mac.local", [file, tmp_path / "none", tmp_path])
    assert (authority.mark, authority.place) == ("CA", f"{file}:2")
    assert verdict_on(KEY, [authority]) is Verdict.UNKNOWN


def test_without_ssh_keygen_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingProgram, match="ssh-keygen is not installed"):
        known_keys("mac", [tmp_path / "known_hosts"])


@pytest.mark.parametrize(
    ("port", "alias", "name"), [(22, None, "mac"), (2222, None, "[mac]:2222"), (2222, "alias", "alias")]
)
def test_the_name_in_known_hosts(port, alias, name):
    settings = SshSettings(
        host="mac",
        hostname="mac",
        user="anna",
        port=port,
        identities=(),
        identities_only=False,
        agent=None,
        key_alias=alias,
        known_hosts=(),
        jumps=(),
        proxy_command=None,
    )
    assert settings.known_as == name
