"""`runs list | show | compare | clean` on a run that was really trained, and on ones made from it by damage."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

import cli_typer
from distributed.run_dir.folder import is_running
from distributed.run_dir.log import EventLog, read_events, scan
from distributed.run_dir.summary import NOT_EVALUATED, read_run
from multimac.view.run_tables import facts
from whisper_tuner.errors import ExitStatus
from whisper_tuner.fact_store import FactStore

PROJECT = Path(__file__).parents[3]
DATA = PROJECT / "bundled" / "data"
CONFIG = f"""
[profile:tiny]
base_model = {PROJECT}/bundled/model
train = {DATA}/train.csv
validation = few.csv
test = few.csv
max_steps = 3
batch_size = 2
num_threads = 1
learning_rate = 3e-4
"""
HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


pytestmark = pytest.mark.xdist_group("a trained run")  # one process makes it, for all tests of this file


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of three steps of training, with WER before and after on two clips."""
    folder = tmp_path_factory.mktemp("trained")
    header, *rows = (DATA / "validation.csv").read_text().splitlines()[:3]
    rows = [row.replace(",validation/", f",{DATA}/validation/") for row in rows]
    (folder / "few.csv").write_text("\n".join([header, *rows]) + "\n")
    (folder / "config.ini").write_text(CONFIG)
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "finetune", "tiny", "--config", "config.ini"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [run_dir] = (folder / "runs").iterdir()
    return run_dir


