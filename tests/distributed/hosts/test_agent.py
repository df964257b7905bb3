"""The agent as a host runs it: a process of its own, from text, with whatever Python there is."""

import ast
import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distributed.hosts import agent_call as module
from distributed.hosts.agent.files import load_index
from distributed.hosts.agent_call import SENT, SHAPES, agent_call, fits
from distributed.hosts.paths import PROJECT
from distributed.ssh.machine import LocalMachine
from whisper_tuner.errors import HostError

HERE = LocalMachine("here")
SENDER = """
import hashlib, io, sys
from pathlib import Path
from distributed.hosts.agent.files import check, commit

root, me = Path(sys.argv[1]), sys.argv[2]
for number in range(40):
    name, data = f"{me}-{number}", f"{me}{number}".encode()
    digest = hashlib.sha256(data).hexdigest()
    check(str(root), [[name, len(data), digest, False]], [], ["id", "mac"])
    sys.stdin = io.TextIOWrapper(io.BytesIO(data))
    commit(str(root), [[name, len(data), digest]], [], [[digest, 0, len(data)]])
"""


def test_two_senders_at_once_lose_nothing(tmp_path):
    command = [sys.executable, "-c", SENDER, str(tmp_path)]
    senders = [subprocess.Popen([*command, name], cwd=PROJECT, stderr=subprocess.PIPE) for name in "ab"]
    said = [sender.communicate(timeout=60)[1].decode() for sender in senders]
    assert [sender.returncode for sender in senders] == [0, 0], said
    names = {f"{name}-{number}" for name in "ab" for number in range(40)}
    index = load_index(tmp_path / ".sync")
    assert (set(index["managed"]), set(index["hashes"])) == (names, names)
    assert {path.name for path in (tmp_path / ".sync").iterdir()} == {"in-use", "index.json", "lock", "master"}


