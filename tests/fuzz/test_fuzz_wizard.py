"""Files that the wizard reads: answers, manifests that it finds, the models of config.ini."""

from __future__ import annotations

from pathlib import Path

from damage import damaged, damaged_json
from fuzzing import fuzz, outcome
from hypothesis import example
from test_fuzz_config import CONFIG
from test_fuzz_manifests import CSV, LINES

from multimac.wizard.answers import load_answers
from multimac.wizard.manifests import is_manifest
from multimac.wizard.models import options
from whisper_tuner.config import ConfigFile

ANSWERS = {"model": "demo", "data": "clips.csv", "split": True, "epochs": 3, "workers": ["10.0.0.2", "10.0.0.3"]}
INI = b"[answers]\nmodel = demo\ndata = clips.csv\nsplit = yes\nepochs = 3\nworkers = 10.0.0.2, 10.0.0.3\n"


@fuzz("config.ini, in the wizard", damaged(CONFIG), cost=5)
@example(data=CONFIG.replace(b"1e-4", b"much"))
@example(data=CONFIG.replace(b"= model", b"= " + b"m" * 300))
def test_the_models_of_a_config_file(folder: Path, data: bytes):
    (folder / "config.ini").write_bytes(data)
    outcome(lambda: options(ConfigFile(folder / "config.ini")), names="config.ini", of=data)


@fuzz("answers for the wizard", damaged_json(ANSWERS) | damaged(INI))
@example(data=b'{"epochs": ' + b"9" * 5000 + b"}")
@example(data=b"[" * 3000)
@example(data=b"model = demo\n")
def test_answers(folder: Path, data: bytes):
    (folder / "answers").write_bytes(data)
    answers = outcome(load_answers, folder / "answers", names=folder / "answers", of=data)
    assert answers is None or all(isinstance(text, str) for text in answers.values())


@fuzz("manifest, found by the wizard", damaged(CSV, LINES), cost=2)
@example(data=b'{"audio": ' + b"[" * 3000)
def test_any_file_may_be_found(folder: Path, data: bytes):
    for name in ("found.csv", "found.tsv", "found.jsonl"):
        (folder / name).write_bytes(data)
        assert outcome(is_manifest, folder / name) in (True, False)