class Runs:
    """A runs folder to fill."""

    def __init__(self, folder: Path, trained: Path):
        self.folder, self.trained = folder, trained

    def copy(self, name: str, *, final: bool = True, ranks: int = 1, **settings) -> Path:
        """The trained run under another name, its weights left out; `settings` change its profile."""
        path = self.folder / name
        shutil.copytree(self.trained, path, ignore=shutil.ignore_patterns("final", "checkpoints", "lock"))
        asked = json.loads((path / "run.json").read_text())
        asked["ranks"] = (
            [{**asked["ranks"][0], "label": f"host{n}"} for n in range(ranks)] if ranks > 1 else asked["ranks"]
        )
        for rank in asked["ranks"]:
            rank["spec"]["profile"].update(settings)
        asked.pop("created", None)
        (path / "run.json").write_text(json.dumps(asked))
        if final:
            (path / "final").mkdir()
            (path / "final" / "model.safetensors").write_bytes(b"x" * 1000)
        return path

    def events(self, path: Path) -> list[dict]:
        return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]

    def write(self, path: Path, events: list[dict]) -> None:
        (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    def end(self, path: Path, status: int, message: str) -> None:
        events = [event for event in self.events(path) if event["type"] not in ("end", "evaluation")]
        self.write(path, [*events, {"time": time.time(), "type": "end", "status": status, "message": message}])
        (path / "wer.json").unlink(missing_ok=True)

    def checkpoint(self, path: Path) -> None:
        for number in ("0000002", "0000004"):
            folder = path / "checkpoints" / number
            folder.mkdir(parents=True)
            (folder / "rank0.json").write_text("{}")

    def age(self, path: Path, days: float) -> None:
        then = time.time() - days * 86400
        events = self.events(path)
        shift = then - events[-1]["time"]
        self.write(path, [{**event, "time": event["time"] + shift} for event in events])
        for found in [*path.rglob("*"), path]:
            os.utime(found, (then, then), follow_symlinks=False)


@pytest.fixture
def runs(tmp_path, trained, monkeypatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "runs").mkdir()
    return Runs(tmp_path / "runs", trained)


@pytest.fixture
def cli(capsys):
    """Runs a command in this process: its status and all that it printed."""

    def call(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        status = cli_typer.main(list(arguments))
        said = capsys.readouterr()
        return int(status), said.out + said.err

    return call


def test_the_figures_of_a_real_run_are_those_of_its_events(trained):
    run = read_run(trained)
    lines = (trained / "events.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["type"] == "step"]
    assert run.state == "finished" and run.name == "tiny" and run.hosts == ("localhost",)
    assert (run.steps, run.total_steps, run.clips) == (3, 3, sum(step["samples"] for step in steps))
    assert run.method == "full" and run.strategy == "allreduce" and run.base_model.endswith("bundled/model")
    assert 0 < run.seconds < 60 and run.clips_per_s == pytest.approx(run.clips / run.seconds)
    assert run.model == trained / "final" and run.size > 6_000_000
    wer = json.loads((trained / "wer.json").read_text())
    assert (run.wer_before, run.wer_after, run.clips_tested) == (wer["before"]["wer"], wer["after"]["wer"], 2)
    assert wer["after"]["before"] == run.wer_before and len(run.wer_difference) == 2
    assert run.normalizers == (f"whisper-english {version('whisper-normalizer')}",)
    assert ("normaliser", run.normalizers[0]) in facts(run, None)
    assert [y for _, y in run.curves.loss] == [step["loss"] for step in steps]
    assert len(run.curves.validation) == 1
    assert abs(run.created - steps[0]["time"]) < 120


def test_a_real_run_leaves_a_report_that_can_be_written_anew(trained, runs, cli):
    events = [json.loads(line) for line in (trained / "events.jsonl").read_text().splitlines()]
    assert [event["type"] for event in events][-2:] == ["end", "report"]
    assert events[-1]["path"] == str(trained / "report.html")
    first = (trained / "report.html").read_text()
    assert "The run has finished. It trained 3 of 3 steps." in first and str(trained.parent) not in first
    assert first.count("<audio") == first.count('class="clip"') > 0
    assert len(commit := re.findall("commit of this program</dt><dd><bdi>(.*)</bdi>", first)) <= 1 and all(commit)
    path = runs.copy("20250102-030405-copy")
    (path / "report.html").unlink()
    status, said = cli("report", "20250102")
    assert (status, said) == (0, "report: runs/20250102-030405-copy/report.html\n")
    assert (path / "report.html").stat().st_size > 0.9 * len(first)


def test_a_report_that_cannot_be_written_is_one_line(runs):
    path = runs.copy("20250102-030405-copy")
    (path / "report.html").unlink()
    (path / "report.html").mkdir()
    command = [sys.executable, "-m", "multimac.report", str(path)]
    environment = os.environ | {"PYTHONPATH": f"{PROJECT}/gym:{PROJECT}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=PROJECT)
    assert (done.returncode, done.stdout) == (1, f"{path}/report.html: Is a directory\n")


def test_every_event_of_a_real_run_has_the_fields_that_readers_rely_on(trained):
    lines = (trained / "events.jsonl").read_bytes().splitlines()
    [attempt] = (found := scan(trained / "events.jsonl")).attempts
    assert found.left_out == "" and len(attempt.steps) == 3
    assert len(attempt.steps) + len(attempt.others) == len(lines) == len(read_events(trained / "events.jsonl")[0])


def test_list_and_show_fit_the_terminal_and_say_what_is_known(runs, cli, monkeypatch):
    runs.copy("20251121-101010-tiny")
    for width in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        status, said = cli("runs", "list")
        assert status == 0 and max(map(len, said.splitlines())) <= width
        assert re.search(r"20251121-101010-tiny +2025-11-21 +finished", said) or width < 80
        assert all(words in said for words in ("20251121-101010-tiny", "2025-11-21", "finished"))
        assert re.search(r"\d ->\s+\d+\.\d", said) and "too few clips" in said
    status, said = cli("runs", "show")
    assert re.search(r"WER +\S+ -> \S+: [+-]\S+ points \(2 clips\): too few clips", said)
    for words in ("3 of 3", "allreduce", "clips/s", "loss (· training, ◆ validation)", "learning rate", "next:"):
        assert words in said
    for words in ("transcribe recording.wav --model 20251121-101010-tiny", "export 20251121-101010-tiny --to"):
        assert f"  multimac {words}" in said
    table = said.split("next:")[0]
    assert max(map(len, table.splitlines())) <= 120


def test_what_a_run_of_an_earlier_version_lacks_is_not_told(runs, cli):
    path = runs.copy("20251121-101010-tiny")
    lacking = ("clips", "before", "wer_difference")
    events = [{key: value for key, value in event.items() if key not in lacking} for event in runs.events(path)]
    odd = [event | ({"wer_difference": [1, "x"]} if event["type"] == "evaluation" else {}) for event in events]
    for written in (events, odd):
        runs.write(path, written)
        status, said = cli("runs", "show")
        assert status == 0 and "may be" not in said and "too few" not in said
    runs.write(path, events)
    assert re.search(r"WER +\S+ -> \S+: [+-]\S+ points *\n", cli("runs", "show")[1])


def test_a_run_without_a_date_in_its_name_was_begun_when_it_says(runs):
    path = runs.copy("mine")
    asked = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**asked, "created": 1.7e9}))
    assert read_run(path).created == 1.7e9
    (path / "run.json").write_text(json.dumps({**asked, "created": "today"}))
    assert read_run(path).created == read_run(path).changed


def test_a_run_is_running_exactly_while_somebody_holds_its_lock(runs, cli):
    path = runs.copy("20251121-101010-tiny")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    holder.stdout.readline()
    assert is_running(path) and read_run(path).state == "running"
    for arguments in (["--yes"], ["--yes", "--older-than", "0d"]):
        assert cli("runs", "clean", *arguments)[0] == 0
    status, said = cli("runs", "clean", path.name, "--yes")
    assert status == 3 and "is running" in said and path.exists()
    holder.kill()
    holder.wait()
    assert not is_running(path) and read_run(path).state == "finished"


@pytest.mark.parametrize(
    ("status", "message", "state"), [(130, "stopped as asked", "interrupted"), (5, "mini: asleep", "failed")]
)
def test_how_a_run_ended_is_shown(runs, cli, status, message, state):
    path = runs.copy("20251121-101010-tiny", final=False)
    runs.end(path, status, message)
    assert (read_run(path).state, read_run(path).message) == (state, message)
    assert message in cli("runs", "show", "last")[1]


def test_a_model_of_a_run_that_is_not_at_its_end_says_so(runs, cli):
    path = runs.copy("20260102-000000-stopped", final=False)
    shutil.copytree(runs.trained / "final", path / "final")
    events = runs.events(path)
    last = max(event["step"] for event in events if event["type"] == "step")
    kept = [event for event in events if event["type"] != "end" and event.get("step", 0) < last]
    runs.write(path, kept)
    runs.end(path, ExitStatus.INTERRUPTED, "stopped as asked")
    told = f"{path.name} was stopped at step {last - 1} of {last}: its model is that of this step"
    assert told in " ".join(cli("evaluate", path.name, "--no-base")[1].split())
    assert told not in " ".join(cli("evaluate", runs.trained.name, "--no-base")[1].split())


def test_steps_of_a_host_are_those_that_it_made_and_a_loss_tells_whether_it_is_back(runs, cli):
    path = runs.copy("20260102-000000-two", final=False)
    events = [event for event in runs.events(path) if event["type"] not in ("end", "evaluation")]
    step = next(event for event in events if event["type"] == "step")
    now = step["time"]
    theirs = [step | {"host": "mini", "rank": 1, "step": number, "time": now} for number in (1, 3)]
    lost = [{"type": "lost", "host": "mini", "reason": "silent", "given_up": False, "time": now}]
    runs.write(path, [*events, *theirs, *lost])
    [mini] = [host for host in read_run(path).per_host if host.name == "mini"]
    assert mini.steps == 2 and read_run(path).lost == {"mini": "once, not back"}
    runs.write(path, [*events, *theirs, *lost, {"type": "back", "host": "mini", "time": now + 139}])
    assert "mini: once, for 2:19" in cli("runs", "show", path.name)[1]


def test_checkpoints_that_only_other_hosts_have_count_until_all_is_trained(runs, cli):
    path = runs.copy("20260102-000000-away")
    asked = json.loads((path / "run.json").read_text())
    asked["ranks"][0]["host"] = {"address": "mini"}
    (path / "run.json").write_text(json.dumps(asked))
    [step, *_] = [event for event in runs.events(path) if event["type"] == "step"]
    runs.write(path, [*runs.events(path)[:-1], step | {"type": "checkpoint"}, runs.events(path)[-1]])
    assert "checkpoints" not in cli("runs", "show", path.name)[1] and not read_run(path).resumable
    runs.end(path, ExitStatus.INTERRUPTED, NOT_EVALUATED)
    assert not read_run(path).resumable
    runs.end(path, ExitStatus.INTERRUPTED, "stopped as asked")
    shown = cli("runs", "show", path.name)[1]
    assert read_run(path).resumable and f"on other hosts, the newest at step {step['step']}" in shown


def test_what_evaluate_measures_on_the_own_test_set_is_told_by_runs(runs, cli):
    path = runs.copy("20260102-000000-stopped", final=False)
    shutil.copytree(runs.trained / "final", path / "final")
    measured = json.loads((path / "wer.json").read_text())
    runs.end(path, ExitStatus.INTERRUPTED, NOT_EVALUATED)
    assert read_run(path).state == "interrupted" and read_run(path).wer_after is None
    assert cli("evaluate", path.name, "--audio-context", "cropped")[0] == 0  # not as a run measures it
    assert read_run(path).wer_after is None
    assert f"multimac evaluate {path.name}" in cli("runs", "show", path.name)[1]
    assert cli("evaluate", path.name)[0] == 0
    found, known = read_run(path), read_run(runs.trained)
    assert (found.wer_before, found.wer_after, found.wer_difference) == (
        known.wer_before,
        known.wer_after,
        known.wer_difference,
    )
    assert found.state == "finished" and not found.message and not found.resumable
    assert json.loads((path / "wer.json").read_text()) == measured
    written = (path / "events.jsonl").read_bytes()
    assert cli("evaluate", path.name)[0] == 0 and (path / "events.jsonl").read_bytes() == written
    told = cli("runs", "show", path.name)[1]
    assert "measures it" not in told and "multimac evaluate" not in told

    resumed = [{"type": "phase", "phase": "start", "hosts": ["localhost"]}]
    resumed.append(next(event for event in runs.events(path) if event["type"] == "step") | {"step": 4})
    runs.write(path, [*runs.events(path), *({"time": time.time(), **event} for event in resumed)])
    assert read_run(path).wer_before == known.wer_before and read_run(path).wer_after is None  # it has trained further


def test_a_launcher_without_a_last_word_has_failed(runs):
    path = runs.copy("20251121-101010-tiny", final=False)
    text = (path / "events.jsonl").read_text()
    (path / "events.jsonl").write_text(text[: len(text) // 2])  # in the middle of a line
    run = read_run(path)
    assert run.state == "failed" and "without saying why" in run.message


def test_a_resume_is_proposed_only_if_this_version_takes_the_run(runs, cli):
    path = runs.copy("20251121-101010-tiny", final=False)
    runs.end(path, 130, "stopped as asked")
    runs.checkpoint(path)
    assert f"finetune --resume {path.name}" in cli("runs", "show", "last")[1]
    asked = json.loads((path / "run.json").read_text())
    asked["ranks"][0]["spec"]["checkpoint_interval"] = 5
    (path / "run.json").write_text(json.dumps(asked))
    status, said = cli("runs", "show", "last")
    assert status == 0 and "interrupted" in said and "--resume" not in said


def damage_run_json(path: Path) -> None:
    (path / "run.json").write_text('{"ranks": [')


def empty_run_json(path: Path) -> None:
    (path / "run.json").write_text("{}")


def no_run_json(path: Path) -> None:
    (path / "run.json").unlink()


def zeros_in_events(path: Path) -> None:
    (path / "events.jsonl").write_bytes(bytes(5000))


def lose_a_line(path: Path) -> None:
    lines = (path / "events.jsonl").read_text().splitlines(keepends=True)
    lines[3] = lines[3][:20] + "\n"
    (path / "events.jsonl").write_text("".join(lines))


def strange_event(path: Path) -> None:
    with (path / "events.jsonl").open("a") as file:
        file.write('{"time": 1.0, "type": "start", "total_steps": "many"}\n')


def binary_run_json(path: Path) -> None:
    (path / "run.json").write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_run_json, "run.json is damaged"),
        (empty_run_json, "run.json is damaged"),
        (binary_run_json, "run.json is damaged"),
        (no_run_json, "no run.json"),
        (zeros_in_events, "no event that can be read"),
    ],
)
def test_a_damaged_run_is_broken_with_its_reason_and_the_others_are_listed(runs, cli, damage, reason):
    runs.copy("20251120-101010-whole")
    damage(runs.copy("20251121-101010-hurt"))
    status, said = cli("runs", "list")
    assert status == 0 and re.search(r"hurt\s.*broken", said) and re.search(r"whole\s.*finished", said)
    assert reason in said
    status, said = cli("runs", "show", "last")
    assert status == 0 and reason in said
    cli("runs", "clean", "--yes", "--older-than", "0d")
    assert (runs.folder / "20251121-101010-hurt").exists()


