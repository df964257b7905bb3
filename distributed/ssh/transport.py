"""One connection of paramiko's, which a command that ends at a bad moment does not bring down."""

from __future__ import annotations

from typing import Any

import paramiko
from paramiko.common import MSG_CHANNEL_CLOSE, MSG_CHANNEL_FAILURE, MSG_CHANNEL_WINDOW_ADJUST


class Transport(paramiko.Transport):
    """Sends nothing more to a channel whose end it has sent.

    paramiko makes a message under the channel's lock, and sends it after that. So what ends a command's input, or
    writes to it, may send after the thread that answers the command's end, and OpenSSH then closes the whole
    connection (paramiko's issues 1115 and 1705).
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._ended: set[bytes] = set()  # channels, by the number that the other side gave them

    def open_channel(self, *args: Any, **options: Any) -> paramiko.Channel:
        channel = super().open_channel(*args, **options)
        self._ended.discard(_number(channel.remote_chanid))  # it gives a number again once both sides have ended
        return channel

    def _send_message(self, data: paramiko.Message) -> None:
        """Calls about channels come one at a time, as their caller holds `clear_to_send_lock`."""
        message = data.asbytes()
        kind, channel = message[0], message[1:5]
        if MSG_CHANNEL_WINDOW_ADJUST <= kind <= MSG_CHANNEL_FAILURE:
            if channel in self._ended:
                return
            if kind == MSG_CHANNEL_CLOSE:
                self._ended.add(channel)
        super()._send_message(data)


def _number(channel: int) -> bytes:
    return channel.to_bytes(4, "big")
