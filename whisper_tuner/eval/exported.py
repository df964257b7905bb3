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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transformers import WhisperForConditionalGeneration

from whisper_tuner.data.audio import CLIP_S, load_audio
from whisper_tuner.data.dataset import Sample
from whisper_tuner.errors import RunError, TunerError
from whisper_tuner.eval.evaluation import Evaluation, Transcript, compared, generation_settings
from whisper_tuner.eval.intervals import Difference
from whisper_tuner.export.formats import Format, Speech, formats
from whisper_tuner.languages import text_language

LIMIT = 0.5  # points of WER by which a runtime may differ from transformers, where nothing is quantised
LAST_LINES = 5  # of what a runtime said before it broke off


def speech_of(model: WhisperForConditionalGeneration, language: str | None, task: str | None) -> Speech:
    """Return language and task; where they are not given, those that the model was trained for."""
    arguments, written = generation_settings(model, language, task)
    return Speech(language=arguments.get("language", written), task=arguments.get("task", "transcribe"))


def is_off(found: Difference | None) -> bool:
    """More than LIMIT, and more than chance: rounding may turn a word over, and that is much of a small set."""
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
    heard, seconds = [], 0.0
    for line in _lines(which, folder, [sample.audio for sample in samples], speech):
        heard.append(Transcript(line["text"], line["problem"]))
        seconds += line["seconds"]
        progress(len(heard), len(samples))
    return compared(samples, heard, text_language(speech.language, speech.task), seconds)


def _lines(which: Format, folder: Path, audio: Sequence[Path], speech: Speech) -> Iterator[dict]:
    """`text`, `problem` and `seconds` of each file."""
    asked = {"name": which.name, "folder": str(folder), "language": speech.language, "task": speech.task}
    with tempfile.TemporaryFile("w+") as job, tempfile.TemporaryFile("w+") as said:
        json.dump(asked | {"audio": [str(path.absolute()) for path in audio]}, job)
        job.seek(0)
        streams = {"stdin": job, "stdout": subprocess.PIPE, "stderr": said, "text": True}
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen([sys.executable, "-P", "-m", __name__], env=env, **streams) as process:
            try:
                count = 0
                for line in process.stdout:
                    yield json.loads(line)
                    count += 1
            except BaseException:
                process.kill()
                raise
        if process.returncode or count < len(audio):
            said.seek(0)
            raise RunError(_ended(which, process.returncode, said.read()), remedy="The export stays where it is.")


def _ended(which: Format, status: int, said: str) -> str:
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    last = [line for line in said.splitlines() if line.strip()][-LAST_LINES:]
    return "\n    ".join([f"{which.runtime} broke off ({how}) with this model:", *last])


def main() -> None:
    asked = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")  # what a runtime prints does not belong there
    os.dup2(2, 1)
    hear = formats()[asked["name"]].listener(
        Path(asked["folder"]), Speech(language=asked["language"], task=asked["task"])
    )
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
