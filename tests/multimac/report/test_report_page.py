"""The page of runs that were made by hand: whatever a run lacks, and whatever is written in its texts."""

from __future__ import annotations

import base64
import errno
import io
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import soundfile
from made_run import BEGUN, DATA, PROJECT, made

import cli_typer
from distributed.run_dir.events import UNNAMED
from distributed.run_dir.summary import read_run
from multimac.report import page as pages
from multimac.report.page import contents, html_of
from multimac.report.template import Private
from multimac.view.run_tables import facts
from whisper_tuner.errors import ExitStatus

__all__ = ["made"]

RECORDINGS = sorted((DATA / "test").glob("*.ogg"))[:4]
TEXTS = [("one two three", "one two four"), ("five six", "five six"), ("seven eight", "seven"), ("nine", "nine ten")]
VOID = {"meta", "line", "path", "br"}
INLINE = {"bdi", "code", "strong"}


class Page(HTMLParser):
    """What a reader sees, and every tag with its attributes. Each tag must be closed in its turn."""

    def __init__(self, text: str):
        super().__init__()
        self.source, self.words, self.tags, self._open = text, [], [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._part(tag)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert tag == self._open.pop(), f"</{tag}>"
        self._part(tag)

    def _part(self, tag):
        self.words += [] if tag in INLINE else [" "]

    def handle_data(self, text):
        if "style" not in self._open:
            self.words.append(text)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(run: Path, **about) -> Page:
    return Page(html_of(contents(run, **about)))


def test_a_finished_run(made):
    made.begin(commit="0123456789abcdef0123456789abcdef01234567")
    made.steps(range(1, 11), validate=5)
    made.end()
    made.manifest([{"audio": "x.wav", "text": "one"}])
    for model, texts in (("base", [(said, "-") for said, _ in TEXTS]), ("final", TEXTS)):
        made.measured(model, texts, audio=RECORDINGS)
    page = page_of(made.write(epochs=7, batch_size=8))
    assert "The run has finished. It trained 10 of 10 steps." in page.text
    assert "112.5 → 37.5" not in page.text and "100.0 → 37.5" in page.text
    assert "training train.csv 2 0.1 min" in page.text and "test test.csv 4 0.2 min" in page.text
    assert re.search(r"epochs 7 5 passes.*batch_size 8 8 clips", page.text)
    assert "100.0 → 37.5 -62.5 points (4 clips): too few clips" in page.text
    assert "With so few clips, take" in page.text and f"WER is in per cent, after {UNNAMED}." in page.text
    assert "localhost mps (Apple M2) 40 100 % 8.0" in page.text
    assert "None. No host was lost" in page.text and "commit of this program 0123456789ab" in page.text
    assert [re.sub(r"^.*?: ", "", svg["aria-label"])[:45] for svg in page.all("svg")] == [
        "Loss by step. The training loss was 2.1 at st",
        "Learning rate by step. The learning rate was ",
    ]
    assert "The validation loss was 0.7 at step 5 and 0.45 at step 10." in page.text


def test_the_step_of_the_model_and_the_lists_of_other_sets_are_told(made):
    made.begin()
    made.steps(range(1, 11), validate=5)
    made.tell("best", 99, step=10, best_step=5, loss=0.7, score=0.25)
    made.end()
    path = made.write(added={"/secret-home/english/train.csv": 1})
    page = page_of(path)
    best = "the model is that of step 5, validation loss 0.700, WER 25.0 (keep_best)"
    assert f"It trained 10 of 10 steps. T{best[1:]}." in page.text
    assert "training train.csv 1 0.1 min" in page.text and "training english/train.csv 1 0.1 min" in page.text
    assert dict(facts(read_run(path), None))["best"] == best


def test_nothing_is_fetched_and_nothing_runs(made):
    made.begin()
    made.steps([1])
    made.end()
    made.measured("final", TEXTS, audio=RECORDINGS)
    page = page_of(made.write())
    assert not {"script", "link", "img", "iframe", "a", "object"} & {tag for tag, _ in page.tags}
    addresses = [value for _, about in page.tags for name, value in about.items() if name in ("src", "href", "srcset")]
    assert len(addresses) == 3 and all(address.startswith("data:audio/") for address in addresses)
    assert "url(" not in page.source and "@import" not in page.source
    [rule] = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert rule.startswith("default-src 'none';") and "script" not in rule


EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;{{ 7 * 1111111 }}"


def test_texts_are_escaped_wherever_they_come_from(made):
    hosts = [EVIL, "b"]
    made.begin(hosts)
    made.steps([1, 2], hosts)
    made.tell("warning", 5, host=EVIL, what=EVIL)
    made.tell("end", 9, status=1, message=EVIL)
    texts = [(EVIL, f"{EVIL} more"), ("שלום עולם", "שלום")]
    made.manifest([{"id": f"clip-{n}", "audio": "x", "text": "x", "speaker": EVIL, "language": "he"} for n in range(2)])
    made.measured("final", texts, audio=RECORDINGS)
    page = page_of(made.write(name=EVIL, hosts=hosts, language=EVIL, lora_targets=[EVIL]))
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, about in page.tags for name in about)
    # The name in the title, the head and the facts; hosts, warning, end and texts.
    assert page.text.count(EVIL) > 10 and "7777777" not in page.text
    words = [about for about in page.all("div") if about.get("class") == "words"]
    assert [(about["dir"], about["lang"]) for about in words] == [("auto", "he")] * 2