@pytest.mark.parametrize("damage", [lose_a_line, strange_event])
def test_a_line_that_cannot_be_read_is_told_once_and_the_rest_of_the_run_is_shown(runs, cli, damage):
    path = runs.copy("20251121-101010-hurt")
    whole = read_run(path)
    damage(path)
    hurt = read_run(path)
    assert (hurt.state, hurt.steps, hurt.wer_after) == ("finished", whole.steps, whole.wer_after)
    for command in ("list", "show"):
        status, said = cli("runs", command)
        assert status == 0 and "finished" in said and "broken" not in said
        assert said.count("cannot be read: left out") == 1


def test_a_resumed_run_counts_repeated_steps_once(runs):
    path = runs.copy("20251121-101010-tiny")
    whole = runs.events(path)
    upto = max(number for number, event in enumerate(whole) if event["type"] == "step")
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in whole[:upto]) + '{"time": 1')
    log = EventLog(path / "events.jsonl")
    for event in whole:
        if event["type"] != "step" or event["step"] > 1:  # went on from step 1
            log(event)
    log.close()
    run = read_run(path)
    assert (run.state, run.attempts, run.steps) == ("finished", 2, 3)
    assert run.clips == sum(event["samples"] for event in whole if event["type"] == "step")
    assert len(run.curves.loss) == 3


