"""The wizard on a terminal of 80 columns: a pseudo-terminal with keys typed into it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_train import two_columns
from test_wizard_layouts import clips, subtitles

from whisper_tuner.config import ConfigFile

__all__ = ["clips"]

PROJECT = Path(__file__).parents[3]
ENTER, ESCAPE, CTRL_C, DOWN, LEFT, BACK = "\r", "\x1b", "\x03", "\x1b[B", "\x1b[D", "\x1b[Z"
DELETE = "\x7f" * 12
CHANGE = DOWN + DOWN + ENTER  # at the first "Ready?"
QUESTIONS = (
    "Which recordings",
    "Language",
    "Ready?",
    "Split off",
    "Which model",
    "Which weights",
    "Epochs",
    "Learning rate",
    "Clips per step",
    "Stop after 3 epochs",
    "Where do you want to train",
    "Name for this profile",
    "Ready?",
)
WIDTH = 80
NO_TIME = "from multimac.wizard import flow; flow.show_time = lambda *_: None"  # measuring takes ten seconds
CODES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")


class Screen:
    """A child on a pseudo-terminal, that answers what a terminal is asked (where its cursor is)."""

    def __init__(self, folder: Path, *options: str, first: str = NO_TIME):
        """first: Python that the child runs before the wizard."""
        self.seen = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
            os.chdir(folder)
            os.environ |= {"TERM": "xterm-256color", "TMPDIR": str(folder.parent / "tmp"), "PROMPT_TOOLKIT_NO_CPR": "1"}
            run = f"import sys; sys.path.insert(0, {str(PROJECT)!r}); import wizard\n{first}\nsys.exit(wizard.main())"
            os.execv(sys.executable, [sys.executable, "-c", run, *options])
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))

    def read(self, timeout: float) -> bool:
        """Whether there is more to come."""
        if select.select([self.fd], [], [], timeout)[0]:
            try:
                data = os.read(self.fd, 1 << 16)
            except OSError:
                return False
            self.seen += CODES.sub("", data.decode(errors="replace"))
            return bool(data)
        return True

    def expect(self, words: str, timeout: float = 60) -> str:
        """Wait for words, spaces and line breaks being alike; forget what came before them, and return it."""
        pattern = re.compile(r"\s*".join(map(re.escape, words.replace(" ", ""))))
        deadline = time.monotonic() + timeout
        while not (match := pattern.search(self.seen)):
            assert time.monotonic() < deadline, self.seen
            assert self.read(0.2), f"ended before {words!r}: {self.seen}"
        before, self.seen = self.seen[: match.start()], self.seen[match.end() :]
        return before

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def wait(self, timeout: float = 60) -> int:
        deadline = time.monotonic() + timeout
        while self.read(0.2):
            assert time.monotonic() < deadline, f"it has not ended: {self.seen}"
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config.ini, twelve clips in one manifest."""
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / "tmp").mkdir()
    (folder / "small").symlink_to(PROJECT / "bundled/model")  # under its own name it is the demo's, and not suggested
    (folder / "config.ini").write_text("# mine\n[model:small]\nbase_model = small\n")
    lines = (PROJECT / "bundled/data/train.csv").read_text().splitlines()[:13]
    (folder / "all.csv").write_text("\n".join(lines).replace("train/", "") + "\n")
    for path in sorted((PROJECT / "bundled/data/train").iterdir())[:12]:
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def screen(folder: Path) -> Iterator[Screen]:
    screen = Screen(folder)
    yield screen
    screen.end()


def enter_until(screen: Screen, question: str) -> None:
    """Change everything, and take every default before `question`, which then waits for its answer."""
    for words in QUESTIONS:
        screen.expect(words)
        if words == question and words != "Ready?":
            return
        time.sleep(0.1)  # the prompt draws first, then reads keys
        screen.type({"Ready?": CHANGE, "Language": "en" + ENTER}.get(words, ENTER))


