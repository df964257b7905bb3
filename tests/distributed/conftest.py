"""The fixture that tests of SSH share."""

from loopback_sshd import ssh_server

__all__ = ["ssh_server"]