def test_who_could_not_reach_whom_is_shown_with_how_often(runs, cli):
    path = runs.copy("20251121-101010-tiny")
    apart = [{"type": "apart", "pairs": pairs, "hosts": []} for pairs in ([["a", "b"]], [["a", "b"], ["b", "c"]])]
    again = {"type": "reached", "pairs": [["a", "b"]]}
    *others, end = runs.events(path)
    runs.write(path, [*others, *({**event, "time": end["time"]} for event in (*apart, again, apart[0])), end])
    assert read_run(path).apart == {("a", "b"): 2, ("b", "c"): 1}
    _, text = cli("runs", "show", path.name)
    assert "cut off" in text and "a and b from each other (2 times), b and c from each other" in " ".join(text.split())


def test_speed_up_is_told_only_against_a_run_of_one_host_at_the_same_work(runs, cli):
    def speed_up(name: str) -> float | None:
        listed = json.loads(cli("runs", "list", "--json")[1])
        return next(run["speed_up"] for run in listed if run["id"].endswith(name))

    together = runs.copy("20251121-101010-together", ranks=2)
    steps = [event for event in runs.events(together) if event["type"] == "step"]
    others = [event for event in runs.events(together) if event["type"] != "step"]
    both = [{**step, "host": f"host{n}", "rank": n} for step in steps for n in range(2)]
    runs.write(together, sorted([*others, *both], key=lambda event: event["time"]))
    assert speed_up("together") is None
    runs.copy("20251120-101010-otherbatch", batch_size=7)
    runs.copy("20251120-101011-lora", method="lora")
    failed = runs.copy("20251120-101012-failed")
    runs.end(failed, 5, "mini: asleep")
    assert speed_up("together") is None
    runs.copy("20251120-101013-alone")
    assert speed_up("together") == pytest.approx(2.0)
    assert speed_up("alone") is None
    assert "2.00×" in cli("runs", "list")[1]
    (runs.folder / "20251120-101013-alone" / "train.csv").write_text("id,audio_path,transcription,duration_s\n")
    assert speed_up("together") is None


