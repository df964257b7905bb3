"""`evaluate` as a user calls it, on the bundled model and a few of its clips."""

import csv
import json
import re
import shutil
from dataclasses import asdict
from html import escape
from importlib.metadata import version
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from rich.text import Text

import cli_typer
from distributed.launcher.evaluate import evaluate_run
from distributed.plan.run_spec import RunSpec
from distributed.run_dir.summary import FINISHED, INTERRUPTED, NOT_EVALUATED, read_run
from multimac.report.measured import card
from multimac.view.error_rates import candidates, labels, side_by_side
from whisper_tuner.config import ConfigFile, Profile
from whisper_tuner.errors import ExitStatus
from whisper_tuner.eval.evaluation import Transcript, compared
from whisper_tuner.eval.terms import TermCount, read_counts
from whisper_tuner.export import final
from whisper_tuner.export.final import save_final
from whisper_tuner.fact_store import CACHE
from whisper_tuner.model.base_model import load_base

PROJECT = Path(__file__).parents[3]
MODEL, DATA = PROJECT / "bundled" / "model", PROJECT / "bundled" / "data"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("multimac.commands.evaluate.CACHE", tmp_path / "cache")


@pytest.fixture
def few(tmp_path) -> Path:
    """Three clips of the bundled test set."""
    return shortened(tmp_path / "few.csv", DATA / "test.csv", slice(0, 3))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A run's folder as training leaves it, with an adapter that changes nothing."""
    folder = tmp_path_factory.mktemp("runs") / "20260101-000000-mine"
    folder.mkdir()
    model, processor = load_base(MODEL)
    adapter = get_peft_model(model, LoraConfig(task_type=None, r=2, target_modules=["q_proj"]))
    save_final(adapter, processor, folder / "final", MODEL)
    profile = {"base_model": str(MODEL), "language": "", "task": "transcribe"}
    (folder / "run.json").write_text(run_json(profile, test=str(folder / "own-test.csv")))
    shortened(folder / "own-test.csv", DATA / "test.csv", slice(3, 5))
    return folder


def run_json(profile: dict, **more: str) -> str:
    rank = {"label": "localhost", "spec": {"profile": profile, "strategy": "allreduce"}}
    return json.dumps({"name": "mine", "ranks": [rank], **more})


