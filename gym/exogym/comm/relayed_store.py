"""A store without a server: what one rank of a group sets is brought to the others by whoever can reach them all.

Also sent as text to hosts, see distributed/hosts/agent_call.py: it needs no more than Python 3.9 and torch.
"""

import base64
from collections.abc import Callable

import torch.distributed as dist


class RelayedStore(dist.Store):
    """Answers what gloo asks of a store, on values that are told as text.

    tell(key, text) sends a value on its way to the others; told(key) waits for one of theirs. What they raise, such as
    RuntimeError for a value that does not come, ends the forming of the group.
    """

    def __init__(self, tell: Callable[[str, str], None], told: Callable[[str], str]) -> None:
        super().__init__()
        self.tell, self.told = tell, told
        self.known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # gloo gives bytes
        self.known[key] = value
        self.tell(key, base64.b64encode(value).decode())

    def get(self, key: str) -> bytes:
        if key not in self.known:
            self.known[key] = base64.b64decode(self.told(key), validate=True)
        return self.known[key]

    def wait(self, keys: list[str], timeout: object = None) -> None:
        for key in keys:
            self.get(key)