def test_runs_are_found_by_id_beginning_path_and_last(runs, cli):
    runs.copy("20251120-101010-tiny")
    runs.copy("20251121-101010-tiny")
    (runs.folder / "notes").mkdir()
    (runs.folder / "20251122-101010-link").symlink_to(runs.folder / "20251120-101010-tiny")
    for name in ("20251121-101010-tiny", "20251121", "last", "runs/20251121-101010-tiny"):
        assert cli("runs", "show", name)[1].startswith("20251121-101010-tiny\n"), name
    status, said = cli("runs", "show", "2025112")
    assert status == 3 and "2 runs begin with" in said and "20251120-101010-tiny" in said
    status, said = cli("runs", "show", "20251121-101011-tiny")
    assert status == 3 and "did you mean '20251121-101010-tiny'" in said and "20251120-101010-tiny" in said
    assert "link" not in cli("runs", "list")[1] and "notes" not in cli("runs", "list")[1]


def test_the_runs_folder_is_the_one_named_or_those_of_config_ini(runs, cli, tmp_path):
    assert cli("runs", "list")[1].startswith(f"no run in {tmp_path}/runs\nRuns are kept where")
    assert cli("runs", "show")[0] == 3
    shutil.copytree(runs.copy("20251121-101010-tiny"), tmp_path / "elsewhere" / "20251122-101010-other")
    assert "other" in cli("runs", "list", "--runs-dir", "elsewhere")[1]
    assert "other" not in cli("runs", "list")[1]
    (tmp_path / "config.ini").write_text("[profile:a]\nruns_dir = elsewhere\n")
    assert re.search("other(.|\n)*tiny", cli("runs", "list")[1])
    status, said = cli("runs", "list", "--runs-dir", "nowhere")
    assert status == 3 and "nowhere: there is no such folder" in said


