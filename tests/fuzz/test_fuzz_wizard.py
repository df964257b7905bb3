"""Files that the wizard reads: answers, manifests that it finds, the models of config.ini."""

from __future__ import annotations

from pathlib import Path

from damage import damaged
from fuzzing import fuzz, outcome
from hypothesis import example
from test_fuzz_config import CONFIG

from distributed.wizard.models import options
from whisper_tuner.config import ConfigFile

ANSWERS = {"model": "demo", "data": "clips.csv", "split": True, "epochs": 3, "workers": ["10.0.0.2", "10.0.0.3"]}
INI = b"[answers]\nmodel = demo\ndata = clips.csv\nsplit = yes\nepochs = 3\nworkers = 10.0.0.2, 10.0.0.3\n"


@fuzz("config.ini, in the wizard", damaged(CONFIG), cost=5)
@example(data=CONFIG.replace(b"1e-4", b"much"))
@example(data=CONFIG.replace(b"= model", b"= " + b"m" * 300))
def test_the_models_of_a_config_file(folder: Path, data: bytes):
    (folder / "config.ini").write_bytes(data)
    outcome(lambda: options(ConfigFile(folder / "config.ini")), names="config.ini", of=data)
