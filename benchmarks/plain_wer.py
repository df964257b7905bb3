"""WER by plain transformers, peft and jiwer, with nothing of this project: MODEL [BASE] TEST.csv.

python benchmarks/plain_wer.py runs/ID/final data/test.csv
python benchmarks/plain_wer.py runs/ID/final openai/whisper-tiny data/test.csv     (a LoRA adapter and its base)
"""

import csv
import sys
from pathlib import Path

import jiwer
import soundfile
from peft import PeftModel
from transformers import WhisperForConditionalGeneration, WhisperProcessor

folder, *base, manifest = sys.argv[1:]
processor = WhisperProcessor.from_pretrained(folder)
model = WhisperForConditionalGeneration.from_pretrained(base[0] if base else folder).eval()
model = PeftModel.from_pretrained(model, folder).get_base_model() if base else model
references, heard = [], []
for row in csv.DictReader(Path(manifest).read_text(encoding="utf-8").splitlines()):
    audio, rate = soundfile.read(Path(manifest).parent / row["audio_path"])
    features = processor(audio, sampling_rate=rate, return_tensors="pt").input_features
    heard += processor.batch_decode(model.generate(features, max_new_tokens=224), skip_special_tokens=True)
    references.append(row["transcription"])
plain = jiwer.Compose([jiwer.ToLowerCase(), jiwer.RemovePunctuation(), jiwer.RemoveMultipleSpaces(), jiwer.Strip()])
print(f"WER {100 * jiwer.wer([plain(t) for t in references], [plain(t.strip()) for t in heard]):.1f}")
