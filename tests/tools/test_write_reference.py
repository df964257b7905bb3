"""docs/configuration.md and docs/messages.md are what the source says, and say it right."""

import dataclasses
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
sys.path.append(str(PROJECT / "tools"))

from messages import collect  # noqa: E402
from reference_texts import EXAMPLES, HOST_TEXTS, PIECED  # noqa: E402

from distributed.plan.hosts_file import load_hosts  # noqa: E402
from distributed.plan.job import Distribution  # noqa: E402
from exogym.config import STRATEGIES, read_text  # noqa: E402
from whisper_tuner.config import Profile  # noqa: E402
from whisper_tuner.settings import parse  # noqa: E402

SOURCE = """
HELP = "Look there."

def where(x) -> str:
    return f"near {x.name}" if x else "nowhere"

class Reader:
    def read(self, path, keys):
        remedy = HELP + " Twice."
        if path:
            raise ConfigError(f"{path}:{3}: {len(keys)} keys, not {path.stat().st_size!r}", remedy=remedy)
        raise HostError(self.host.address, f"`{keys[0]}` failed {where(path)}" + "!")

    def wrong(self, message, *, remedy="") -> ConfigError:
        return ConfigError(f"{self.path}: {message}", remedy=remedy)

    def use(self, key):
        raise self.wrong(f"{key} is odd", remedy="Drop it.")
        raise ConfigError(str(key))

    def _add(self, node, what, remedy=""):
        self.problems.append((node, what, remedy))

    def judge(self, node):
        self._add(node, f"only {node.mbit} Mbit/s", "A cable.", severity=WARNING)
"""


def test_the_written_pages_are_up_to_date():
    command = [sys.executable, "tools/write_reference.py", "--check"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"run `make reference`: {done.stdout}{done.stderr}"


def test_messages_are_collected_with_remedy_and_kind(tmp_path):
    (tmp_path / "some.py").write_text(SOURCE)
    found = {
        (m.text, m.remedy, m.kind) for m in collect([tmp_path / "some.py"], tmp_path, {"ConfigError", "HostError"})
    }
    assert found == {
        ("<path>:3: <count> keys, not <st size>", "Look there. Twice.", "ConfigError"),
        ("HOST: `<keys>` failed near <x> / nowhere!", "", "HostError"),
        ("<path>: <key> is odd", "Drop it.", "ConfigError"),
        ("HOST: only <mbit> Mbit/s", "A cable.", "a warning"),
    }


@pytest.mark.parametrize("cls", [Profile, Distribution])
def test_examples_of_settings_are_accepted(cls, tmp_path):
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        parse(field, hints[field.name], EXAMPLES[field.name], tmp_path)


def test_examples_of_strategies_are_accepted():
    fields = {field.name: field for cls, _ in STRATEGIES.values() for field in dataclasses.fields(cls)}
    for name in EXAMPLES.keys() & fields.keys():
        read_text(fields[name], EXAMPLES[name])


def test_the_examples_of_the_hosts_file_make_one_that_loads(tmp_path):
    of_host = ("host", "ssh_port", "interface", "device")
    worker = ", ".join(HOST_TEXTS[key][3] for key in of_host)
    top = ", ".join(HOST_TEXTS[key][3] for key in HOST_TEXTS if key not in (*of_host, "workers"))
    (tmp_path / "hosts.json").write_text(f'{{{top}, "workers": [{{{worker}}}]}}')
    hosts = load_hosts(tmp_path / "hosts.json")
    assert hosts.workers[0].port == 2222 and hosts.master.user == "anna"


def test_messages_made_of_pieces_are_in_the_source():
    for module, text, _, _ in PIECED:
        source = (PROJECT / module).read_text()
        for piece in re.split(r"<[^>]*>|; ", text.removeprefix("HOST is lost: ").removeprefix("HOST: ")):
            assert piece.strip() in source, f"{module}: {piece}"


def as_pattern(row: str) -> re.Pattern[str]:
    """What a row of messages.md can look like."""
    fields = r"<[^>]*>|HOST|\[, did[^\]]*\]"
    marks = {"(": "(?:", ")": ")?", " / ": "|"} if " / " in row else {}
    parts = re.split(f"({fields}|{'|'.join(map(re.escape, marks))})" if marks else f"({fields})", row)
    return re.compile("".join(marks.get(p) or (".*" if re.fullmatch(fields, p) else re.escape(p)) for p in parts))


def test_what_troubleshooting_quotes_is_said_by_the_program():
    """Each `place: message` of a paragraph that begins with "You see" fits a row of messages.md."""
    rows = re.findall(r"^\| ``? ?(.+?) ?``? \| .* \| .* \|$", (PROJECT / "docs/messages.md").read_text(), re.M)
    telling = [row for row in rows if len(re.findall(r"[a-z]", re.sub(r"<[^>]*>", "", row))) >= 4]
    patterns = [as_pattern(row) for row in telling]
    paragraphs = (PROJECT / "docs/troubleshooting.md").read_text().split("\n\n")
    seen = [paragraph for paragraph in paragraphs if paragraph.startswith("You see")]
    quoted = [" ".join(quote.split()) for block in seen for quote in re.findall(r"`([^`]+: [^`]+)`", block)]
    assert len(quoted) > 15
    assert not [quote for quote in quoted if not any(pattern.fullmatch(quote) for pattern in patterns)]
