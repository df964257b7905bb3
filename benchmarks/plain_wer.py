"""WER by plain transformers, peft and jiwer, with nothing of this project: MODEL [BASE] TEST.csv.

python benchmarks/plain_wer.py runs/ID/final data/test.csv
python benchmarks/plain_wer.py runs/ID/final openai/whisper-tiny data/test.csv     (a LoRA adapter and its base)

With `--clips` in front it prints JSON instead: [errors, words] of each clip. `--device cuda` before that.
"""

import csv
import json
import sys
from pathlib import Path

import jiwer
import soundfile
from peft import PeftModel
from transformers import WhisperForConditionalGeneration, WhisperProcessor

arguments = sys.argv[1:]
device = "cpu"
if arguments[0] == "--device":
    device, arguments = arguments[1], arguments[2:]
each_clip = arguments[0] == "--clips"
folder, *base, manifest = arguments[each_clip:]
processor = WhisperProcessor.from_pretrained(folder)
model = WhisperForConditionalGeneration.from_pretrained(base[0] if base else folder).eval()
model = PeftModel.from_pretrained(model, folder).get_base_model() if base else model
model = model.to(device)
references, heard = [], []
longest = model.config.max_target_positions // 2
for row in csv.DictReader(Path(manifest).read_text(encoding="utf-8").splitlines()):
    audio, rate = soundfile.read(Path(manifest).parent / row["audio_path"])
    features = processor(audio, sampling_rate=rate, return_tensors="pt").input_features.to(device)
    heard += processor.batch_decode(model.generate(features, max_new_tokens=longest), skip_special_tokens=True)
    references.append(row["transcription"])
plain = jiwer.Compose([jiwer.ToLowerCase(), jiwer.RemovePunctuation(), jiwer.RemoveMultipleSpaces(), jiwer.Strip()])
references, heard = [plain(text) for text in references], [plain(text.strip()) for text in heard]
if each_clip:
    made = [jiwer.process_words(said, text) for said, text in zip(references, heard, strict=True)]
    errors = [m.substitutions + m.deletions + m.insertions for m in made]
    print(json.dumps([[wrong, len(said.split())] for wrong, said in zip(errors, references, strict=True)]))
else:
    print(f"WER {100 * jiwer.wer(references, heard):.1f}")