@pytest.mark.slow
def test_shift_tab_goes_back_from_every_kind_of_question(folder, tmp_path):
    """From a list, a text, yes or no. Answers stand there as they were; what has been read is not shown again."""
    saved = tmp_path / "answers.json"
    screen = Screen(folder, "--save-answers", str(saved))

    def answer(question: str, keys: str) -> None:
        screen.expect(question)
        time.sleep(0.1)
        screen.type(keys)

    try:
        answer("Which recordings", BACK + DOWN + BACK + "\x1b[A" + ENTER)  # there is none before the first
        answer("Language", BACK)
        answer("Which recordings", ENTER)
        answer("Language of the speech (en, fr, German, ...):", "fr" + ENTER)
        answer("train it all the same", "y" + ENTER)
        answer("Ready?", CHANGE)
        answer("Split off", "n" + ENTER)
        answer("Which model", BACK)
        answer("Split off", BACK)
        answer("Ready?", ENTER)  # to change something, as before
        answer("Split off", ENTER)  # no, as before
        screen.expect("no WER is measured")
        answer("Which model", ENTER)
        answer("Which weights", ENTER)
        answer("Epochs", DELETE + "12" + LEFT + "3" + ENTER)
        answer("Learning rate", DELETE + "0.002" + ENTER)
        answer("Clips per step", ENTER)
        answer("Where do you want to train", BACK)
        answer("Clips per step", BACK)
        answer("Learning rate", BACK)
        answer("Epochs", BACK)
        before = screen.expect("Which weights")
        time.sleep(0.1)
        screen.type("\x1b[A" + ENTER)
        # The suggested rate is another one now.
        answer("Epochs (passes over the clips): 132", ENTER)
        answer("Learning rate (too high forgets, too low learns little): 0.0015", ENTER)
        answer("Clips per step", ENTER)
        answer("Where do you want to train", ENTER)
        answer("Name for this profile", DELETE * 2 + "mine" + ENTER)
        answer("Ready?", BACK)
        answer("Name for this profile: mine", ENTER)
        answer("Ready?", DOWN + ENTER)  # only save it: there is nothing more to change
        assert screen.wait() == 0
    finally:
        screen.end()
    assert "train: 12 clips" not in before
    profile = ConfigFile(folder / "config.ini").profile("mine")
    assert (profile.method, profile.epochs, profile.learning_rate, profile.test) == ("full", 132, 0.0015, None)
    assert profile.language == "fr"
    answers = json.loads(saved.read_text())
    expected = {"split": "no", "method": "full", "epochs": "132", "learning_rate": "0.0015", "where": "alone"}
    assert answers.items() >= (expected | {"name": "mine", "start": "later"}).items() and "workers" not in answers


def test_a_setting_that_cannot_work_is_asked_for_again(folder, screen):
    enter_until(screen, "Learning rate")
    time.sleep(0.1)
    screen.type(DELETE + "5" + ENTER)
    screen.expect("above 0.1 a model forgets all it knows; usual for this one: 0.005")
    screen.type(DELETE + "1e-3" + ENTER)
    assert "above 0.1" not in screen.expect("Clips per step")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "key"),
    [
        ("Which recordings", ESCAPE),
        ("Split off", CTRL_C),
        ("Name for this profile", ESCAPE),
    ],
)
def test_leaving_leaves_everything_as_it_was(folder, screen, question, key):
    before = files(folder)
    enter_until(screen, question)
    time.sleep(0.1)
    screen.type(key)
    assert screen.wait() == 130
    assert "nothing was written" in screen.seen
    assert files(folder) == before
    assert not list((folder.parent / "tmp").iterdir())


def test_clips_that_were_cut_stay_and_are_not_cut_again(folder, screen, clips, tmp_path):
    (tmp_path / "talks").mkdir()
    subtitles(tmp_path / "talks", clips)
    for question, keys in {
        "Which recordings": DOWN + ENTER,
        "another folder or table (CSV, Excel, JSON), such as ~/recordings:": f"{tmp_path / 'talks'}{ENTER}",
        "Folder for the clips": ENTER,
        "Language": BACK,
        "Folder for the clips and their manifests:": ENTER,
    }.items():
        screen.expect(question)
        time.sleep(0.1)
        screen.type(keys)
    assert "cutting" not in screen.expect("Language")
    time.sleep(0.1)
    screen.type(ESCAPE)
    assert screen.wait() == 130
    screen.expect("Stopped: nothing was written but the clips in talks-clips.")
    assert (folder / "talks-clips" / "train.csv").is_file()


def test_a_column_that_cannot_be_told_is_asked_for(folder, screen, clips, tmp_path):
    voice = two_columns(tmp_path, clips)
    for question, keys in {
        "Which recordings": DOWN + ENTER,
        "another folder or table (CSV, Excel, JSON), such as ~/recordings:": f"{voice}{ENTER}",
        "Which column is that of the texts?": ENTER,
        "Language": "en" + ENTER,
        "Ready?": 3 * DOWN + ENTER,
    }.items():
        screen.expect(question)
        time.sleep(0.1)
        screen.type(keys)
    assert screen.wait() == 0
    assert "Aufnahme" not in (voice / "texte-train.csv").read_text()