def test_compare_shows_the_settings_that_differ_and_both_curves(runs, cli):
    runs.copy("20251120-101010-one")
    runs.copy("20251121-101010-two", learning_rate=0.1, lora_targets=["fc1"])
    status, said = cli("runs", "compare", "20251120", "last")
    assert status == 0 and re.search(r"learning_rate\s+(· )?0.0003,?\s+(\+ )?0.1", said) and "fc1" in said
    assert "batch_size" not in said and "· 20251120-101010-one" in said and "+ 20251121-101010-two" in said
    assert "step 1" in said
    assert max(map(len, said.splitlines())) <= 80
    assert cli("runs", "compare", "last", "last")[0] == 3


def test_compare_as_json_has_both_runs_and_what_differs(runs, cli):
    runs.copy("20251120-101010-one")
    runs.copy("20251121-101010-two", learning_rate=0.1)
    status, said = cli("runs", "compare", "20251120", "last", "--json")
    found = json.loads(said)
    assert status == 0 and [run["id"] for run in found["runs"]] == ["20251120-101010-one", "20251121-101010-two"]
    assert found["settings that differ"] == {"learning_rate": [3e-4, 0.1]}
    assert all(run["curves"]["loss"] for run in found["runs"])


def test_clean_lists_first_and_removes_with_yes(runs, cli):
    useless = runs.copy("20251101-101010-useless", final=False)
    runs.end(useless, 5, "mini: asleep")
    runs.age(useless, 20)
    done = runs.copy("20251102-101010-done")
    runs.checkpoint(done)
    runs.age(done, 19)
    paused = runs.copy("20251103-101010-paused", final=False)
    runs.end(paused, 130, "stopped as asked")
    runs.checkpoint(paused)
    runs.age(paused, 3)
    status, said = cli("runs", "clean")
    assert status == 0 and "--yes" in said and "they can be resumed" in said
    assert "useless  (failed, no model)" in said and "2 checkpoints of a finished run" in said
    assert useless.exists() and (done / "checkpoints").exists()
    assert "nothing to remove" in cli("runs", "clean", "--keep", "3", "--yes")[1]
    assert "nothing to remove" in cli("runs", "clean", "--older-than", "3w", "--yes")[1]
    assert cli("runs", "clean", "--yes")[0] == 0
    assert not useless.exists() and not (done / "checkpoints").exists()
    assert (done / "final" / "model.safetensors").exists() and paused.exists()
    cli("runs", "clean", "--older-than", "2d", "--yes")
    assert not paused.exists() and done.exists()
    assert cli("runs", "clean", "20251102", "--yes")[0] == 0
    assert not done.exists()


