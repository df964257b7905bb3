"""`export` as a user calls it, on the bundled model and a run that was trained from it."""

import csv
import importlib.util
import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import WhisperForConditionalGeneration

import cli_typer
from distributed.run_dir.events import UNNAMED
from whisper_tuner.eval.predictions import COLUMNS
from whisper_tuner.export.final import save_final
from whisper_tuner.export.formats import Speech, formats
from whisper_tuner.model.base_model import load_base

PROJECT = Path(__file__).parents[3]
MODEL, DATA = PROJECT / "bundled" / "model", PROJECT / "bundled" / "data"
RUN = "20260101-000000-mine"


@pytest.fixture
def run_folder(tmp_path, monkeypatch) -> Path:
    """A run's folder as training leaves it, with an adapter that changes nothing, and 3 test clips."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    folder = tmp_path / "runs" / RUN
    folder.mkdir(parents=True)
    model, processor = load_base(MODEL)
    adapter = get_peft_model(model, LoraConfig(task_type=None, r=2, target_modules=["q_proj"]))
    save_final(adapter, processor, folder / "final", MODEL)
    with (DATA / "test.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))[:3]
    lines = [f'{r["id"]},{DATA / r["audio_path"]},"{r["transcription"]}",{r["duration_s"]}' for r in rows]
    for name in ("test.csv", "train.csv"):
        (folder / name).write_text("\n".join(["id,audio_path,transcription,duration_s", *lines]) + "\n")
    profile = {"base_model": "org/base", "language": "", "task": "transcribe", "method": "lora"}
    ranks = [{"label": host, "spec": {"profile": profile, "strategy": "diloco"}} for host in ("a", "b")]
    asked = {"name": "mine", "ranks": ranks, "test": str(folder / "test.csv")}
    (folder / "run.json").write_text(json.dumps(asked))
    for name, errors in (("base", 2), ("final", 1)):
        tested = folder / "evaluation" / "test" / name
        tested.mkdir(parents=True)
        said = {"id": "a", "audio": "a.wav", "reference_normalized": "one two three", "substitutions": errors}
        row = dict.fromkeys(COLUMNS, "") | dict.fromkeys(("wer", "duration_s", "deletions", "insertions"), 0) | said
        with (tested / "predictions.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([row.keys(), *[row.values()] * 3])
    events = [{"type": "evaluation", "when": w, "wer": r, "time": 1.0} for w, r in (("before", 66.7), ("after", 33.3))]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_a_run_is_exported_merged_verified_and_described(run_folder, capsys):
    assert cli_typer.main(["export", RUN[:8], "--to", "transformers", "--precision", "float16", "--verify"]) == 0
    said = capsys.readouterr().out
    folder = run_folder / "export" / "transformers-float16"
    assert f"transformers float16: runs/{RUN}/export/transformers-float16, " in said
    rows = [line for line in said.splitlines() if "before the export" in line or "transformers float16 " in line]
    assert len(rows) == 2 and "+0.0" in rows[1] and "in float16" in said
    assert "decoded greedily, as the runtimes do" in " ".join(said.split())
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    assert not any("lora" in name for name, _ in model.named_parameters())
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n") and 'base_model: "org/base"' in card
    assert "| training data | 3 clips, 0.00 hours |" in card and "LoRA, merged" in card
    assert "| WER of the base model | 66.7 (66.7 to 66.7) |" in card and "| WER of this model | 33.3" in card
    assert f"after {UNNAMED}" in card and f"WER after whisper-english {version('whisper-normalizer')}" in said
    assert 'model="transformers-float16"' in card


@pytest.mark.parametrize("width", ["40", "80"])
def test_no_word_of_the_table_is_broken(run_folder, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    assert cli_typer.main(["export", RUN[:8], "--to", "transformers", "--verify"]) == 0
    said = capsys.readouterr().out
    assert "transformers" in said.split("before")[1] and all(word in said for word in ("export", "float32", "points"))


@pytest.mark.slow
def test_folders_and_figures_as_json(run_folder, capsys):
    formats = ["--to", "transformers", "--precision", "float16"]
    assert cli_typer.main(["export", RUN[:8], *formats, "--verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["clips"] == 3 and found["data"].endswith("test.csv")
    [one] = found["exports"]
    assert (one["to"], one["precision"], one["points_more"]) == ("transformers", "float16", 0.0)
    assert Path(one["folder"]).is_dir() and one["bytes"] > 1000 and one["speed"] > 0
    assert one["wer"] == found["before"]["wer"] == found["before in float16"]["wer"]
    low, high = one["wer_interval"]
    assert low <= one["wer"] <= high
    assert cli_typer.main(["export", RUN[:8], *formats, "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)] == ["exports"]


def test_an_export_replaces_an_earlier_one_and_goes_where_it_is_told(run_folder, tmp_path, capsys):
    for _ in range(2):
        assert cli_typer.main(["export", f"runs/{RUN}/final", "--to", "transformers", "--out", "there"]) == 0
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"transformers-float32"}
    assert cli_typer.main(["export", str(MODEL), "--to", "transformers"]) == 0
    [found] = (tmp_path / "export").iterdir()
    assert (found / "transformers-float32" / "README.md").read_text().count("WER") == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["last", "--to", "whisper.cpp"], 4, "whisper.cpp cannot use a model with"),
        ([str(MODEL), "--to", "transformers", "--verify"], 3, "nothing to verify with"),
        (["last", "--to", "transformers", "--out", "test.txt"], 3, "test.txt: Not a directory"),
    ],
)
def test_what_cannot_be_exported_is_told(run_folder, tmp_path, capsys, arguments, status, message):
    (tmp_path / "test.txt").write_text("")
    assert cli_typer.main(["export", *arguments]) == status
    assert message in capsys.readouterr().err
    assert not (run_folder / "export").exists() or not list((run_folder / "export").iterdir())


def test_a_runtime_that_hears_something_else_is_an_error(run_folder, capsys, monkeypatch):
    monkeypatch.setattr("whisper_tuner.eval.exported.decoded", other_words)
    assert cli_typer.main(["export", "last", "--to", "transformers", "--verify"]) == 6
    told = capsys.readouterr()
    assert "transformers float32 by +" in told.err and "before the export" in told.out


@pytest.mark.parametrize("others", [[], pytest.param(["transformers"], marks=pytest.mark.slow)], ids=["", "others"])
def test_without_a_runtime_the_model_is_written_and_the_others_are_verified(run_folder, capsys, monkeypatch, others):
    found = importlib.util.find_spec
    absent = "faster_whisper"
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == absent else found(name, *more))
    formats = [word for name in ["faster-whisper", *others] for word in ("--to", name)]
    assert cli_typer.main(["export", "last", *formats, "--precision", "float32", "--verify"]) == 3
    told = capsys.readouterr()
    written = {f"{name}-float32" for name in ["faster-whisper", *others]}
    assert {path.name for path in (run_folder / "export").iterdir()} == written
    assert sum("+0.0" in line for line in told.out.splitlines()) == len(others)
    *_, what, remedy = told.err.splitlines()
    assert (
        f"error: written, but not verified: faster-whisper needs Python packages that are not installed here: {absent}"
        in what
    )
    assert "pip install -e '.[faster-whisper]'" in remedy


def other_words(which, folder, samples, speech, progress):
    from whisper_tuner.eval.evaluation import Transcript, compared

    return compared(samples, [Transcript("something else " * 20)] * len(samples), "en", 1.0)


def test_every_format_has_a_line_of_help_and_a_usage():
    for each in formats().values():
        shown = each.usage("my-folder", Speech(language="fr"), "float16", is_multilingual=True)
        assert "my-folder" in shown and re.search(r'[ "]fr\b', shown)
        assert "lang" not in each.usage("my-folder", Speech(language="en"), "float32", is_multilingual=False)