@pytest.mark.parametrize("keys", ["", ENTER])
def test_a_hung_up_terminal_leaves_everything_as_it_was(folder, screen, keys):
    """It may hang up while a question is asked, or just after it was answered."""
    before = files(folder)
    enter_until(screen, "Epochs")
    screen.type(keys)
    os.kill(screen.pid, 1)
    assert screen.wait() == 130
    assert files(folder) == before
    assert not list((folder.parent / "tmp").iterdir())


@pytest.mark.slow
def test_a_remedy_is_shown_and_tried_again(folder, ssh_server, tmp_path):
    """The host's key is accepted in another terminal while the wizard waits."""
    hosts = folder / "distributed_hosts.json"
    hosts.write_text(json.dumps({"master": "localhost", "workers": [ssh_server.worker]}))
    ssh_server.known_hosts.write_text("")
    before = files(folder)
    screen = Screen(folder)
    try:
        enter_until(screen, "Where do you want to train")
        screen.type(ENTER)
        screen.expect("its key is not known here")
        screen.expect(f"accept it once with: ssh -p {ssh_server.port} ")
        screen.expect("What next?")
        time.sleep(0.1)
        screen.type(BACK)
        assert "1 error" not in screen.expect("Where do you want to train")
        time.sleep(0.1)
        screen.type(ENTER)
        screen.expect("its key is not known here")  # it is looked at again
        screen.expect("What next?")
        ssh_server.trust()
        time.sleep(0.1)
        screen.type(ENTER)
        screen.expect("Measure their speed")  # a busy machine may have warnings
        time.sleep(0.1)
        screen.type(BACK)
        screen.expect("Where do you want to train")
        time.sleep(0.1)
        screen.type(ENTER)
        shown = screen.expect("Measure their speed")  # the same answer: what was found is shown again
        assert "packages" in shown and "checking" not in shown
        time.sleep(0.1)
        screen.type(ESCAPE)
        assert screen.wait() == 130
    finally:
        screen.end()
    assert files(folder) == before
    assert not (ssh_server.folder / "project").exists()


def test_who_has_said_several_machines_is_only_asked_which(folder, screen):
    (folder / "distributed_hosts.json").write_text(json.dumps({"master": "localhost", "workers": ["10.0.0.7"]}))
    for question, keys in {"Which recordings": ENTER, "Language": "en" + ENTER, "Ready?": DOWN + ENTER}.items():
        screen.expect(question)
        time.sleep(0.1)
        screen.type(keys)
    asked = screen.expect("On which machines?") + screen.expect("other machines: asks for their addresses")
    assert "on the machines in distributed_hosts.json" in asked and "alone" not in asked
    time.sleep(0.1)
    screen.type(ESCAPE)
    assert screen.wait() == 130


def test_recordings_then_go(folder, screen):
    """The model of this test is English-only: texts are compared by the language alone."""
    screen.expect("Which recordings")
    time.sleep(0.1)
    screen.type(ENTER)
    screen.expect("Language")
    time.sleep(0.1)
    screen.type("en" + ENTER)
    shown = screen.expect("Ready?")
    assert "[profile:home-lora]" in shown and "Epochs" not in shown
    assert "it is told no language. Texts are compared as English" in " ".join(shown.split())
    time.sleep(0.1)
    screen.type(3 * DOWN + ENTER)
    assert screen.wait() == 0
    profile = ConfigFile(folder / "config.ini").profile("home-lora")
    assert (profile.method, profile.language) == ("lora", "en")


def test_what_a_person_answered_who_left_is_suggested(folder, screen):
    enter_until(screen, "Epochs")
    time.sleep(0.1)
    screen.type(DELETE + "7" + ENTER)
    screen.expect("Learning rate")
    time.sleep(0.1)
    screen.type(ESCAPE)
    assert screen.wait() == 130
    screen.expect("Your answers are suggested the next time.")
    again = Screen(folder)
    try:
        for question in ("Which recordings", "Split off", "Which model", "Language", "Which weights"):
            again.expect(question)
            time.sleep(0.1)
            again.type(ENTER)
        again.expect("Epochs (passes over the clips): 7")
        time.sleep(0.1)
        again.type(ESCAPE)
        assert again.wait() == 130
    finally:
        again.end()
