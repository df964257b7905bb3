"""The owner's key, each host's own key, and sshd's configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

from lab.network import sh

PRIVATE = Path("/run/sshd")  # where each host's sshd finds its own folder
ENVIRONMENT = PRIVATE / "environment.conf"  # SetEnv lines for what this sshd starts, if there is such a file

SSHD_CONFIG = """\
ListenAddress {address}:22
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile .ssh/authorized_keys
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
MaxStartups 200
MaxSessions 200
Subsystem sftp internal-sftp
Include {environment}
"""


def new_key(path: Path, comment: str) -> None:
    sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


def write_sshd(folder: Path, address: str, host: str) -> Path:
    """A host key and sshd_config in `folder`, outside the host's home; kept if they are there already."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / "host_key").exists():
        new_key(folder / "host_key", host)
    config = folder / "sshd_config"
    config.write_text(SSHD_CONFIG.format(address=address, folder=folder, environment=ENVIRONMENT))
    (folder / ENVIRONMENT.name).unlink(missing_ok=True)
    return config


def authorize(home: Path, public_key: Path) -> None:
    """What ssh-copy-id does."""
    ssh = home / ".ssh"
    ssh.mkdir(mode=0o700, parents=True, exist_ok=True)
    home.chmod(0o700)
    shutil.copyfile(public_key, ssh / "authorized_keys")
    (ssh / "authorized_keys").chmod(0o600)


def own(home: Path, private_key: Path) -> None:
    """Give the master's home the owner's private key."""
    ssh = home / ".ssh"
    ssh.mkdir(mode=0o700, parents=True, exist_ok=True)
    for source, name in ((private_key, "id_ed25519"), (private_key.with_suffix(".pub"), "id_ed25519.pub")):
        shutil.copyfile(source, ssh / name)
        (ssh / name).chmod(0o600)