def test_no_folder_of_the_machine_is_named(made):
    made.begin()
    made.steps([1])
    made.tell(
        "lost", 2, host="h", reason=f"{made.data}/my clips/x.wav: no such file; see /var/log/a b/c.log", given_up=False
    )
    made.tell("warning", 3, what="'/Users/anna smith/x.wav' and ~anna/y.wav cannot be read: [Errno 5] I/O error")
    made.tell("end", 4, status=1, message=f"{made.path}/launcher.log has more")
    made.manifest([{"audio": str(RECORDINGS[0]), "text": "one"}])
    made.measured("final", TEXTS, audio=RECORDINGS)
    made.measured("final", TEXTS, data=re.sub(r"\W+", "-", str(made.data)).strip("-") + "-other")
    run = made.write(runs_dir="/Users/anna/runs")
    (run / "data-problems.csv").write_text(f"manifest,line,kind,what\n{made.data}/train.csv,3,empty text,x\n")
    page = page_of(run)
    for secret in ("secret-home", "/Users", "anna", "/var", str(PROJECT), str(Path.home()), "my clips"):
        assert secret not in page.source, secret
    for kept in ("x.wav: no such file", "c.log", "I/O error", "launcher.log has more", "base", "other: 4 clips"):
        assert kept in page.text
    assert "Rows of train.csv that could not be used: 1 empty text." in page.text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/clips is gone", "clips is gone"),
        ("1/2 of and/or https://a.org/b/c.html", "1/2 of and/or https://a.org/b/c.html"),
        ("see /a/b c/d.txt, then /e/f", "see d.txt, then f"),
        ("openai/whisper-small </b>", "openai/whisper-small </b>"),
        ("(~/x/y.wav)", "(y.wav)"),
    ],
)
def test_paths_become_names(text, left):
    assert Private().text(text) == left


def test_a_run_without_test_set_validation_or_more_than_one_step(made):
    made.begin(total=1)
    made.steps([1])
    made.end()
    page = page_of(made.write())
    assert "The run has no validation set." in page.text and "1 of 1 step." in page.text
    assert "the run has no test set" in page.text and "pass it on with care" not in page.text
    assert "multimac evaluate 20260101-000000-mine --data test.csv" in page.text
    dots = [about for about in page.all("path") if "dot" in about["class"]]
    assert [about["d"] for about in dots] == ["M500 500h0"] * 2


