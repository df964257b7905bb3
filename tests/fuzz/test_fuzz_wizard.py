"""Files that the wizard reads: answers, manifests that it finds, the models of config.ini."""

from __future__ import annotations

import json
from pathlib import Path

from damage import damaged, damaged_json
from fuzzing import fuzz, outcome, parsed
from hypothesis import example
from test_fuzz_config import CONFIG
from test_fuzz_manifests import CSV, LINES

from multimac.wizard.model import offered, options
from multimac.wizard.questions import KEYS, load_answers, write_answers
from whisper_tuner.config import ConfigFile
from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.data.formats.lists import is_list
from whisper_tuner.errors import DataError

ANSWERS = {"model": "demo", "data": "clips.csv", "split": True, "epochs": 3, "workers": ["10.0.0.2", "10.0.0.3"]}
INI = b"[answers]\nmodel = demo\ndata = clips.csv\nsplit = yes\nepochs = 3\nworkers = 10.0.0.2, 10.0.0.3\n"


@fuzz("config.ini, in the wizard", damaged(CONFIG), cost=5)
@example(data=CONFIG.replace(b"1e-4", b"much"))
@example(data=CONFIG.replace(b"= model", b"= " + b"m" * 300))
def test_the_models_of_a_config_file(folder: Path, data: bytes):
    """Every model of the file is offered, and the published ones besides; each can be told from the others."""
    (folder / "config.ini").write_bytes(data)
    found = outcome(lambda: options(offered(ConfigFile(folder / "config.ini"))), names="config.ini", of=data)
    if found is None:
        assert data != CONFIG
        return
    values = [option.value for option in found]
    assert len(set(values)) == len(values) and all(option.title.strip() for option in found)
    assert set(ConfigFile(folder / "config.ini").names("model")) <= set(values)
    assert sum(value.startswith("openai/whisper-") for value in values) >= 5


@fuzz("answers for the wizard", damaged_json(ANSWERS) | damaged(INI))
@example(data=b'{"epochs": ' + b"9" * 5000 + b"}")
@example(data=b"[" * 3000)
@example(data=b"model = demo\n")
@example(data=b'{"model": "\\ud800"}')
def test_answers(folder: Path, data: bytes):
    (folder / "answers").write_bytes(data)
    answers = outcome(load_answers, folder / "answers", names=folder / "answers", of=data)
    if answers is None:
        assert data not in (INI, json.dumps(ANSWERS).encode())
        return
    assert set(answers) <= set(KEYS) and all(isinstance(text, str) for text in answers.values())
    document = parsed(data.decode("utf-8-sig"))
    if isinstance(document, dict):
        written = {True: "yes", False: "no"}
        plain = {key: ", ".join(value) if isinstance(value, list) else value for key, value in document.items()}
        assert answers == {k: written[v] if isinstance(v, bool) else str(v) for k, v in plain.items()}
    else:
        text = data.decode("utf-8-sig")
        assert all(" ".join(key.split()) in text for key in answers)
        whole = [line.split(" = ") for line in INI.decode().splitlines()[1:]]
        assert data != INI or answers == dict(whole)
    write_answers(folder / "again.json", answers)
    assert load_answers(folder / "again.json") == answers


@fuzz("manifest, found by the wizard", damaged(CSV, LINES), cost=2)
@example(data=b'{"audio": ' + b"[" * 3000)
def test_any_file_may_be_found(folder: Path, data: bytes):
    """What is offered has the columns that a manifest needs; the reader of manifests never says that one is missing."""
    for name in ("found.csv", "found.tsv", "found.jsonl"):
        (folder / name).write_bytes(data)
        offered = outcome(is_list, folder / name)
        first = data.split(b"\n")[0]
        if first in (CSV.split(b"\n")[0], LINES.split(b"\n")[0]):
            assert offered == ((name == "found.jsonl") == (first != CSV.split(b"\n")[0]))
        if offered:
            try:
                load_manifest(folder / name, check_audio=False)
            except DataError as error:
                assert "has no" not in str(error), error
