"""WER by plain transformers, peft and jiwer: as a script, with nothing of this project.

python benchmarks/plain_wer.py runs/ID/final data/test.csv
python benchmarks/plain_wer.py runs/ID/final data/test.csv --base openai/whisper-tiny    (a LoRA adapter and its base)

With `--clips` it prints JSON instead: [errors, words] of each clip. Other benchmarks call `transcribed`. A text ends at
twice the tokens of what was said, and ten: a model that repeats itself is wrong by then, and one such clip would
outweigh all others.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PARTS = ("validation", "test")
Clips = list[list[int]]
"""[errors, words] of each clip."""


def main() -> None:
    import jiwer
    import soundfile
    from peft import PeftModel
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--base", help="of a LoRA adapter")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--most", type=int, help="clips to transcribe, the first ones [all]")
    parser.add_argument("--clips", action="store_true")
    args = parser.parse_args()
    processor = WhisperProcessor.from_pretrained(args.model)
    model = WhisperForConditionalGeneration.from_pretrained(args.base or args.model).eval()
    model = PeftModel.from_pretrained(model, args.model).get_base_model() if args.base else model
    model = model.to(args.device)
    references, heard = [], []
    for row in list(csv.DictReader(args.manifest.read_text(encoding="utf-8").splitlines()))[: args.most]:
        audio, rate = soundfile.read(args.manifest.parent / row["audio_path"])
        features = processor(audio, sampling_rate=rate, return_tensors="pt").input_features.to(args.device)
        most = min(
            2 * len(processor.tokenizer(row["transcription"]).input_ids) + 10, model.config.max_target_positions // 2
        )
        heard += processor.batch_decode(model.generate(features, max_new_tokens=most), skip_special_tokens=True)
        references.append(row["transcription"])
    references, heard = [plain(text) for text in references], [plain(text.strip()) for text in heard]
    if not args.clips:
        print(f"WER {100 * jiwer.wer(references, heard):.1f}")
        return
    made = [jiwer.process_words(said, text) for said, text in zip(references, heard, strict=True)]
    errors = [m.substitutions + m.deletions + m.insertions for m in made]
    print(json.dumps([[wrong, len(said.split())] for wrong, said in zip(errors, references, strict=True)]))


def plain(text: str) -> str:
    """Return a text in small letters, without signs."""
    import jiwer

    steps = [jiwer.ToLowerCase(), jiwer.RemovePunctuation(), jiwer.RemoveMultipleSpaces(), jiwer.Strip()]
    return jiwer.Compose(steps)(text)


def transcribed(
    model: Path, manifests: Sequence[Path], *, base: Path | None = None, most: int | None = None, device: str = "cpu"
) -> Clips:
    """Transcribe the clips of all manifests, padded to 30 s, each manifest in a process of its own.

    base: of a LoRA adapter. most: clips of each manifest; an untrained model repeats itself for long, so of a run of a
    few steps take few. Raises RuntimeError.
    """
    env = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    options = ["--clips", "--device", device]
    options += ["--base", str(base)] if base else []
    options += ["--most", str(most)] if most else []
    command = [sys.executable, str(Path(__file__).resolve()), str(model)]
    started = [
        subprocess.Popen([*command, str(manifest), *options], stdout=subprocess.PIPE, text=True, env=env)
        for manifest in manifests
    ]
    told = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{model} could not be transcribed")
    return [clip for text in told for clip in json.loads(text.strip().splitlines()[-1])]


def unseen(data: Path) -> list[Path]:
    """Return the manifests of the validation and test clips in a data folder."""
    return [data / f"{part}.csv" for part in PARTS]


def wer(clips: Clips) -> float:
    """Return the WER in per cent."""
    errors, words = map(sum, zip(*clips, strict=True))
    return 100 * errors / words


def against(these: Sequence[Clips], those: Sequence[Clips]) -> tuple[str, bool]:
    """Tell by how many points of WER these runs are above those, with an interval of 95 %; and if that is above 0.

    The runs have the same clips in the same order, and count together. Resampled are the clips.
    """
    from whisper_tuner.eval.wer import wer_difference

    def together(runs: Sequence[Clips]) -> Clips:
        return [[sum(each) for each in zip(*same_clip, strict=True)] for same_clip in zip(*runs, strict=True)]

    found = wer_difference(together(these), together(those))
    return f"{found.points:+.1f} ({found.low:+.1f} to {found.high:+.1f})", found.low > 0


if __name__ == "__main__":
    main()
