"""One connection of paramiko's, which a command that ends at a bad moment does not bring down."""

from __future__ import annotations

import itertools
import socket
from typing import Any

import paramiko
from paramiko.common import MSG_CHANNEL_CLOSE, MSG_CHANNEL_FAILURE, MSG_CHANNEL_WINDOW_ADJUST


class Transport(paramiko.Transport):
    """Sends nothing more to a channel whose end it has sent.

    paramiko makes a message under the channel's lock, and sends it after that. So what ends a command's input, or
    writes to it, may send after the thread that answers the command's end, and OpenSSH then closes the whole
    connection (paramiko's issues 1115 and 1705). Or it has given the channel's number to another one, which would get
    the message: so channels have numbers here that come only once, and each message gets the other side's as it leaves.
    """

    def __init__(self, sock: socket.socket | paramiko.Channel | paramiko.ProxyCommand):
        super().__init__(sock)
        self._own_numbers = itertools.count(1 << 31)  # no other side has so many channels
        self._open: dict[bytes, bytes] = {}  # the other side's number of a channel by the own one

    def open_channel(self, *args: Any, **options: Any) -> paramiko.Channel:
        channel = super().open_channel(*args, **options)
        own = next(self._own_numbers)
        self._open[_bytes(own)] = _bytes(channel.remote_chanid)
        channel.remote_chanid = own
        return channel

    def _send_message(self, data: paramiko.Message) -> None:
        """Calls about channels come one at a time, as their caller holds `clear_to_send_lock`."""
        message = data.asbytes()
        kind, own = message[0], message[1:5]
        if MSG_CHANNEL_WINDOW_ADJUST <= kind <= MSG_CHANNEL_FAILURE and own[0] >= 0x80:
            theirs = self._open.pop(own, None) if kind == MSG_CHANNEL_CLOSE else self._open.get(own)
            if theirs is None:
                return
            data = paramiko.Message(message[:1] + theirs + message[5:])
        super()._send_message(data)


def _bytes(number: int) -> bytes:
    return number.to_bytes(4, "big")