def test_what_arrived_is_entered_although_the_caller_has_gone(tmp_path):
    digest = hashlib.sha256(b"whole").hexdigest()
    request = {"root": str(tmp_path), "files": [["a", 5, digest]], "stale": [], "parts": [[digest, 0, 5]], "last": True}
    text = module.sources() + module.request_line(0, "commit", request) + b"whole"
    command = [sys.executable, "-c", module.BOOT, "60"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    process.stdin.write(text + b'{"id": 1, "op": "clo')
    process.stdin.close()
    assert (process.wait(20), process.stderr.read()) == (0, b"")
    assert list(load_index(tmp_path / ".sync")["managed"]) == ["a"]


def test_an_error_is_told_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match=r"here: .*file/x: Not a directory"):
        agent_call(HERE, "check", root=str(tmp_path / "file" / "x"), files=[], prune=[], master=["id", "mac"])


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent_can_be_read_by_old_pythons(name):
    ast.parse((PROJECT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"), feature_version=(3, 9))


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (["python3.77", "python3.14", "python3"], "python3.77 fitting"),  # of the master's minor version
        (["python3.13", "python3.14", "python3"], "python3.14 fitting"),
        (["broken python3.14", "python3.13"], "python3.13 fitting"),
        (["python3.14", "training"], "training training"),
        (["python3.14", "broken training"], "python3.14 fitting"),
        (["python3.14", "intel training"], "python3.14 fitting"),
        (["bare python3.77", "python3.13"], "python3.13 fitting"),  # Debian without python3-venv
        (["python3.14", "bare training"], "training training"),
        (["intel python3.14", "python3.13"], "python3.13 fitting"),  # Homebrew for Intel in /usr/local
    ],
)
def test_which_python_of_a_host_runs_the_agent(tmp_path, there, chosen):
    """It says whether it is the one that trains; the best other one can make an environment."""
    for name in there:
        kind, _, program = name.rpartition(" ")
        known = {
            "broken": "exit 127",
            "bare": 'case "$*" in *ensurepip*) exit 3 ;; esac; echo $0',
            "intel": "echo built for Intel; exit 3",
        }
        says = known.get(kind, "echo $0")
        (tmp_path / program).write_text(f'#!/bin/sh\n[ "$1" = -X ] && {{ echo {program} "$6"; exit; }}\n{says}\n')
        (tmp_path / program).chmod(0o755)
    command = [*module.start_command("60", str(tmp_path / "training"))[:-1], "77"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert done.stdout.strip() == chosen


def test_where_no_python_can_train_any_other_answers_and_tells_which_there_are(tmp_path):
    (tmp_path / "old").write_text('#!/bin/sh\n[ "$1" = -I ] || { echo "$6"; echo "$7"; exit; }\necho 3.9; exit 3\n')
    (tmp_path / "old").chmod(0o755)
    command = start_only(tmp_path / "none", tmp_path / "old", training=tmp_path / "gone")
    said = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    assert said[:3] == ["other", f"{tmp_path}/gone: does not run", f"{tmp_path}/old: 3.9"]
    done = subprocess.run(start_only(tmp_path / "none", training=tmp_path / "gone"), capture_output=True, text=True)
    error = module.no_answer("mini", done.returncode, done.stderr)
    assert "mini: no Python 3.9 or later was found; " + f"{tmp_path}/gone: does not run" in str(error)


def start_only(*pythons, training) -> list[str]:
    """No other Python is looked for."""
    _, _, script, *about = module.start_command("60", str(training))
    names = " ".join(map(str, pythons))
    return ["/bin/sh", "-c", re.sub(r"\nfind_python .*", f"\nfind_python {names}", script), *about]


def test_a_folder_of_path_with_a_slash_at_its_end_is_the_same_folder():
    """Else the stub of macOS in /usr/bin would not be known."""
    command = ["/bin/sh", "-xc", *module.start_command("60")[2:-1], "77"]
    trace = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin/", "HOME": "/x"}).stderr
    assert "/usr/bin/python3.77" in trace
    assert "//python" not in trace


def test_an_old_python_without_packages_runs_the_agent(tmp_path):
    """On a machine that has 3.9 this is 3.9."""
    find = f'. {PROJECT}/distributed/hosts/find_python.sh; find_python python3.9; echo "$other"'
    found = subprocess.run(["/bin/sh", "-c", find], capture_output=True, text=True).stdout.strip()
    oldest = found or str(Path(sys.base_prefix, "bin", "python3"))  # this one's, without the packages
    (tmp_path / "x").write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    project = {"project": str(tmp_path)}
    requests = [
        ("facts", {"names": ["no-such-package"], **project}),
        ("clock", {}),
        ("space", {"held": [""], **project}),
        ("code", {"files": [["x", digest], ["y", digest]], **project}),
        ("torch_facts", {"seconds": 30}),
        ("check", {"root": str(tmp_path), "files": [["x", 1, digest, True]], "prune": [], "master": ["id", "mac"]}),
        ("commit", {"root": str(tmp_path), "files": [], "stale": ["x"], "parts": []}),
    ]
    lines = [module.request_line(number, *request) for number, request in enumerate(requests)]
    command = [oldest, "-I", "-S", "-X", "utf8", "-c", module.BOOT, "60"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(b"".join([module.sources(), *lines]))
    process.stdin.flush()
    messages = {message["id"]: message for message in (json.loads(process.stdout.readline()) for _ in requests)}
    process.communicate()
    answers = {op: messages[number]["answer"] for number, (op, _) in enumerate(requests)}
    assert all(fits(answer, SHAPES[op]) for op, answer in answers.items()), answers
    assert answers["code"]["differ"][-1] == "y" and answers["space"]["free"] > 0
    assert answers["torch_facts"] == {"failed": "ModuleNotFoundError: No module named 'torch'"}


def test_nothing_is_imported_from_the_folder_of_the_host(tmp_path):
    for name in ("json", "signal", "hashlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)\n")
    text = module.sources() + module.request_line(0, "clock", {"last": True})
    command = [sys.executable, "-c", module.BOOT, "60"]
    done = subprocess.run(command, input=text, capture_output=True, cwd=tmp_path, env={})
    assert json.loads(done.stdout)["answer"]["clock"] == pytest.approx(time.time(), abs=20)


class Saying(LocalMachine):
    """A machine whose agent says this."""

    def __init__(self, text: str):
        super().__init__("odd")
        self.text = text

    def start(self, command, **more):
        raise NotImplementedError

    def run(self, command, **more):
        return super().run(["printf", "%s", self.text])


@pytest.mark.parametrize(
    "answer",
    [{}, {"damaged": "a"}, {"damaged": [3]}, {"damaged": None}],
)
def test_an_answer_of_another_shape_counts_as_none(answer):
    said = Saying(json.dumps({"id": 0, "answer": answer}))
    with pytest.raises(HostError, match=r"odd: its Python gave an answer that is not understood \(commit\)"):
        agent_call(said, "commit", root="/", files=[], stale=[], parts=[])


def test_what_a_shell_prints_is_passed_over():
    said = Saying('Welcome!\n{"id": 7}\n42\n{"id": 0, "answer": {"damaged": []}}\n')
    assert agent_call(said, "commit", root="/", files=[], stale=[], parts=[]) == {"damaged": []}
    with pytest.raises(HostError, match=r"odd: its Python gave no answer \(status 0\): Welcome!"):
        agent_call(Saying("Welcome!"), "commit", root="/", files=[], stale=[], parts=[])


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        ([int], [[], [1, 2]], [[1, "2"], "12", {"0": 1}, None]),
        ((int, str), [[1, "a"]], [[1], [1, "a", "b"], ["a", 1]]),
        ({"a": int | None}, [{"a": None}, {"a": 1, "b": 2}], [{}, {"a": "1"}, []]),
        (module.OneOf((int, [str])), [1, ["a"]], ["a", [1]]),
    ],
)
def test_shapes(shape, good, bad):
    assert all(fits(value, shape) for value in good)
    assert not any(fits(value, shape) for value in bad)