def test_a_run_that_was_never_begun(made):
    run = made.write()
    shutil.rmtree(run / "final")
    page = page_of(run)
    assert "No step was recorded." in page.text and "There is no model yet." in page.text
    assert "WER was not measured." in page.text


def test_an_interrupted_run_says_so_and_how_to_go_on(made):
    made.begin()
    made.steps([1, 2])
    made.tell("end", 9, status=130, message="stopped at once\n  Go on with: multimac finetune --resume x")
    run = made.write()
    shutil.rmtree(run / "final")
    (run / "checkpoints" / "0000001").mkdir(parents=True)
    (run / "checkpoints" / "0000001" / "a.json").write_text("{}")
    page = page_of(run)
    assert "The run was interrupted. It had trained 2 of 10 steps. The reason: stopped at once" in page.text
    assert "multimac finetune --resume 20260101-000000-mine" in page.text


def test_curves_have_a_gap_where_a_run_was_resumed(made):
    made.begin()
    made.steps(range(1, 6))
    made.tell("end", 50, status=130, message="stopped as asked")
    made.begin(at=90)
    made.tell("resume", 91, host="localhost", step=3, round=1, epoch=0)
    made.steps(range(4, 11))
    made.end()
    page = page_of(made.write())
    assert "It went on with step 4." in page.text and "It was begun 2 times" in page.text
    drawn = [about["d"] for about in page.all("path") if about["class"] == "training"]
    assert [path.count("L") for path in drawn] == [2, 6]
    assert "stopped as asked" in page.text and "the run is started again" in page.text
    assert "resumes after step 3" in page.text


def test_a_run_that_was_recovered(made):
    run = made.write()
    spec = '{"profile": {"base_model": "openai/whisper-tiny", "method": "lora"}, "strategy": "diloco"}'
    for name in ("run.json", "events.jsonl", "train.csv"):
        (run / name).unlink()
    (run / "recovered" / "h1").mkdir(parents=True)
    (run / "recovered" / "h1" / "h1.spec.json").write_text(spec)
    page = page_of(run)
    assert "The model was built from a host's checkpoint, by `runs recover`." in page.text
    assert "base model openai/whisper-tiny" in page.text and "No step was recorded." in page.text


def test_eight_hosts_and_what_became_of_them(made):
    hosts = [f"mac-{number}.local" for number in range(8)]
    made.begin(hosts)
    made.steps(range(1, 11), hosts)
    for at in (20, 60):
        made.tell("lost", at, host=hosts[3], reason="asleep", given_up=False)
        made.tell("back", at + 30, host=hosts[3])
    made.tell("lost", 95, host=hosts[4], reason="gone", given_up=True)
    for at, about in ((30, {}), (55, {"found": True})):  # left out while it was lost, and found
        made.tell("lost" if at == 30 else "away", at, host=hosts[6], reason="asked", given_up=False, **about)
    for at, kind in ((50, "lost"), (70, "resume")):  # it comes back as another worker
        made.tell(kind, at, host=hosts[5], step=5, round=1, epoch=0, reason="killed", given_up=False)
    made.tell("generation", 96, number=2, hosts=[host for host in hosts if host != hosts[4]])
    made.end()
    page = page_of(made.write(hosts=hosts))
    shares = [float(share) for share in re.findall(r"mps \(Apple M2\) \d+ (\d+) %", page.text)]
    assert len(shares) == 8 and sum(shares) == pytest.approx(100, abs=4)
    assert "mac-3.local mps (Apple M2) 70 12 % 14.0 2 times, for 1:00 in all" in page.text
    assert page.text.count("once, not back") == 1 and "once, for 0:20" in page.text and "once, for 0:25" in page.text
    assert "once, not back" in page.text and "mac-3.local is back" in page.text
    assert "mac-4.local is lost and not tried again: gone" in page.text and "training continues with" in page.text


