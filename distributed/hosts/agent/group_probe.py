"""Groups of gloo's, two hosts each, formed as training forms them. Runs as text in the process that looks at torch.

Over libuv, which gloo uses on macOS, a refused connection raises nothing and may hang past its time-out. So every pair
has a thread of its own; one that hangs is left behind, and ends with the process.
"""

import json
import queue
import sys
import threading
import time
from datetime import timedelta

from exogym.comm.relayed_store import RelayedStore

SILENT = "no answer"
SHOWN = 200
kept: list = []  # groups that nobody may drop: that could block
news: queue.SimpleQueue = (
    queue.SimpleQueue()
)  # of the threads: (peer, key and value that it is to be told), (peer, "", what failed)
begun: dict = {}  # by peer: a queue of what it has told
ended: dict = {}  # by peer: what failed, or ""


def serve():
    """Requests on stdin, answers on stdout, each one line of JSON."""
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"begin_groups": begin_groups, "form_groups": form_groups}[request.pop("op")](**request)
        print(json.dumps(answer), flush=True)


def begin_groups(me, address, peers, seconds):
    """Listen for each of `peers` (numbers), all at once, and say what they are to be told: [peer, key, value].

    So they need no store on the network. `seconds` is the time for all, that of `form_groups` included.
    """
    for peer in peers:
        begun[peer] = queue.SimpleQueue()
        threading.Thread(target=form, args=(me, peer, address, seconds), daemon=True).start()
    return {"told": gather(time.monotonic() + seconds / 2, len(peers))}


def form_groups(told, seconds):
    """One all_reduce with each of the peers, who have told [peer, key, value]: [peer, "" or what failed]."""
    for peer, key, value in told:
        begun[peer].put((key, value))
    gather(time.monotonic() + seconds, len(begun))
    return {"groups": [[peer, ended.get(peer, SILENT)] for peer in begun]}


def gather(deadline, count):
    """Collect what threads want told until the deadline, or until `count` of them have spoken or ended."""
    told = {}
    while len(told.keys() | ended.keys()) < count:
        try:
            peer, key, value = news.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if key:
            told[peer] = [peer, key, value]
        else:
            ended[peer] = value
    return list(told.values())


def form(me, peer, address, seconds):
    """Form the group with one peer, and try it; run in a thread of its own."""
    import torch
    import torch.distributed as dist

    def told(key):
        said, value = begun[peer].get(timeout=seconds)
        if said != key:
            raise RuntimeError(f"it has told {said}, not {key}")
        return value

    pair, wait = sorted((me, peer)), timedelta(seconds=seconds)
    store, failed = RelayedStore(lambda key, value: news.put((peer, key, value)), told), ""
    try:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = wait
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        group = dist.ProcessGroupGloo(store, pair.index(me), 2, options)
        kept.append(group)
        flat = torch.full((1024,), float(me))
        group.allreduce([flat]).wait(wait)
        if set(flat.tolist()) != {float(me + peer)}:
            failed = "all_reduce gave a wrong sum"
    except queue.Empty:
        failed = "the other one did not come"
    except Exception as error:
        # gloo names a file of its own first: `[/some/where.cc:123] what failed`.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        failed = (first.rpartition(".cc:")[2].partition("] ")[2] or first)[:SHOWN]
    news.put((peer, "", failed))


if __name__ == "__main__":
    serve()
