"""How fast this machine trains alone: `python -m distributed.worker.speed RUN`, for the wizard.

Reads a RunSpec from the first line of stdin, and from the second sizes of a step in clips. Trains a few steps of each,
and writes one line of JSON at the end: clips_s, step_s and so on; or problem. A first step is not counted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from distributed.hosts.keep_awake import keep_awake
from distributed.plan.run_spec import RunSpec
from exogym import device as devices
from exogym.comm.comm import SingleComm
from exogym.errors import ExogymError
from exogym.trainer import LocalTrainer
from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.errors import TunerError
from whisper_tuner.eval.evaluation import evaluate
from whisper_tuner.model.base_model import load_base

from .load import load_whisper

LIMIT_S = 240  # for loading the model and all steps; if the connection is lost nobody else ends this process


def speed(spec: RunSpec, sizes: Sequence[int]) -> dict[str, Any]:
    """Clips a second and seconds of a usual step of the first size, and how many parameters are trained.

    Medians: one clip that is padded to 30 s, which few are, would be most of the mean, which `sizes` has of each size.
    start_s: from the process's beginning to the first step, without what is measured once. Of the test set, if the
    profile has one: clip_s, seconds to transcribe a clip, and the errors of the untouched model in so many words.
    """
    [(first, found), *others] = [(size, _trained(spec, size)) for size in sizes]
    means = [[first, found.pop("mean_s")], *([size, other["mean_s"]] for size, other in others)]
    return found | {"sizes": means} | _transcribing(spec)


def _trained(spec: RunSpec, size: int) -> dict[str, float]:
    assert spec.profile
    events: list[dict] = []
    spec = dataclasses.replace(spec, profile=dataclasses.replace(spec.profile, batch_size=size))
    alone = dataclasses.replace(spec, hosts=SingleComm().members)  # LocalTrainer's name for a rank that has no peers
    devices.repeat_bits(devices.choose(spec.wanted_device, local_rank=spec.rank))  # as in training, since it takes time
    work = load_whisper(alone, events.append, unsent=())
    settings = dataclasses.replace(
        work.settings, save_dir=None, checkpoint_interval=0, resume=False, early_stopping=0, keep_best=False
    )
    LocalTrainer(work.model, work.train).run_rank(0, settings, events=events.append)
    first, *counted = [event for event in events if event["type"] == "step"]
    step_s = statistics.median(step["seconds"] for step in counted)
    clips_s = statistics.median(step["samples"] / step["seconds"] for step in counted)
    [trainable] = [event["trainable"] for event in events if event["type"] == "start"]
    mean_s = statistics.mean(step["seconds"] for step in counted)
    once_s = sum(event["seconds"] for event in events if event["type"] == "memory")
    start_s = time.time() - psutil.Process().create_time() - first["seconds"] - mean_s * len(counted) - once_s
    return {"clips_s": clips_s, "step_s": step_s, "mean_s": mean_s, "trainable": trainable, "start_s": start_s}


def _transcribing(spec: RunSpec) -> dict[str, float]:
    profile = spec.profile
    assert profile
    if not profile.test:
        return {}
    model, processor = load_base(profile.base_model)
    clips = load_manifest(profile.test, check_audio=False).samples
    found = evaluate(
        model.to(devices.choose(spec.wanted_device)),  # type: ignore[arg-type]  # see launcher/evaluate.py
        processor,
        clips,
        language=profile.language or None,
        task=profile.task,
        batch_size=len(clips),
    )
    return {
        "clip_s": found.seconds / len(clips),
        "errors": found.normalized.errors,
        "words": found.normalized.words,
    }


def main() -> None:
    signal.alarm(LIMIT_S)
    keep_awake(os.getpid())
    spec = RunSpec.from_json(sys.stdin.readline())
    answer: dict[str, Any]
    try:
        answer = speed(spec, json.loads(sys.stdin.readline()))
    except (TunerError, ExogymError) as error:
        answer = {"problem": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
