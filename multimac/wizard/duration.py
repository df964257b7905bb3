"""Tells how long a run will take, by a few training steps and transcripts, before anybody starts it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from distributed.checkup.speed import Speed, measure, of_all_lengths, step_of_all
from distributed.hosts.sync import no_progress
from distributed.ssh.host import Host, Hosts
from multimac.view.progress import working
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.steps import steps_in_epoch
from whisper_tuner.errors import TunerError
from whisper_tuner.hub import folder_here

from .draft import Draft
from .questions import Questions, drop_typed

STEPS = 9  # the first is not counted
HEARD = 8  # clips of the test set
FORWARD = 1 / 3  # of a step: validation computes no gradients
HERE = Hosts(master=Host(address="this machine"), workers=())


def show_time(questions: Questions, draft: Draft, scratch: Path, console: Console) -> None:
    """Print how long the run will take. Alone it is measured; of hosts it is known if they were measured.

    What hosts take to transcribe the test set was not measured.
    """
    model, group = draft.model.base_model, draft.group
    if not group and questions.interactive and not folder_here(model):
        console.print(f"{model} is downloaded first, so how long it takes is not known.", markup=False)
        return
    speeds = list(group.speeds) if group else _measured(questions, draft, scratch, console)
    step_s = step_of_all(speeds)
    if step_s is None:
        return
    if not group:
        step_s = speeds[0].mean_step_s
    seconds = expected_s(draft.data.samples, int(draft.settings["epochs"]), _steps(draft, len(speeds)), step_s, speeds)
    longest = " at most" if "early_stopping" in draft.settings else ""
    what = "training, without the evaluation," if group else "this"
    console.print(f"By a few steps on your clips, {what} will take {in_words(seconds)}{longest}.")


def in_words(seconds: float) -> str:
    if seconds < 150:
        return f"about {max(10, round(seconds, -1)):.0f} seconds"
    minutes = round(seconds / 60)
    hours = f"{minutes // 60} h " if minutes >= 60 else ""
    return f"about {hours}{minutes % 60} min" if hours else f"about {minutes} minutes"


def expected_s(
    samples: Mapping[str, tuple[Sample, ...]], epochs: int, steps: int, step_s: float, speeds: list[Speed]
) -> float:
    """Add up starting, training, validation after each epoch, and transcribing the test set before and after.

    steps: of an epoch. To evaluate, the model is loaded once more.
    """
    master, train = speeds[0], len(samples["train"])
    validation = FORWARD * steps * step_s * len(samples.get("validation", ())) / train
    heard_s = 2 * master.clip_s * len(samples.get("test", ())) / len(speeds)
    return 2 * master.start_s + epochs * (steps * step_s + validation) + heard_s


def _steps(draft: Draft, hosts: int) -> int:
    clips, batch_size = len(draft.data.samples["train"]), int(draft.settings["batch_size"])
    return steps_in_epoch(clips, hosts, batch_size, draft.job().dealt_over if hosts > 1 else 1)


def _measured(questions: Questions, draft: Draft, scratch: Path, console: Console) -> list[Speed]:
    job, samples = draft.job(), draft.data.samples
    heard = of_all_lengths(samples.get("test", ()), HEARD)

    def look() -> list[Speed]:
        with working(console, "measuring a few training steps and transcripts (usually under a minute; Ctrl-C quits)"):
            return measure(job, samples["train"], HERE, (), scratch, no_progress, (1,), steps=STEPS, test=heard)

    try:
        speeds = questions.once("time", draft.job_of_machines(), look)
        drop_typed()
    except (TunerError, OSError) as error:
        console.print(f"How long it takes could not be measured: {error}", style="yellow", markup=False)
        return []
    if speeds[0].problem:
        what = f"How long it takes could not be measured: {speeds[0].problem}"
        console.print(what, style="yellow", markup=False)
    return speeds