def test_many_faults_are_cut_short(made):
    made.begin()
    made.steps([1])
    for number in range(500):
        made.tell("warning", number, what=f"warning number {number}")
    made.end()
    page = page_of(made.write())
    assert "warning number 300" in page.text and "warning number 299" not in page.text
    assert "300 lines before these are left out." in page.text


def test_no_errors_at_all(made):
    made.begin()
    made.steps([1])
    made.end()
    same = [(said, said) for said, _ in TEXTS]
    made.measured("base", same)
    made.measured("final", same)
    page = page_of(made.write())
    assert "There is no error in any clip." in page.text and not page.all("audio")
    assert "The change from before to after training: +0.0 points (4 clips): too few clips." in page.text


def test_a_difference_that_may_be_chance_is_called_so(made):
    made.measured("base", [("one two three four", "one two three x")] * 3 + [("five six", "five six")] * 3)
    made.measured(
        "final",
        [("one two three four", "one two three four"), *[("one two three four", "one two x x")] * 2]
        + [("five six", "five six")] * 3,
    )
    page = page_of(made.write())
    change = r"\+5\.\d points \(95 %: -\d.* to \+\d.*, 6 clips\): may be chance"
    assert re.search(rf"→ \d+\.\d {change} Word error rate", page.text)  # the headline
    assert re.search(f"The change from before to after training: {change}", page.text)


def test_other_test_sets_and_models_measured_on_other_clips(made):
    made.manifest([{"audio": "x", "text": "x"}])
    made.measured("base", TEXTS[:2])
    made.measured("final", TEXTS)
    made.measured("final-cropped", TEXTS)
    made.measured("final-fr", TEXTS)  # texts compared as another language: what is said of them was printed then
    made.measured("checkpoint-5", TEXTS, data="holiday")
    page = page_of(made.write())
    assert "The two models were measured on different clips." in page.text
    assert "final-fr" not in page.text
    assert "Here the audio was cropped" in page.text and "holiday: 4 clips" in page.text
    assert "checkpoint-5 37.5" in page.text
    assert page.text.index("test.csv: 4 clips") < page.text.index("holiday: 4 clips")


def test_rates_whose_predictions_are_gone(made):
    made.manifest([{"audio": "x", "text": "x"}])
    made.begin()
    made.steps([1])
    for when, wer in (("before", 50.0), ("after", 25.0)):
        made.tell("evaluation", 20, when=when, wer=wer, normalizer="whisper-basic 0.1.15")
    made.end()
    page = page_of(made.write())
    assert (
        "50.0 → 25.0" in page.text
        and "on test.csv, after whisper-basic 0.1.15." in page.text
        and "is not here any more" in page.text
    )
    assert "multimac evaluate 20260101-000000-mine && multimac report" in page.text


def test_what_an_earlier_model_was_measured_at_is_called_so(made):
    made.begin()
    made.steps([1])
    made.end()
    for model in ("base", "final"):
        made.measured(model, TEXTS)
    run, note = made.write(), "Some of this was measured before the run was resumed"
    assert note not in page_of(run).text
    os.utime(run / "evaluation" / "test" / "final" / "predictions.csv", (BEGUN, BEGUN))
    assert note in page_of(run).text


def test_a_damaged_list_of_predictions_costs_its_rows_alone(made):
    made.measured("final", TEXTS)
    path = made.path / "evaluation" / "test" / "final" / "predictions.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "clip,with,too,few", lines[3].replace("2.500", "long"), lines[4]]) + "\n")
    assert "test: 2 clips" in page_of(made.write()).text
    path.write_bytes(b"\xff\xfe\x00")
    assert "WER was not measured" in page_of(made.write()).text


def test_speakers_are_told_apart(made):
    speakers = ["Anna", "Ben", "Anna", ""]
    rows = [{"id": f"clip-{n}", "audio": "x", "text": "x", "speaker": name} for n, name in enumerate(speakers)]
    made.manifest(rows)
    for model, texts in (("base", [(said, "-") for said, _ in TEXTS]), ("final", TEXTS)):
        made.measured(model, texts)
    page = page_of(made.write())
    assert (
        "not named 1 100.0 100.0" in page.text and "Anna 2 100.0 40.0" in page.text and "Ben 1 100.0 0.0" in page.text
    )


