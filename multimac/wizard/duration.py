"""Tells how long a run will take, by a few training steps and transcripts, before anybody starts it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from distributed.checkup.speed import measure, of_all_lengths, remember, remembered
from distributed.hosts.sync import no_progress
from distributed.plan.forecast import HERE, Speed, forecast, key_of, ratios_of
from multimac.view.models import short_name
from multimac.view.progress import working
from whisper_tuner.errors import TunerError
from whisper_tuner.hub import folder_here
from whisper_tuner.text import in_words

from .draft import Draft
from .model import usual_rate
from .questions import Questions, drop_typed

STEPS = 9  # the first is not counted
HEARD = 8  # clips of the test set
# Errors in 100 words. Of 6.1, five minutes of speech left 5.3 by LoRA at a GENTLER rate, and 6.5 to 12.9 at the usual
# one (RESULTS.md, quality: tiny.en on en-5min; three seeds, paired: -3.4, -5.9 to -1.3).
KNOWN = 10
GENTLER = 5  # times


def show_time(questions: Questions, draft: Draft, scratch: Path, console: Console) -> Speed | None:
    """Print how long the run will take. Alone it is measured; of hosts it is known if they were measured.

    What hosts take to transcribe the test set was not measured. Returns what was measured on this machine.
    """
    model, group = draft.model.base_model, draft.group
    if not group and questions.interactive and not folder_here(model):
        console.print(f"{model} is downloaded first, so how long it takes is not known.", markup=False)
        return None
    job, speeds = draft.job(), list(group.speeds) if group else _measured(questions, draft, scratch, console)
    if not speeds or not all(speed.sizes for speed in speeds):
        return None
    clips = {kind: len(samples) for kind, samples in draft.data.samples.items() if kind != "test" or not group}
    bytes_s, spare = (group.bytes_s, group.spare_bytes) if group else (None, None)
    ratios = ratios_of(key_of(job, (group.hosts if group else HERE).all))
    found = forecast(job, clips, speeds, bytes_s=bytes_s, spare_bytes=spare, ratios=ratios)
    less = ", less if it stops early" if "early_stopping" in draft.settings else ""
    what = "training, without the evaluation," if group else "this"
    console.print(f"By a few steps on your clips, {what} will take {in_words(found.seconds)}{less}.")
    if told := untouched_told(speeds[0], short_name(model)):
        console.print(told, markup=False)
    return speeds[0]


def untouched_told(speed: Speed, model: str) -> str:
    """Tell how well a model hears a few test clips before it is trained; "" if it was not measured."""
    if not speed.words:
        return ""
    rate = 100 * speed.errors / speed.words
    told = f"Before training, {model} makes about {rate:.0f} errors in 100 words, by a few test clips."
    if knows(speed):
        told += " It knows such speech, so little can be gained: see whether the last lines say better."
    return told


def knows(speed: Speed) -> bool:
    return bool(speed.words) and 100 * speed.errors < KNOWN * speed.words


def suit_rate(draft: Draft, speed: Speed | None, console: Console) -> None:
    """Lower a suggested rate of LoRA for speech that the model knows: at the usual one it gets worse (see KNOWN)."""
    usual = usual_rate(draft.model, draft.method)
    if speed and knows(speed) and draft.method == "lora" and draft.settings["learning_rate"] == usual:
        rate = draft.settings["learning_rate"] = f"{float(usual) / GENTLER:g}"
        console.print(f"So the learning rate is {rate}, a fifth of the usual one: it spoils less.", markup=False)


def _measured(questions: Questions, draft: Draft, scratch: Path, console: Console) -> list[Speed]:
    job, samples = draft.job(), draft.data.samples
    heard = of_all_lengths(samples.get("test", ()), HEARD)

    def look() -> list[Speed]:
        known = remembered(job, HERE)
        if known and (known[0].clip_s or not heard):
            return known
        with working(console, "measuring a few steps and transcripts (usually under a minute; Ctrl-C quits)"):
            speeds = measure(job, samples["train"], HERE, (), scratch, no_progress, (1,), steps=STEPS, test=heard)
            remember(job, HERE, speeds)
            return speeds

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