def shortened(path: Path, source: Path, which: slice) -> Path:
    with source.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))[which]
    lines = ["id,audio,text", *(f'{r["id"]},{source.parent / r["audio_path"]},"{r["transcription"]}"' for r in rows)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_several_models_on_several_sets_the_base_first(run_folder, few, capsys, tmp_path):
    other = shortened(tmp_path / "other.csv", DATA / "train.csv", slice(0, 2))
    status = cli_typer.main(["evaluate", str(run_folder / "final"), "--data", str(few), "--data", str(other), "--json"])
    said = capsys.readouterr()
    assert status == 0, said.err
    records = json.loads(said.out)
    assert [(r["data"], r["base"]) for r in records] == [
        (str(few), True),
        (str(few), False),
        (str(other), True),
        (str(other), False),
    ]
    assert records[0]["model"] == str(MODEL) and records[0]["clips"] == 3 and records[0]["speed"] > 0
    assert [r["wer"] for r in records[::2]] == [r["wer"] for r in records[1::2]]  # the adapter changes nothing
    names = [Path(r["predictions"]).relative_to(run_folder) for r in records]
    assert [str(name.parent) for name in names] == [
        f"evaluation/{data}/{model}" for data in ("few", "other") for model in ("base", "final")
    ]
    with Path(records[0]["predictions"]).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["test-000", "test-001", "test-002"]
    errors = sum(int(row[name]) for row in rows for name in ("substitutions", "deletions", "insertions"))
    words = sum(len(row["reference_normalized"].split()) for row in rows)
    assert records[0]["wer"] == pytest.approx(100 * errors / words, abs=0.01)
    names = [f"whisper-english {version('whisper-normalizer')}", "multimac-unicode 1"]
    assert [records[0]["normalizer"], records[0]["normalizer_other"]] == names
    assert {row["normalizer"] for row in rows} == {names[0]}
    low, high = records[0]["wer_interval"]
    assert low <= records[0]["wer"] <= high
    assert [record.get("against") for record in records[::2]] == [None, None]
    same = {"model": str(MODEL), "points": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    assert [record["against"] for record in records[1::2]] == [same, same]


def test_clips_that_a_model_was_trained_on_are_counted_and_another_language_is_another_way(
    run_folder, few, capsys, tmp_path
):
    run_folder = shutil.copytree(run_folder, tmp_path / run_folder.name, ignore=shutil.ignore_patterns("evaluation"))
    clips = few.read_text().splitlines()[1:]
    lines = [f"{number},{(few.parent / row.split(',')[1]).resolve()},x,1" for number, row in enumerate(clips[:2])]
    (run_folder / "train.csv").write_text("\n".join(["id,audio_path,transcription,duration_s", *lines]) + "\n")
    assert cli_typer.main(["evaluate", str(run_folder / "final"), "--data", str(few), "--language", "fr"]) == 0
    said = capsys.readouterr().out
    assert "was trained on 2 of the 3 clips of few.csv" in said
    assert {path.parent.name for path in run_folder.glob("evaluation/few/*/predictions.csv")} == {"base-fr", "final-fr"}


def test_two_models_are_compared_in_words(run_folder, few, capsys):
    assert cli_typer.main(["evaluate", str(run_folder / "final"), "--data", str(few)]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"final against \S+ \(base\), on few\.csv:\n  WER (\S+) -> \1: \+0\.0 points \(3 clips\): too few", said
    )
    assert said.endswith(f"  multimac export {run_folder} --to transformers\n")


def test_a_model_without_a_run_takes_the_language_of_the_others_and_texts_of_two_normalisers_are_not_compared(
    run_folder, few, capsys, tmp_path
):
    runs = {}
    for language in ("fr", "en"):
        runs[language] = shutil.copytree(run_folder, tmp_path / language, ignore=shutil.ignore_patterns("evaluation"))
        profile = {"base_model": str(MODEL), "language": language, "task": "transcribe"}
        (runs[language] / "run.json").write_text(run_json(profile))
    of_french, of_english = (str(runs[language] / "final") for language in ("fr", "en"))
    ask = ["evaluate", of_french, str(MODEL), "--no-base", "--data", str(few), "--json"]
    assert cli_typer.main(ask) == 0
    records = json.loads(capsys.readouterr().out)
    assert len({record["normalizer"] for record in records}) == 1 and "against" in records[1]
    assert cli_typer.main([*ask, of_english]) == 0  # whose language should the plain one take?
    records = json.loads(capsys.readouterr().out)
    assert [record["normalizer"].split()[0] for record in records] == ["whisper-basic", *["whisper-english"] * 2]
    assert not any("against" in record for record in records)
    assert cli_typer.main(["evaluate", of_french, of_english, "--no-base", "--data", str(few)]) == 0
    said = capsys.readouterr().out
    assert f"{of_english} and {of_french} are not compared on few.csv: " in said and "--language" in said
    assert " -> " not in said and "points" not in said
    told = "Texts are compared as English and French, the language of the run. Is the test set in another?"
    assert told in " ".join(said.split())


def test_the_table_and_the_worst_rows(few, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert cli_typer.main(["evaluate", str(MODEL), "--data", few.name, "--worst", "1", "--out", "o"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("test set: few.csv: 3 clips, ") and said.count("said ") == said.count("heard ") == 1
    assert said.endswith(f"transcripts: predictions.csv in\n  {Path('o/few/bundled-model')}\n")
    table = said[said.rindex("few.csv:") : said.index("Wrong words (WER)")]
    assert said.index("heard  ") < said.index(table)  # figures last, where a terminal of few lines still shows them
    assert max(map(len, table.splitlines())) <= 60 and "…" not in table


def test_clips_in_doubt_are_named_and_both_figures_stand(few, capsys, monkeypatch):
    """The first loops at first, the second is empty, and far too much is heard of the third."""
    monkeypatch.setenv("COLUMNS", "120")

    def heard(model, processor, samples, **_):
        said, loop = [sample.text for sample in samples], "on and " * 40
        texts = [Transcript(said[0], temperature=0.4, greedy=loop), Transcript(""), Transcript(f"{said[2]} again " * 3)]
        return compared(samples, texts, "en", 1.0)

    monkeypatch.setattr("whisper_tuner.eval.evaluation.evaluate", heard)
    assert cli_typer.main(["evaluate", str(MODEL), "--data", str(few), "--out", "o"]) == 0
    said = capsys.readouterr().out
    for number, words in enumerate(("in doubt, so decoded again", "nothing was heard", "far more was heard than said")):
        [line] = [line for line in said.splitlines() if words in line]
        assert line.endswith(f": 1 clip (test-00{number})")
    basis = f"(WER) and letters (CER) in per cent, after whisper-english {version('whisper-normalizer')}; below WER its"
    assert basis in " ".join(said.split())
    assert cli_typer.main(["evaluate", str(MODEL), "--data", str(few), "--out", "o", "--json"]) == 0
    [record] = json.loads(capsys.readouterr().out)
    assert record["wer_greedy"] > 3 * record["wer"] and record["wer_other"] > 0
    assert record["normalizer_other"] == "multimac-unicode 1"


def test_greedy_figures_leave_the_usual_predictions_alone(few, capsys):
    ask = ["evaluate", str(MODEL), "--data", str(few), "--out", "o", "--json"]
    assert cli_typer.main(ask) == 0
    [usual] = json.loads(capsys.readouterr().out)
    assert cli_typer.main([*ask, "--no-fallback"]) == 0
    [greedy] = json.loads(capsys.readouterr().out)
    assert greedy["wer"] == greedy["wer_greedy"] == usual["wer_greedy"] and greedy["decoded_again"] == 0
    assert Path(usual["predictions"]).parent.name == "bundled-model"
    assert Path(greedy["predictions"]).parent.name == "bundled-model-greedy"


def test_a_run_brings_its_own_test_set_and_its_base_can_be_left_out(run_folder, capsys):
    assert cli_typer.main(["evaluate", str(run_folder / "final"), "--no-base", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["data"].endswith("own-test.csv") and record["clips"] == 2 and not record["base"]


@pytest.mark.parametrize("told_by", ["profile", "run"])
def test_translations_are_compared_as_english_words(run_folder, few, capsys, tmp_path, told_by):
    profile = {"base_model": str(MODEL), "language": "Japanese", "task": "translate", "train": str(few)}
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "final").symlink_to(MODEL)
    if told_by == "run":
        (folder / "run.json").write_text(run_json(profile))
        arguments = []
    else:
        keys = "".join(f"{key} = {value}\n" for key, value in profile.items())
        (tmp_path / "config.ini").write_text(f"[profile:mine]\n{keys}")
        arguments = ["--profile", "mine", "--config", str(tmp_path / "config.ini")]
    model = str(folder / "final")
    assert cli_typer.main(["evaluate", model, "--data", str(few), "--no-base", "--json", *arguments]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    with Path(record["predictions"]).open(encoding="utf-8", newline="") as file:
        row = next(csv.DictReader(file))
    assert len(row["reference_normalized"].split()) == len(row["reference"].split())


def test_the_base_is_found_from_the_adapter_and_not_added_twice(run_folder, tmp_path):
    lone = tmp_path / "adapter"
    (run_folder / "final").rename(lone)
    try:
        (lone / "adapter_config.json").write_text(
            json.dumps(json.loads((lone / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(MODEL)})
        )
        assert [(c.path, c.untouched) for c in candidates([str(lone)])] == [(str(MODEL), True), (str(lone), False)]
        assert [c.path for c in candidates([str(lone), str(MODEL)])] == [str(lone), str(MODEL)]
        assert [c.path for c in candidates([str(lone)], with_base=False)] == [str(lone)]
    finally:
        lone.rename(run_folder / "final")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["{model}", "--data", "{few}", "--data", "gone.csv"], 4, "no such manifest: gone.csv"),
        (["{model}", "--data", "fwe.csv"], 4, "no such manifest: fwe.csv, did you mean 'few.csv'?"),
        (["{model}", "--data", "{few}", "--data", "useless.csv"], 4, "no usable row"),
        (["{model}", "--data", "{few}", "--profile", "nobody"], 3, "config.ini"),
    ],
)
def test_mistakes_are_found_before_anything_is_evaluated(few, capsys, tmp_path, arguments, status, words):
    (tmp_path / "useless.csv").write_text("audio,text\ngone.wav,words\n")
    assert cli_typer.main(["evaluate", *(a.format(model=MODEL, few=few) for a in arguments)]) == status
    said = capsys.readouterr()
    assert words in said.err and "Traceback" not in said.err and "predictions.csv" not in said.out
    assert not (tmp_path / "evaluation").exists()


def test_a_lost_base_is_named_with_the_way_round(run_folder, few, capsys, tmp_path):
    launch = json.loads((run_folder / "run.json").read_text())
    moved = tmp_path / "run"
    moved.mkdir()
    (moved / "final").symlink_to(MODEL)
    launch["ranks"][0]["spec"]["profile"]["base_model"] = str(tmp_path / "gone")
    (moved / "run.json").write_text(json.dumps(launch))
    assert cli_typer.main(["evaluate", str(moved / "final"), "--data", str(few)]) == 4
    assert "--no-base" in capsys.readouterr().err


def test_what_an_unchanged_model_wrote_is_taken_from_the_cache(run_folder, few, capsys, monkeypatch):
    ask = ["evaluate", str(run_folder / "final"), "--data", str(few), "--json"]
    assert cli_typer.main(ask) == 0
    first = json.loads(capsys.readouterr().out)
    texts = [Path(record["predictions"]).read_text() for record in first]
    monkeypatch.setattr("whisper_tuner.eval.evaluation.evaluate", lambda *_, **__: pytest.fail("done again"))
    for record in first:
        Path(record["predictions"]).unlink()
    assert cli_typer.main(ask) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == [record | {"cached": True} for record in first] and not first[0]["cached"]
    assert [Path(record["predictions"]).read_text() for record in again] == texts
    assert cli_typer.main(ask[:-1]) == 0
    assert "cached" in capsys.readouterr().out


def test_cropped_audio_is_told_and_kept_apart(few, capsys, tmp_path):
    ask = ["evaluate", str(MODEL), "--data", str(few), "--out", "o"]
    assert cli_typer.main(ask) == 0
    usual = " ".join(capsys.readouterr().out.split())
    before = Path("o/few/bundled-model/predictions.csv").read_text()
    assert cli_typer.main([*ask, "--audio-context", "cropped"]) == 0
    cropped = " ".join(capsys.readouterr().out.split())
    assert "padded to 30 s" in usual and "cropped to" in cropped and "padded to 30 s" not in cropped
    assert Path("o/few/bundled-model/predictions.csv").read_text() == before
    assert Path("o/few/bundled-model-cropped/predictions.csv").exists()
    assert cli_typer.main([*ask, "--audio-context", "croped"]) == 3
    assert "cropped" in capsys.readouterr().err


def run_spec(run_folder, cache: Path) -> RunSpec:
    profile = ConfigFile(PROJECT / "config.ini").profile("demo")
    profile = Profile(base_model=profile.base_model, train=profile.train, device="cpu")
    return RunSpec(run_id="x", run_dir=str(run_folder), profile=profile, cache_dir=str(cache))


def test_a_second_run_takes_the_texts_of_its_base_from_the_cache(run_folder, few, tmp_path, monkeypatch):
    spec, events, loaded = run_spec(run_folder, tmp_path / "cache"), [], []
    monkeypatch.setattr(final, "load_base", lambda path: loaded.append(path) or load_base(path))
    evaluate_run(spec, few, events.append)
    assert loaded == [MODEL]  # the adapter was added to the base in memory
    figures = json.loads((run_folder / "wer.json").read_text())
    base = run_folder / "evaluation/few/base/predictions.csv"
    predicted = base.read_text()
    base.unlink()
    adapter = run_folder / "final" / "adapter_config.json"
    adapter.write_text(adapter.read_text() + "\n")  # another model, as far as its files tell
    evaluate_run(spec, few, events.append)
    assert [e["cached"] for e in events if e["type"] == "evaluation"] == [False, False, True, False]
    assert {e["model"] for e in events if e["type"] == "evaluating"} == {"before", "after"}
    assert json.loads((run_folder / "wer.json").read_text()) == figures and base.read_text() == predicted
    assert len(loaded) == 2


def test_a_run_writes_predictions_before_and_after(run_folder, few, tmp_path):
    spec = run_spec(run_folder, tmp_path / "cache")
    events = []
    evaluate_run(spec, few, events.append)
    figures = json.loads((run_folder / "wer.json").read_text())
    assert figures["before"]["wer"] == figures["after"]["wer"] and figures["before"]["clips"] == 3
    assert [e["when"] for e in events if e["type"] == "evaluation"] == ["before", "after"]
    for name in ("base", "final"):
        assert len((run_folder / f"evaluation/few/{name}/predictions.csv").read_text().splitlines()) == 4


def test_manifests_of_the_same_name_get_folders_of_their_own():
    assert labels([Path("/d/a.csv"), Path("/d/a.tsv")]) == {Path("/d/a.csv"): "d-a.csv", Path("/d/a.tsv"): "d-a.tsv"}
    assert labels([Path("/d/en/test.csv"), Path("/d/fr/test.csv"), Path("/d/x.csv")]) == {
        Path("/d/en/test.csv"): "d-en-test.csv",
        Path("/d/fr/test.csv"): "d-fr-test.csv",
        Path("/d/x.csv"): "x",
    }


def test_words_stand_under_each_other_and_long_rows_are_broken():
    said, heard = "turn off the nursery fan " * 8, "turn off a garden fan please " * 8
    lines = [line.plain for line in side_by_side(said, heard, width=60)]
    assert all(isinstance(line, Text) for line in side_by_side(said, heard, width=60))
    assert all(len(line) <= 60 for line in lines) and len(lines) > 3
    for reference, hypothesis in zip(lines[::3], lines[1::3], strict=False):
        place = reference.find("fan")
        assert place < 0 or hypothesis[place:].startswith(("fan", "***"))


def test_what_a_model_is_to_keep_and_its_terms_are_measured_and_told_everywhere(few, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("multimac.commands.evaluate.CACHE", CACHE)  # where the run keeps its texts
    shortened(tmp_path / "else.csv", DATA / "validation.csv", slice(0, 2))
    Path("config.ini").write_text(
        f"[dataset:elsewhere]\ntest = else.csv\n[profile:mine]\nbase_model = {MODEL}\ntrain = {DATA / 'train.csv'}\n"
        "validation =\ntest = few.csv\nkeeps = elsewhere\nterms = terms.txt\nmax_steps = 1\n"
        "learning_rate = 0.01\nnum_threads = 1\n"
    )
    Path("terms.txt").write_text("the\nzeppelin\n")  # one is said, the other never
    assert cli_typer.main(["finetune", "mine", "--config", "config.ini"]) == 0
    said = capsys.readouterr().out
    [folder] = Path("runs").iterdir()
    run = read_run(folder.absolute())
    [kept] = run.kept
    assert (kept.name, kept.clips) == ("elsewhere", 2) and kept.after != run.wer_after and run.clips_tested == 3
    assert f"WER on elsewhere: {kept.told}" in said and said.index("WER after") < said.index("WER on elsewhere before")
    assert json.loads((folder / "wer.json").read_text())["after"]["wer"] == run.wer_after
    page = (folder / "report.html").read_text()
    assert f"WER on <bdi>elsewhere</bdi>: {escape(kept.told)}" in page
    assert kept.told in card(run, language="en", runtime="transformers", precision="float32", usage="")
    [the, never] = read_counts(folder / "evaluation/few/final/terms.csv")
    assert the.said > 0 and never == TermCount(term="zeppelin") and the.in_training > 50
    assert f"terms: {run.terms}" in said and "% of those said are written (95 %: " in run.terms
    assert (
        f"Of {the.said} that were said, " in page
        and '<th scope="row"><bdi>the</bdi></th>' in page
        and "<bdi>zeppelin</bdi>" not in page
        and "Terms never said: zeppelin." in page
    )
    predictions = folder / "evaluation/keeps-elsewhere/final/predictions.csv"
    written = predictions.read_text()
    assert cli_typer.main(["evaluate", str(folder), "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    rates = [round(rate, 4) for rate in (run.wer_before, run.wer_after, kept.before, kept.after)]
    assert [record["wer"] for record in records] == rates and predictions.read_text() == written
    assert read_run(folder.absolute()).kept == run.kept
    assert records[1]["terms"]["counts"][0] == asdict(the)
    log = folder / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    ends = {"type": "end", "status": ExitStatus.INTERRUPTED, "message": NOT_EVALUATED, "time": events[-1]["time"]}
    before_kept = [event for event in events if event["type"] not in ("end", "terms", "report") and "kept" not in event]
    log.write_text("".join(json.dumps(event) + "\n" for event in [*before_kept, ends]))  # stopped amid its evaluation
    assert (read_run(folder.absolute()).state, read_run(folder.absolute()).kept) == (INTERRUPTED, ())
    assert cli_typer.main(["evaluate", str(folder)]) == 0
    again = read_run(folder.absolute())
    assert (again.state, again.kept, again.terms) == (FINISHED, run.kept, run.terms)
    assert f"WER on <bdi>elsewhere</bdi>: {escape(kept.told)}" in (folder / "report.html").read_text()
    assert "Terms never said in few.csv: zeppelin." in " ".join(capsys.readouterr().out.split())
    few.write_text("\n".join(few.read_text().splitlines()[:-1]))
    assert cli_typer.main(["evaluate", str(folder)]) == 0
    assert "few.csv: 2 of the 3 clips that the run was measured on: its WER stays" in capsys.readouterr().out
    again = read_run(folder.absolute())
    assert (again.clips_tested, again.wer_after) == (3, run.wer_after)
    with (folder / "evaluation/few/final-fewer/predictions.csv").open(encoding="utf-8", newline="") as file:
        assert len([*csv.DictReader(file)]) == 2


def test_another_list_of_the_same_name_leaves_the_transcripts_of_the_first(tmp_path):
    for name, count in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        shortened(tmp_path / name / "test.csv", DATA / "test.csv", slice(0, count))
        assert cli_typer.main(["evaluate", str(MODEL), "--data", str(tmp_path / name / "test.csv")]) == 0
    written = sorted((tmp_path / "evaluation").glob("*/*/predictions.csv"))
    assert [len(path.read_text().splitlines()) - 1 for path in written] in ([1, 2], [2, 1])
    assert cli_typer.main(["evaluate", str(MODEL), "--data", str(tmp_path / "a" / "test.csv")]) == 0
    assert sorted((tmp_path / "evaluation").glob("*/*/predictions.csv")) == written
