"""A host's part of an evaluation: `python -m distributed.worker.decode`, started by whoever evaluates.

The first line of stdin is a DecodeSpec, each further one a group of clips: `model` ("before" or "after") and `clips`.
What is heard in a group is one event, `texts`. A group of no clips loads the model. The end of stdin ends the process,
and so does a long silence.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from pathlib import Path

from distributed.control.messages import send_event
from distributed.control.timeouts import Timeouts
from distributed.hosts.agent.files import hold
from distributed.hosts.keep_awake import keep_awake
from distributed.plan.run_spec import AFTER, DecodeSpec
from whisper_tuner.text import parse_json


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    alarm()
    spec = DecodeSpec.from_json(sys.stdin.buffer.readline().decode())
    groups: queue.SimpleQueue[dict] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            alarm()
            if line.strip():
                groups.put(parse_json(line.decode()))
        os._exit(0)  # the launcher has what it needs, or is gone

    threading.Thread(target=listen, daemon=True).start()
    keep_awake(os.getpid())
    hold(Path())
    decode(spec, groups)


def alarm() -> None:
    """Set an alarm, whose default action ends the process, whatever this does then: nobody is left to stop it."""
    signal.alarm(int(Timeouts().launcher_silence_s))


def decode(spec: DecodeSpec, groups: queue.SimpleQueue[dict]) -> None:
    """Tell what the model that a group names writes, one transcript for each of its clips, group by group."""
    import torch  # seconds, in which stdin is already watched
    from transformers import WhisperForConditionalGeneration

    from exogym import device as devices
    from whisper_tuner.export.final import load_model

    if spec.num_threads:
        torch.set_num_threads(spec.num_threads)
    device = devices.choose(spec.device)
    send_event({"type": "ready", "device": device.type})
    loaded = ""
    model: WhisperForConditionalGeneration | None = None  # one at a time
    while True:
        group = groups.get()
        name, clips, heard = group["model"], [Path(clip) for clip in group["clips"]], []
        if name != loaded:
            path = spec.after if name == AFTER else spec.before
            merged, processor = load_model(path, spec.before if model is None else model)
            assert isinstance(merged, WhisperForConditionalGeneration)
            model = merged
            model.to(device)  # type: ignore[arg-type]  # transformers wraps it in a type that takes no device
            loaded = name
        if clips and model:
            heard = spec.transcribe(model, processor, clips)
        texts = [[one.text, one.problem, one.temperature, one.greedy, one.logprob] for one in heard]
        send_event({"type": "texts", "texts": texts})


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # the boundary: whatever it is, the launcher tells it and goes on without this host
        send_event({"type": "failed", "message": f"{type(error).__name__}: {error}"[:500]})
    sys.stdout.flush()
    os._exit(1)
