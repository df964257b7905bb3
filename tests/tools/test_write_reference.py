"""docs/configuration.md and docs/messages.md are what the source says, and say it right."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
sys.path.append(str(PROJECT / "tools"))

from messages import collect  # noqa: E402
from write_reference import HOST_TEXTS, PACKAGES, refused  # noqa: E402

from distributed.plan.hosts_file import load_hosts  # noqa: E402
from distributed.plan.job import FROM_PROFILE, Distribution  # noqa: E402
from exogym.config import from_text, hints_of, parse  # noqa: E402
from exogym.strategy import STRATEGIES  # noqa: E402
from whisper_tuner.config import Profile  # noqa: E402

SOURCE = """
HELP = "Look there."

class NoDisk(RunError):
    pass

def where(x) -> str:
    return f"not far from {x.name}"

class Reader:
    def read(self, path, keys):
        remedy = HELP + " Twice."
        if path:
            raise ConfigError(f"{path}:{3}: {len(keys)} keys, {'not' if keys else 'or'} {path.size!r}", remedy=remedy)
        raise HostError(self.host.address, f"`{keys[0]}` failed {where(path)}{', twice' if keys else ''}" + "!")
        raise NoDisk("the disk is gone", remedy=f"Buy one, {HELP}")

    def wrong(self, message, *, remedy="") -> ConfigError:
        return ConfigError(f"{self.path}: {message}", remedy=remedy)

    def use(self, key):
        raise self.wrong(f"{key} is odd", remedy="Drop it.")
        raise ConfigError(str(key))

    def _add(self, node, what, remedy=""):
        self.problems.append((node, what, remedy))

    def judge(self, node):
        self._add("speed", f"only {node.mbit} Mbit/s", _cure(node), severity=WARNING)

def _cure(node):
    return f"A cable at {node.name}."
