"""Groups of gloo's, two hosts each, formed as training forms them. Runs as text in the process that looks at torch.

Over libuv, which gloo uses on macOS, a refused connection raises nothing and may hang past its time-out. So every pair
has a thread of its own; one that hangs is left behind, and ends with the process.
"""

import json
import queue
import socket
import sys
import threading
import time
from datetime import timedelta

SILENT = "no answer"
SHOWN = 200
POLL_S = 0.02
kept = []  # the store, and groups that nobody may drop: that could block


def serve():
    """Requests on stdin, answers on stdout, each one line of JSON."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"open_store": open_store, "form_groups": form_groups}[request.pop("op")](**request)
        except Exception as error:
            answer = {"failed": brief(error)}
        print(json.dumps(answer), flush=True)


def open_store(address):
    """Where the pairs meet, on one address, as the launcher opens it."""
    from torch.distributed import TCPStore

    listener = socket.create_server((address, 0), backlog=128)
    port = listener.getsockname()[1]
    kept.append(TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()))
    return {"port": port}


def form_groups(me, address, store, peers, seconds):
    """One all_reduce with each of `peers` (numbers), all at once: [peer, "" or what failed].

    {"failed"} if the store itself, [address, port], is not reached: then nothing is known of any pair.
    """
    threads = Threads(seconds)
    threads.start("store", join_store, store, seconds)
    _, failed, meeting = threads.next()
    if failed:
        return {"failed": "the store at {}:{}: {}".format(*store, failed)}
    for peer in peers:
        threads.start(peer, reduce_with, me, peer, address, meeting, seconds)
    found = dict.fromkeys(peers, SILENT)
    for _ in peers:
        peer, failed, _ = threads.next()
        if peer in found:
            found[peer] = failed
    return {"groups": [list(pair) for pair in found.items()]}


class Threads:
    """Work in threads of its own, and its outcomes as they come within `seconds`: (name, what failed, result)."""

    def __init__(self, seconds):
        self.deadline = time.monotonic() + seconds
        self.ended = queue.SimpleQueue()

    def start(self, name, work, *about):
        threading.Thread(target=self.run, args=(name, work, *about), daemon=True).start()

    def run(self, name, work, *about):
        try:
            self.ended.put((name, "", work(*about)))
        except Exception as error:
            self.ended.put((name, brief(error), None))

    def next(self):
        try:
            return self.ended.get(timeout=max(0.0, self.deadline - time.monotonic()))
        except queue.Empty:
            return None, SILENT, None


def join_store(store, seconds):
    """One connection for all pairs: c10d looks up the name of each connection's other end, which may take seconds."""
    import torch.distributed as dist

    class Polled(dist.Store):
        """Asks again and again: a connection in which one pair waits would hold up the others."""

        def __init__(self, below):
            super().__init__()
            self.below = below

        def set(self, key, value):
            self.below.set(key, value)

        def get(self, key):
            self.wait([key])
            return self.below.get(key)

        def wait(self, keys, timeout=None):
            end = time.monotonic() + seconds
            while not self.below.check(list(keys)):
                if time.monotonic() > end:
                    raise RuntimeError("the other one did not come")
                time.sleep(POLL_S)

    wait = timedelta(seconds=seconds)
    return Polled(dist.TCPStore(*store, is_master=False, timeout=wait))


def reduce_with(me, peer, address, meeting, seconds):
    import torch
    import torch.distributed as dist

    pair, wait = sorted((me, peer)), timedelta(seconds=seconds)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = wait
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    prefix = dist.PrefixStore("{}-{}".format(*pair), meeting)
    group = dist.ProcessGroupGloo(prefix, pair.index(me), 2, options)
    kept.append(group)
    flat = torch.full((1024,), float(me))
    group.allreduce([flat]).wait(wait)
    if set(flat.tolist()) != {float(me + peer)}:
        raise RuntimeError("all_reduce gave a wrong sum")


def brief(error):
    """gloo names a file of its own first: `[/some/where.cc:123] what failed`."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first.rpartition(".cc:")[2].partition("] ")[2][:SHOWN] or first[:SHOWN]


if __name__ == "__main__":
    serve()
