"""What belongs to ssh: known_hosts."""

from __future__ import annotations

from pathlib import Path

from damage import damaged
from fuzzing import fuzz, outcome

from distributed import known_hosts
from distributed.known_hosts import Verdict

KEY = b"AAAAC3NzaC1lZDI1NTE5AAAAIJjGTaYOg3pbwRtmRnkFLHQvjIjlRjSIFdCNQS4kSuVP"
KNOWN = b"""\
# our machines
mini.local,192.168.1.* ssh-ed25519 %b ben@mini
[mini.local]:2222,!10.0.0.9,10.0.0.? ssh-ed25519 %b
|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg= ssh-ed25519 %b
@revoked * ssh-ed25519 %b
@cert-authority *.example.org ssh-ed25519 %b
""" % (KEY, KEY, KEY, KEY, KEY)


@fuzz("known_hosts", damaged(KNOWN))
def test_known_hosts(folder: Path, data: bytes):
    (folder / "known_hosts").write_bytes(data)
    known = outcome(known_hosts.load, [folder / "known_hosts"])
    for name in ("mini.local", "[mini.local]:2222", "10.0.0.9"):
        assert outcome(known.check, name, b"another key") is not Verdict.KNOWN
        assert all(kind for kind in known.kinds(name))