"""


def test_the_written_pages_are_up_to_date():
    command = [sys.executable, "tools/write_reference.py", "--check"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"run `make reference`: {done.stdout}{done.stderr}"


def test_messages_are_collected_with_remedy_and_group(tmp_path):
    (tmp_path / "some.py").write_text(SOURCE)
    assert collect([tmp_path / "some.py"]) == {
        ("3", "<path>:3: <keys> keys, (not / or) <size>", "Look there. Twice."),
        ("5", "`<keys>` failed not far from <name>[, twice]!", ""),
        ("6", "the disk is gone", "Buy one, Look there."),
        ("3", "<key> is odd", "Drop it."),
        ("found", "only <mbit> Mbit/s", "A cable at <name>."),
    }


def test_a_remedy_is_a_sentence_or_ends_in_a_command_to_copy():
    paths = [path for name in PACKAGES for path in (PROJECT / name).rglob("*.py")]
    remedies = {remedy for _, _, remedy in collect(paths) if remedy}
    assert len(remedies) > 100
    assert [found for found in remedies if found[-1] not in ".?>]" and ": " not in found] == []


def test_where_the_project_lies_does_not_matter(tmp_path):
    """A ValueError is read by users in the wizard and in settings alone, not in a clone of such a name."""
    (tmp_path / "wizard-clone" / "wizard").mkdir(parents=True)
    files = [tmp_path / "wizard-clone" / "some.py", tmp_path / "wizard-clone" / "wizard" / "some.py"]
    for path, words in zip(files, ("not for users", "that is no answer"), strict=True):
        path.write_text(f"raise ValueError('{words}')\n")
    assert collect(files) == {("3", "that is no answer", "")}


@pytest.mark.parametrize("cls", [Profile, Distribution])
def test_examples_of_settings_are_accepted(cls):
    for field in dataclasses.fields(cls):
        parse(field, hints_of(cls)[field.name], field.metadata["example"])


@pytest.mark.parametrize("cls", [cls for cls, _ in STRATEGIES.values()])
def test_examples_of_strategies_can_be_read(cls):
    for field in dataclasses.fields(cls):
        if field.name not in FROM_PROFILE or field.name == "H":
            assert field.metadata["example"]
            from_text(hints_of(cls)[field.name], field.metadata["example"])


def test_a_key_that_a_strategy_refuses_is_not_in_its_table():
    assert refused("parameter_server") == {"wire", "overlap_steps", "share_moments"}
    assert refused("sparta_diloco") == {"overlap_steps"}
    assert not refused("diloco") and not refused("allreduce")


def test_the_examples_of_the_hosts_file_make_one_that_loads(tmp_path):
    of_host = ("host", "ssh_port", "interface", "device")
    worker = ", ".join(HOST_TEXTS[key][3] for key in of_host)
    top = ", ".join(HOST_TEXTS[key][3] for key in HOST_TEXTS if key not in (*of_host, "workers"))
    (tmp_path / "hosts.json").write_text(f'{{{top}, "workers": [{{{worker}}}]}}')
    hosts = load_hosts(tmp_path / "hosts.json")
    assert hosts.workers[0].port == 2222 and hosts.master.user == "anna"


# What users meet, as it was on their screens -> a word of the remedy beside it.
SEEN = {
    "config.ini:7: unknown key batchsize, did you mean 'batch_size'?": "Known keys",
    "config.ini:3: epochs = ten: expected a whole number": "",
    "config.ini: there is neither a [distributed:x] nor a [profile:x]": "Known",
    "config.ini:4: base_model = whisper-tny: no such folder, and not a hub id": "hub id such as",
    "openai/whisper-tny: the hub has no model of this name": "huggingface.co",
    "distributed_hosts.json:5: not JSON: Expecting ',' delimiter (column 9)": "comma, quote or bracket",
    "no such audio file: /data/clips/17.wav": "Check its path",
    "/data/17.m4a needs ffmpeg: it cannot be decoded here": "brew install ffmpeg",
    "train.csv has no text column; found: path, sentence": "Name it one of",
    "train.csv: no usable row": "",
    "mac-mini.local: port 22: no answer": "Remote Login",
    "mac-mini.local: no key was accepted for user anna; tried: none found": "ssh-copy-id",
    "mac-mini.local: its key is not known here: SHA256:abc": "accept it once",
    "mac-mini.local: 900 MB to send, but only 200 MB are free for ~/multimac-whisper": "Free some space",
    "run 20250101-1200-mine is running": "runs attach",
    "runs/x: the model cannot be written: No space left on device": "runs_dir",
}


@pytest.mark.parametrize("seen", SEEN)
def test_a_message_on_the_screen_leads_to_its_remedy(seen):
    assert any(pattern.search(seen) and SEEN[seen] in remedy for pattern, remedy in rows("messages.md"))


def test_what_is_said_of_hosts_in_a_run_is_in_the_source():
    said = "".join(path.read_text() for folder in PACKAGES for path in (PROJECT / folder).rglob("*.py"))
    page = (PROJECT / "docs/lost-hosts.md").read_text()
    told = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| `[^`]{20}.*\|(?= )", page, re.M)))
    pieces = [piece for text in told for piece in re.split("HOST is lost: |HOST: |<[^>]*>|; ", text)]
    assert len(pieces) > 20
    assert not [piece for piece in pieces if piece.strip() not in said]


def test_what_troubleshooting_quotes_is_said_by_the_program():
    """Each `place: message` of a paragraph that begins with "You see" fits a row."""
    patterns = [pattern for pattern, _ in rows("messages.md") + rows("lost-hosts.md")]
    paragraphs = (PROJECT / "docs/troubleshooting.md").read_text().split("\n\n")
    seen = [paragraph for paragraph in paragraphs if paragraph.startswith("You see")]
    quoted = [" ".join(quote.split()) for block in seen for quote in re.findall(r"`([^`]+: [^`]+)`", block)]
    assert len(quoted) > 15
    assert not [quote for quote in quoted if not any(pattern.search(quote) for pattern in patterns)]


def rows(page: str) -> list[tuple[re.Pattern[str], str]]:
    """What each row of a page can look like on the screen, and its remedy."""
    found = re.findall(r"^\| ``? ?(.+?) ?``? \| (.*) \|$", (PROJECT / "docs" / page).read_text(), re.M)
    marks = {"(": "(?:", ")": ")?", "[": r"\[?(?:", "]": r")?\]?", " / ": "|"}
    patterns = []
    for row, remedy in found:
        fields = r"<[^<>]*>|HOST[^:]*: |, did you mean <name>\?"
        parts = re.split(rf"({fields}|{'|'.join(map(re.escape, marks))})", row)
        text = "".join(".*" if re.fullmatch(fields, part) else marks.get(part, re.escape(part)) for part in parts)
        patterns.append((re.compile(text), remedy))
    return [(pattern, remedy) for pattern, remedy in patterns if not pattern.search("any: text of (some) words")]
