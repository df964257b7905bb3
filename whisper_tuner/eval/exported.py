"""Decodes clips with an exported model, by its own runtime.

That runs in a process of its own: a runtime in C++ that stumbles over a model takes its whole process with it, and
several of them bring their own copy of OpenMP.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import WhisperForConditionalGeneration

from whisper_tuner.data.audio import CLIP_S, load_audio
from whisper_tuner.data.dataset import Sample
from whisper_tuner.errors import RunError, TunerError
from whisper_tuner.eval.evaluation import Evaluation, Transcript, compared, generation_settings
from whisper_tuner.eval.wer import Difference
from whisper_tuner.export.formats import Format, Speech, formats
from whisper_tuner.languages import text_language

LIMIT = 0.5  # points of WER by which a runtime may differ from transformers, where nothing is quantised
LAST_LINES = 5  # of what a runtime said before it broke off


def speech_of(model: WhisperForConditionalGeneration, language: str | None, task: str | None) -> Speech:
    """Return language and task; where they are not given, those that the model was trained for."""
    arguments, written = generation_settings(model, language, task)
    return Speech(language=arguments.get("language", written), task=arguments.get("task", "transcribe"))


def is_off(found: Difference | None) -> bool:
    """Tell if it is more than LIMIT, and more than chance: a word that rounding turns over is much of a small set."""
    return found is not None and abs(found.points) > LIMIT and not found.low <= 0 <= found.high


def decoded(
    which: Format,
    folder: Path,
    samples: Sequence[Sample],
    speech: Speech,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Return what the runtime writes for each clip, plainly decoded: greedily and without timestamps.

    Raises RunError if it breaks off.
    """
    asked = {"name": which.name, "folder": str(folder), "language": speech.language, "task": speech.task}
    heard: list[Transcript] = []
    seconds = 0.0
    command = [sys.executable, "-P", "-m", __name__]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile("w+") as job, tempfile.TemporaryFile("w+") as said:
        json.dump(asked | {"audio": [str(sample.audio.absolute()) for sample in samples]}, job)
        job.seek(0)
        with subprocess.Popen(command, env=env, stdin=job, stdout=subprocess.PIPE, stderr=said, text=True) as process:
            try:
                for line in process.stdout or ():
                    answer = json.loads(line)
                    heard.append(Transcript(answer["text"], answer["problem"]))
                    seconds += answer["seconds"]
                    progress(len(heard), len(samples))
            except BaseException:
                process.kill()
                raise
        if (status := process.returncode) or len(heard) < len(samples):
            said.seek(0)
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            last = [line for line in said.read().splitlines() if line.strip()][-LAST_LINES:]
            what = "\n    ".join([f"{which.runtime} broke off ({how}) with this model:", *last])
            raise RunError(what, remedy="The export stays where it is.")
    return compared(samples, heard, text_language(speech.language, speech.task), seconds)


def main() -> None:
    """Answer on the first stdout, for each file in the job on stdin, `text`, `problem` and `seconds`."""
    asked = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")  # what a runtime prints does not belong there
    os.dup2(2, 1)
    speech = Speech(language=asked["language"], task=asked["task"])
    hear = formats()[asked["name"]].listener(Path(asked["folder"]), speech)
    for path in asked["audio"]:
        text, problem, began = "", "", time.perf_counter()
        try:
            text = hear(load_audio(path, longest_s=CLIP_S)).strip()
        except TunerError as error:
            problem = str(error).splitlines()[0]
        answer = {"text": text, "problem": problem, "seconds": time.perf_counter() - began}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
