"""Which hosts are believed, and which keys are offered to them, with a real sshd and a real ssh-agent."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from loopback_sshd import SshServer, keygen
from waiting import wait_until

from distributed.ssh import authentication
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host
from whisper_tuner.errors import HostError, HostKeyError


def test_unknown_key_is_refused_with_its_fingerprint_and_the_remedy(ssh_server):
    ssh_server.known_hosts.write_text("")
    with pytest.raises(HostKeyError) as caught:
        Remote.connect(ssh_server.host)
    shown = subprocess.run(["ssh-keygen", "-lf", ssh_server.folder / "host_key"], capture_output=True, text=True).stdout
    assert shown.split()[1] in str(caught.value)
    assert f"ssh -p {ssh_server.port} {ssh_server.host.user}@127.0.0.1" in str(caught.value)
    assert ssh_server.known_hosts.read_text() == ""


def test_changed_and_revoked_keys_are_refused(ssh_server):
    kind, own = ssh_server.host_key
    blob = keygen(ssh_server.folder / "other").with_suffix(".pub").read_text()
    ssh_server.known_hosts.write_text(f"[127.0.0.1]:{ssh_server.port} {blob}")
    with pytest.raises(HostKeyError, match="CHANGED") as caught:
        Remote.connect(ssh_server.host)
    assert "ssh-keygen -R" in str(caught.value)
    assert f"{ssh_server.known_hosts}:1" in str(caught.value)
    ssh_server.known_hosts.write_text(f"[127.0.0.1]:{ssh_server.port} {kind} {own}\n@revoked * {kind} {own}\n")
    with pytest.raises(HostKeyError, match="@revoked"):
        Remote.connect(ssh_server.host)


def test_certificate_authority_lines_are_named(ssh_server):
    kind, blob = ssh_server.host_key
    ssh_server.known_hosts.write_text(f"@cert-authority * {kind} {blob}\n")
    with pytest.raises(HostKeyError, match="@cert-authority lines are not supported"):
        Remote.connect(ssh_server.host)


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """A real ssh-agent; yields a function that gives it a key."""
    sock = f"/tmp/mmw-agent-{os.getpid()}"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL)
    wait_until(Path(sock).exists)

    def add(key: Path, passphrase: str = "") -> Path:
        ask = tmp_path / "askpass"
        ask.write_text(f"#!/bin/sh\necho '{passphrase}'\n")
        ask.chmod(0o700)
        env = {**os.environ, "SSH_AUTH_SOCK": sock, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(["ssh-add", "-q", key], env=env, check=True, stdin=subprocess.DEVNULL)
        return Path(sock)

    yield add
    process.kill()
    process.wait()
    Path(sock).unlink(missing_ok=True)


def protect(server: SshServer) -> Path:
    """Put a passphrase on the key that the server accepts."""
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret-words", "-f", server.key], check=True)
    return server.key


def says_here(host: Host) -> bool:
    with Remote.connect(host) as remote:
        return remote.run(["echo", "here"]).stdout == "here\n"


def test_key_with_a_passphrase_points_to_the_agent(ssh_server):
    protect(ssh_server)
    with pytest.raises(HostError, match="has a passphrase") as caught:
        Remote.connect(ssh_server.host)
    assert f"ssh-add {ssh_server.key}" in str(caught.value)
    assert "secret-words" not in str(caught.value)


def test_agent_holds_the_key(ssh_server, agent, monkeypatch):
    sock = agent(protect(ssh_server), "secret-words")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
    assert says_here(ssh_server.host)


def test_identity_agent_of_the_configuration_is_used(ssh_server, agent):
    sock = agent(protect(ssh_server), "secret-words")
    ssh_server.configure(f"Host *\n  IdentityAgent {sock}\n")
    assert says_here(ssh_server.host)


def test_no_agent_is_asked_where_the_configuration_says_none(ssh_server, agent, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent(protect(ssh_server), "secret-words")))
    ssh_server.configure("Host *\n  IdentityAgent none\n")
    with pytest.raises(HostError, match="has a passphrase"):
        Remote.connect(ssh_server.host)


def test_odd_files_in_ssh_s_folder_are_passed_over(ssh_server):
    ssh_server.key.with_name(ssh_server.key.name + ".pub").write_bytes("ssh-ed25519 AAAA Jürgen".encode("latin-1"))
    known = ssh_server.known_hosts
    known.write_text("studio ssh-ed25519 ÄÖÜ\n" + known.read_text())
    assert says_here(ssh_server.host)


@pytest.fixture
def keychain(tmp_path, monkeypatch, agent):
    """A Mac whose Keychain has these keys' passphrases; its ssh-add hands the keys to the agent (man ssh-add there)."""
    script, asked, known = tmp_path / "ssh-add", tmp_path / "asked", tmp_path / "known"
    known.mkdir()
    script.write_text(f'#!/bin/sh\necho "$@" >> {asked}\nfor key in {known}/*; do ssh-add -q "$key"; done\n')
    script.chmod(0o755)
    monkeypatch.setattr(authentication, "APPLE_SSH_ADD", str(script))
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    authentication.load_keychain.cache_clear()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent(keygen(tmp_path / "other"))))

    def knows(key: Path) -> None:
        shutil.copy(key, known)

    yield knows, asked
    authentication.load_keychain.cache_clear()


def test_a_passphrase_in_the_keychain_is_used_as_apple_s_ssh_does(ssh_server, keychain, capsys):
    knows, asked = keychain
    knows(ssh_server.key)  # as it was without a passphrase
    protect(ssh_server)
    assert says_here(ssh_server.host)
    assert says_here(ssh_server.host)
    assert asked.read_text() == "--apple-load-keychain\n"  # once: then the agent has it
    said = f"your ssh-agent gets the keys of your Keychain: {authentication.APPLE_SSH_ADD} --apple-load-keychain;"
    assert capsys.readouterr().err == f"{said} `ssh-add -D` undoes it\n"


def test_a_key_that_the_keychain_does_not_know_can_be_put_there(ssh_server, keychain):
    protect(ssh_server)
    for _ in range(2):
        with pytest.raises(HostError, match="has a passphrase") as caught:
            Remote.connect(ssh_server.host)
        assert f"{authentication.APPLE_SSH_ADD} --apple-use-keychain {ssh_server.key}" in str(caught.value)
    assert keychain[1].read_text().count("\n") == 1


def test_the_keychain_is_left_alone_where_the_key_needs_no_passphrase(ssh_server, keychain):
    assert says_here(ssh_server.host)
    assert not keychain[1].exists()
