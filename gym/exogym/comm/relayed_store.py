"""A store without a server: what one rank of a group sets is brought to the others by whoever can reach them all.

Also sent as text to hosts, see distributed/hosts/agent_call.py: it needs no more than Python 3.9 and torch.
"""

import base64

import torch.distributed as dist


class RelayedStore(dist.Store):
    """Answers what gloo asks of a store, on values that are told as text.

    tell(key, text) sends a value on its way to the others; told(key) waits for one of theirs. What they raise, such as
    RuntimeError for a value that does not come, ends the forming of the group.
    """

    def __init__(self, tell, told):
        super().__init__()
        self.tell, self.told, self.known = tell, told, {}

    def set(self, key, value):
        self.known[key] = value
        self.tell(key, base64.b64encode(value).decode())

    def get(self, key):
        if key not in self.known:
            self.known[key] = base64.b64decode(self.told(key), validate=True)
        return self.known[key]

    def wait(self, keys, timeout=None):
        for key in keys:
            self.get(key)