def test_clean_as_json(runs, capsys):
    useless, paused = runs.copy("20251101-101010-useless", final=False), runs.copy("20251103-101010-paused")
    for path, status in ((useless, 5), (paused, 130)):
        runs.end(path, status, "it ended")
        runs.age(path, 3)
    runs.checkpoint(paused)
    for removed, more in ((False, []), (True, ["--yes"])):
        assert cli_typer.main(["runs", "clean", "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        [one] = found["removals"]
        assert (one["run"], one["reason"], one["removed"]) == (useless.name, "failed, no model", removed)
        assert one["bytes"] > 1000 and useless.exists() != removed and found["kept"] == [paused.name]
    assert cli_typer.main(["runs", "clean", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removals"] == []


def test_clean_empties_the_cache_while_no_run_is_going(runs, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("multimac.commands.clean.PROJECT", tmp_path)
    cache, kept = tmp_path / ".multimac" / "cache", tmp_path / ".multimac" / "kept"
    FactStore(cache).keep("length", {"a": ""}, {"a": 1})
    (cache / "headers").mkdir()  # of an earlier version
    (cache / "headers" / "1.json").write_text("{}")
    kept.touch()
    for removed, more in ((False, []), (True, ["--yes"])):
        assert cli_typer.main(["runs", "clean", "--cache", "--json", *more]) == 0
        [one] = json.loads(capsys.readouterr().out)["removals"]
        assert (one["path"], one["removed"]) == (str(cache), removed) and one["bytes"] > 1000
        assert cache.exists() != removed
    assert cli_typer.main(["runs", "clean", "--cache"]) == 0 and "nothing to remove" in capsys.readouterr().out
    assert kept.exists() and cli_typer.main(["runs", "clean", "--cache", "--keep", "1"]) == 3
    run = runs.copy("20251101-101010-going")
    with subprocess.Popen([sys.executable, "-c", HOLD, run / "lock"], stdin=-1, stdout=-1) as holder:
        holder.stdout.readline()
        assert cli_typer.main(["runs", "clean", "--cache", "--yes"]) == 3
        assert "is running" in capsys.readouterr().err
        holder.stdin.close()


def test_clean_touches_nothing_outside_and_follows_no_link(runs, cli, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "rank0.json").write_text("{}")
    done = runs.copy("20251102-101010-done")
    (done / "checkpoints").mkdir()
    (done / "checkpoints" / "0000002").symlink_to(precious)
    useless = runs.copy("20251101-101010-useless", final=False)
    runs.end(useless, 5, "mini: asleep")
    (useless / "data").symlink_to(precious)
    runs.age(useless, 20)
    outside = tmp_path / "20251101-101010-outside"
    useless.rename(outside)
    (runs.folder / "20251104-101010-link").symlink_to(outside)
    status, said = cli("runs", "clean", str(outside), "--yes")
    assert status == 3 and "is not in runs" in said
    assert cli("runs", "clean", "20251104-101010-link", "--yes")[0] == 3
    assert cli("runs", "clean", "--yes", "--older-than", "0d")[0] == 0
    assert outside.exists()
    outside.rename(useless)
    assert cli("runs", "clean", "--yes")[0] == 0
    assert not useless.exists() and list(precious.iterdir()) == [precious / "rank0.json"]


@pytest.mark.parametrize("text", ["7", "d", "-1d", "7 days"])
def test_an_age_that_is_none_is_refused(runs, cli, text):
    status, said = cli("runs", "clean", f"--older-than={text}")
    assert status == 3 and "for example 12h" in said.lower()


def test_two_hundred_runs_are_listed_within_two_seconds_and_without_torch(runs, tmp_path):
    path = runs.copy("20251101-101010-run")
    events = runs.events(path)
    [step, *_] = [event for event in events if event["type"] == "step"]
    first = [event for event in events if event["type"] in ("phase", "start")]
    steps = [{**step, "step": number, "time": step["time"] + number} for number in range(1, 501)]
    runs.write(path, [*first, *steps, events[-1]])
    for number in range(199):
        shutil.copytree(path, runs.folder / f"20251102-{100000 + number}-run", ignore=shutil.ignore_patterns("final"))
    watch = (
        "import sys, os, cli_typer; cli_typer.main(['runs', 'list']); "
        "print(sum(os.times()[:2])); print({'torch', 'paramiko', 'numpy'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{PROJECT}/gym:{PROJECT}"}
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, env=environment)
    *listed, seconds, loaded = done.stdout.splitlines()
    assert float(seconds) < 2 and loaded == "set()", done.stdout + done.stderr
    assert listed[-1] == "180 older ones: --all"