def test_recordings_are_small_and_can_be_played(made):
    made.measured("final", TEXTS, audio=RECORDINGS)
    page = page_of(made.write())
    assert "pass it on with care" in page.text
    recordings = [base64.b64decode(audio["src"].partition("base64,")[2]) for audio in page.all("audio")]
    assert len(recordings) == 3
    for content in recordings:
        samples, rate = soundfile.read(io.BytesIO(content))
        assert rate == 16_000 and samples.ndim == 1 and abs(samples).max() > 0.05 and len(content) < 30_000


def test_sound_has_a_limit_and_the_page_says_what_was_left_out(made):
    missing = made.data / "gone.wav"
    damaged = made.data / "damaged.wav"
    damaged.write_bytes(b"RIFF")
    texts = [("one", "two")] * 25
    audio = [missing, damaged, *RECORDINGS, *[RECORDINGS[0]] * 19]
    made.measured("final", texts, audio=audio)
    page = page_of(made.write(), sound=60_000)
    sound = sum(len(audio["src"]) for audio in page.all("audio"))
    assert 0 < sound <= 60_000
    assert page.text.count("WER 100 %") == 20 and "5 more clips have errors." in page.text
    assert "The recording is not here any more." in page.text and "The recording cannot be read." in page.text
    assert "the page would become too large" in page.text
    assert f"{20 - len(page.all('audio'))} of these clips have no player." in page.text


def test_a_long_run_gives_a_small_page_soon(made):
    made.begin(total=20_000)
    made.steps(range(1, 20_001), validate=50)
    made.end()
    run = made.write()
    started = time.process_time()  # whatever else the machine does
    page = page_of(run)
    assert time.process_time() - started < 10
    assert len(page.source) < 200_000 and "a point is the mean of up to 50 steps" in page.text
    assert all(about["d"].count("L") <= 400 for about in page.all("path"))


def test_the_command_writes_it_where_it_is_told(made, monkeypatch, capsys):
    made.begin()
    made.steps([1])
    made.end()
    run = made.write()
    monkeypatch.chdir(run.parents[1])
    assert cli_typer.main(["report", "last"]) == 0
    assert capsys.readouterr().out == f"report: runs/{run.name}/report.html\n"
    assert cli_typer.main(["report", "2026", "--out", "sub/page.html"]) == 0
    assert capsys.readouterr().out == "report: sub/page.html\n"
    assert Path("sub/page.html").read_text() and (run / "report.html").stat().st_mode & 0o777 == 0o600
    assert cli_typer.main(["report", "nothing"]) != 0
    assert "there is no run 'nothing'" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_told(made, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = made.write()
    monkeypatch.setattr(pages, "write_atomically", full)
    assert cli_typer.main(["report", str(run)]) == ExitStatus.RUN
    assert "report.html: No space left on device.\n  Free some space" in capsys.readouterr().err


def test_half_a_character_does_not_stop_the_page(made):
    made.begin()
    made.steps([1])
    made.tell("warning", 1, what="a name \ud800 of half a character")
    made.end()
    assert pages.write_report(contents(made.write())).read_text(encoding="utf-8")


def test_the_command_does_not_load_torch(made):
    made.begin()
    made.steps([1])
    made.end()
    made.measured("final", TEXTS, audio=RECORDINGS)
    watch = "import sys, cli_typer; cli_typer.main(sys.argv[1:]); print({'torch', 'paramiko'} & set(sys.modules))"
    command = [sys.executable, "-c", watch, "report", str(made.write())]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stdout + done.stderr


def test_all_that_a_page_is_made_of_is_installed():
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folder = PROJECT / "multimac" / "report"
    others = {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert set(settings["package-data"]["multimac.report"]) == others
