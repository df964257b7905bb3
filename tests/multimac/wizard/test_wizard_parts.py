"""Pieces of the wizard: sections of a config.ini, manifests found and split, what training together brings."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributed.checkup import this_machine
from distributed.hosts.discovery import Candidate, Seen, State
from distributed.plan.automatic import Conditions, Measured
from distributed.plan.forecast import Speed
from distributed.ssh.host import Host, Hosts
from multimac.view.terminal import Console
from multimac.wizard import duration, flow, hosts, model
from multimac.wizard.data import beside, find
from multimac.wizard.draft import Data, Draft, Group, Model, with_sections
from multimac.wizard.hosts import speed_up, suggested_strategy
from multimac.wizard.questions import Questions
from whisper_tuner.config import ConfigFile
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.formats.rows import AS_IT_IS
from whisper_tuner.errors import ConfigError, DataError, ExitStatus, ModelError, TunerError

MINE = ("profile:mine", {"epochs": "5", "method": "lora"})


def test_a_new_section_is_appended_after_one_blank_line():
    assert (
        with_sections("[DEFAULT]\nseed = 1\n", [MINE])
        == "[DEFAULT]\nseed = 1\n\n[profile:mine]\nepochs = 5\nmethod = lora\n"
    )
    assert with_sections("[DEFAULT]\nseed = 1", [MINE]).startswith("[DEFAULT]\nseed = 1\n\n[profile:mine]")
    assert with_sections("", [MINE]).startswith("[profile:mine]")


def test_windows_line_ends_and_a_byte_order_mark_stay():
    text = "\ufeff[DEFAULT]\r\nseed = 1\r\n"
    assert with_sections(text, [MINE]) == text + "\r\n[profile:mine]\r\nepochs = 5\r\nmethod = lora\r\n"


def test_a_section_is_replaced_without_its_neighbours_comments():
    text = "# a\n[profile:mine]\nepochs = 9\n# old\n\n# of the next one\n[model:x]\nbase_model = a/b\n"
    want = "# a\n[profile:mine]\nepochs = 5\nmethod = lora\n# old\n\n# of the next one\n[model:x]\nbase_model = a/b\n"
    assert with_sections(text, [MINE]) == want


def sample(number: int, text: str) -> Sample:
    return Sample(id=str(number), audio=Path(f"{number}.wav"), text=text, duration_s=1.0)


def test_manifests_are_found_by_header_and_grouped_by_name(tmp_path):
    for name in ("a/train.csv", "a/dev.csv", "a/test.tsv", "b/fr_train.jsonl", "b/fr_test.jsonl", "c/notes.csv"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        header = {".csv": "audio,text\n", ".tsv": "audio\ttext\n", ".jsonl": '{"audio": "x", "text": "y"}\n'}[
            path.suffix
        ]
        path.write_text("day,note\n" if "notes" in name else header)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "train.csv").write_text("audio,text\n")
    (tmp_path / "d").mkdir()
    for name in ("d/1.wav", "d/1.txt", "d/2.wav"):
        (tmp_path / name).touch()
    for kind in ("train", "test"):  # as an earlier run has split the folder
        (tmp_path / f"d-{kind}.csv").write_text("audio,text\n")
    found = [{kind: path.name for kind, path in files.items()} for files in find(tmp_path)]
    assert found == [
        {"train": "d-train.csv", "test": "d-test.csv"},
        {"train": "train.csv", "validation": "dev.csv", "test": "test.tsv"},
        {"train": "fr_train.jsonl", "test": "fr_test.jsonl"},
        {"train": "d"},
    ]
    assert beside(tmp_path / "a/train.csv", AS_IT_IS).keys() == {"train", "validation"}


def test_a_manifest_that_is_named_may_end_as_it_likes(tmp_path):
    for name in ("train.txt", "test.txt", "notes.txt"):
        (tmp_path / name).write_text("day,note\n" if name == "notes.txt" else "audio,text\n")
    assert beside(tmp_path / "train.txt", AS_IT_IS) == {"train": tmp_path / "train.txt", "test": tmp_path / "test.txt"}
    (tmp_path / "mine.txt").write_text("audio,text\n")
    assert beside(tmp_path / "mine.txt", AS_IT_IS) == {"train": tmp_path / "mine.txt"}
    with pytest.raises(
        DataError, match=r"test\.txt is the test set of train\.txt, which lies beside it\n  Name .*train"
    ):
        beside(tmp_path / "test.txt", AS_IT_IS)
    (tmp_path / "train.txt").unlink()
    assert beside(tmp_path / "test.txt", AS_IT_IS) == {"train": tmp_path / "test.txt"}


def test_speed_up_is_that_of_the_forecast(job):
    """Each step takes 0.2 s beside its clips, of 0.1 s each: 16 clips 1.8 s alone, 1.0 s on two."""
    own = job.with_profile(batch_size=16).with_strategy("allreduce")
    host = Speed(host="a", clips_s=8.0, step_s=1.0, sizes=[[8, 1.0], [16, 1.8]], trainable=1000)

    def times(*speeds: Speed) -> float | None:
        return speed_up(own, {"train": 1600}, speeds, Measured(bytes_s=1e12))

    assert times(host, host) == pytest.approx(1.8, rel=0.01)
    assert times(host) == 1.0
    assert times(host, Speed(host="b", problem="gone")) is None and times() is None


@pytest.mark.parametrize(
    ("parameters", "steps", "strategy"),
    [(250_000, 1000, "allreduce"), (25_000_000, 1000, "diloco"), (25_000_000, 20, "allreduce")],
)
def test_the_strategy_follows_payload_and_length(parameters, steps, strategy):
    """2 hosts send the payload once; 1 MB takes 0.08 s at 100 Mbit/s, 100 MB 8 s."""
    conditions = Conditions(parameters=parameters, hosts=2, steps=steps, measured=Measured(step_s=1.0))
    assert suggested_strategy(conditions) == strategy


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    """One clip, which a split has put into a file of its own."""
    (tmp_path / "config.ini").write_text("")
    manifests, split_off = {"train": tmp_path / "all.csv"}, {"train": tmp_path / "all-train.csv"}
    data = Data(manifests=manifests, split=split_off, samples={"train": (sample(1, "one"),)})
    tiny = Model(base_model="openai/whisper-tiny")
    return Draft(config_path=tmp_path / "config.ini", config_text="", model=tiny, data=data)


def test_a_file_that_appears_while_somebody_answers_is_not_replaced(draft, tmp_path):
    (tmp_path / "all-train.csv").write_text("somebody else's")
    with pytest.raises(ConfigError, match=r"all-train.csv was changed meanwhile"):
        draft.save()
    assert (tmp_path / "all-train.csv").read_text() == "somebody else's"
    assert (tmp_path / "config.ini").read_text() == ""


def test_another_section_that_appears_in_config_ini_stays(draft, tmp_path):
    config = tmp_path / "config.ini"
    draft.name = "mine"
    config.write_text("[profile:other]\nepochs = 3\n")
    draft.save()
    assert ConfigFile(config).has("profile", "other") and ConfigFile(config).has("profile", "mine")


@pytest.mark.parametrize("text", ["[DEFAULT]\nseed = 7\n", "[profile:mine]\nepochs = 3\n"])
def test_a_change_of_config_ini_that_matters_is_not_written_over(draft, tmp_path, text):
    draft.name = "mine"
    (tmp_path / "config.ini").write_text(text)
    with pytest.raises(ConfigError, match=r"config.ini was changed meanwhile"):
        draft.save()
    assert (tmp_path / "config.ini").read_text() == text and not (tmp_path / "all-train.csv").exists()


def test_a_hosts_file_that_pairing_wrote_meanwhile_stays_and_the_new_one_gets_another_name(draft, tmp_path):
    hosts = tmp_path / "distributed_hosts.json"
    draft.group = Group(hosts=Hosts(master=Host(address="a"), workers=()), path=hosts, text="{}")
    hosts.write_text("pairing's")
    written = draft.save()
    assert hosts.read_text() == "pairing's" and (tmp_path / "distributed_hosts-2.json").read_text() == "{}"
    assert "distributed_hosts-2.json" in (tmp_path / "config.ini").read_text() and "-2.json" in " ".join(written)


def test_what_cannot_all_be_written_is_not_written_at_all(draft, tmp_path):
    draft.group = Group(
        hosts=Hosts(master=Host(address="a"), workers=()), path=tmp_path / "gone" / "hosts.json", text="{}"
    )
    with pytest.raises(ConfigError, match="No such file"):
        draft.save()
    assert [path.name for path in tmp_path.iterdir()] == ["config.ini"]
    assert (tmp_path / "config.ini").read_text() == ""


def test_a_model_names_the_method_that_fits(tmp_path, monkeypatch):
    """Where it needs frozen weights in fewer bits, that is said."""
    monkeypatch.setattr(model, "memory_here", lambda: int(13e9))
    (tmp_path / "config.ini").write_text("")
    titles = {
        option.value: option.title for option in model.options(model.offered(ConfigFile(tmp_path / "config.ini")))
    }
    assert "needs 12.8 GB" in titles["openai/whisper-small"] and "only" not in titles["openai/whisper-small"]
    assert "LoRA only: 12.3 GB" in titles["openai/whisper-medium"]
    assert "LoRA only: " in titles["openai/whisper-large-v3-turbo"]
    assert titles["openai/whisper-large-v3-turbo"].endswith(", int8")


def test_on_a_mac_a_model_has_what_metal_recommends_and_takes_more(monkeypatch):
    """Of 16 GB about 70 %; attention on its GPU keeps 1.7 GB more of a clip of 30 s."""
    small = Model(base_model="openai/whisper-small", shape=model.shape_of("openai/whisper-small"))
    monkeypatch.setattr(this_machine, "machine_memory", lambda: {"total": 16 * 10**9})
    monkeypatch.setattr(this_machine, "_card", lambda: ("", 0))
    elsewhere = model.memory_needed(small, "lora")
    monkeypatch.setattr(this_machine, "is_macos", lambda: True)
    monkeypatch.setattr(this_machine.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(model, "memory_here", this_machine.memory_here.__wrapped__)
    assert model.memory_here() == 11_200_000_000
    assert model.memory_needed(small, "lora") - elsewhere == pytest.approx(1.7e9, rel=0.2)


def test_of_a_card_its_own_memory_counts(monkeypatch):
    small = Model(base_model="openai/whisper-small", shape=model.shape_of("openai/whisper-small"))
    monkeypatch.setattr(this_machine, "_card", lambda: ("", 0))
    elsewhere = model.memory_needed(small, "decoder")
    monkeypatch.setattr(this_machine, "_card", lambda: ("a card", 24 * 10**9))
    monkeypatch.setattr(model, "memory_here", this_machine.memory_here.__wrapped__)
    assert model.memory_here() == 24 * 10**9
    assert 12.9e9 < model.memory_needed(small, "full", 8) < 16e9  # 12.9 GB were measured, and the context comes to it
    assert model.memory_needed(small, "decoder") < elsewhere


def test_a_small_mac_may_train_on_short_clips_what_clips_of_30_s_make_too_large(tmp_path, monkeypatch):
    """Nobody has told yet how long the clips are; the preflight knows. Each fits a terminal of 80 columns."""
    monkeypatch.setattr(model, "memory_here", lambda: int(3e9))
    monkeypatch.setattr(model, "device_here", lambda: "mps")
    (tmp_path / "config.ini").write_text("")
    offered = {option.value: option for option in model.options(model.offered(ConfigFile(tmp_path / "config.ini")))}
    assert "LoRA only: 2.6 GB" in offered["openai/whisper-small"].title
    medium = offered["openai/whisper-medium"]
    assert not medium.unfit and medium.title.endswith("clips of 10 s: 2.7 GB, int8")
    assert "does not fit: needs" in offered["openai/whisper-large-v3"].unfit
    assert "this machine has 3.0 GB" in offered["openai/whisper-large-v3"].unfit
    assert all(len(f" » {option.title}") < 80 and len(option.unfit) < 80 for option in offered.values())
    choices = []
    model.ask_method(
        SimpleNamespace(select=lambda key, message, options, default: choices.extend(options) or default),
        Model(base_model="openai/whisper-small", shape=model.shape_of("openai/whisper-small")),
    )
    assert [choice.value for choice in choices if not choice.unfit] == ["lora"]


def broken_model(folder: Path) -> Path:
    shutil.copytree(model.BUNDLED, folder / "broken")
    (folder / "broken" / "generation_config.json").write_text("{")
    return folder / "broken"


def test_a_rate_that_is_none_is_told_with_its_place(tmp_path):
    (tmp_path / "config.ini").write_text(f"[model:mine]\nbase_model = {model.BUNDLED}\nlearning_rate = fast\n")
    with pytest.raises(ConfigError, match=r"config.ini:3 \[model:mine\]: learning_rate = fast: expected a number"):
        model.offered(ConfigFile(tmp_path / "config.ini"))


@pytest.mark.parametrize("answer", ["mine", "{folder}"])
def test_a_damaged_model_is_told_when_it_is_chosen(tmp_path, answer):
    """By its section, or by its folder."""
    folder = broken_model(tmp_path)
    (tmp_path / "config.ini").write_text(f"[model:mine]\nbase_model = {folder}\n")
    (tmp_path / "answers").write_text(f"[answers]\nmodel = {answer.format(folder=folder)}\n")
    config = ConfigFile(tmp_path / "config.ini")
    with pytest.raises(TunerError, match=r"generation_config.json is damaged") as caught:
        model.ask_model(Questions(tmp_path / "answers"), config, model.offered(config)["mine"], Console())
    assert caught.value.exit_status == ExitStatus.DATA


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            b"[answers]\nname = a\nwhere\n",
            "Source contains parsing errors: 'answers' [line 3]",
        ),
        (b'[\n{"name": "a"}]', "answers: the file must hold one object"),
        (b"[]", "answers: the file must hold one object"),
        (b"[answers]\nname = caf\xe9\n", "UTF-8 text"),
    ],
)
def test_a_file_of_answers_that_is_none_is_told(tmp_path, text, words):
    (tmp_path / "answers").write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        Questions(tmp_path / "answers")
    assert words in str(caught.value) and "<string>" not in str(caught.value)


def test_no_model_is_suggested_where_none_can_be_had(tmp_path, monkeypatch, capsys):
    """The only one on this disk is the bundled one, which knows no French."""
    monkeypatch.setattr(model, "folder_here", lambda name: tmp_path if name == str(model.BUNDLED) else None)
    monkeypatch.setattr(model, "_not_at_hand", lambda name, console: ModelError("gone"))
    assert model.suggested_model(ConfigFile(tmp_path / "config.ini", ""), 600.0, "fr", Console()) is None
    assert "cannot be fetched now" in capsys.readouterr().out


@pytest.mark.parametrize("near", ["voice", "voice/metadata.csv"])
def test_a_model_beside_the_folder_of_recordings_is_offered(tmp_path, near):
    shutil.copytree(model.BUNDLED, tmp_path / "mine")
    (tmp_path / "voice").mkdir()
    (tmp_path / "voice" / "metadata.csv").touch()
    assert str(tmp_path / "mine") in model.offered(ConfigFile(tmp_path / "config.ini", ""), tmp_path / near)


def test_a_table_beside_recordings_is_offered_whatever_its_columns_are_called(tmp_path):
    """But not what Excel writes while a file is open, nor one without recordings."""
    above = ("home/texte.xlsx", "home/voice/c.wav")
    for name in ("voice/a.wav", "voice/texte.xlsx", "voice/~$texte.xlsx", "taxes/2026.xlsx", "other/b.wav", *above):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    (tmp_path / "other/list.csv").write_text("Datei;Text\nb.wav;eins\n")
    assert [files["train"] for files in find(tmp_path)] == [
        tmp_path / name for name in ("home/texte.xlsx", "other/list.csv", "voice/texte.xlsx")
    ]


def test_a_folder_may_be_named_with_all_its_parts(tmp_path):
    (tmp_path / "cv" / "clips").mkdir(parents=True)
    for name in ("train", "dev", "test", "other"):
        (tmp_path / "cv" / f"{name}.tsv").write_text("client_id\tpath\tsentence\n")
    names = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}
    assert beside(tmp_path / "cv", AS_IT_IS) == {kind: tmp_path / "cv" / name for kind, name in names.items()}


@pytest.mark.parametrize(
    ("hours", "memory", "gpu", "there", "suggested"),
    [
        (0.3, 16e9, True, "small", "small"),
        (20, 16e9, True, "small", "small"),
        (0.3, 16e9, False, "small", "small"),  # on a CPU with two cores
        (2, 16e9, False, "base", "base"),
        (20, 16e9, False, "tiny", "tiny"),
        (0.3, 1.8e9, True, "base", "base"),  # small needs more
        (0.3, 16e9, True, "", "bundled"),  # the hub does not answer, and none of them is here
        (0.3, 16e9, True, "tiny", "tiny"),
    ],
)
def test_the_model_that_is_suggested_follows_memory_and_speech(
    tmp_path, monkeypatch, capsys, hours, memory, gpu, there, suggested
):
    """there: the only one that is on this disk, but for the bundled one."""
    monkeypatch.setattr(model, "memory_here", lambda: memory)
    monkeypatch.setattr(model, "device_here", lambda: "mps" if gpu else "cpu")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    here = {f"openai/whisper-{there}", str(model.BUNDLED)}
    monkeypatch.setattr(model, "folder_here", lambda name: tmp_path if name in here else None)
    monkeypatch.setattr(model, "_not_at_hand", lambda name, console: None if name in here else ModelError("gone"))
    found = model.suggested_model(ConfigFile(tmp_path / "config.ini", ""), hours * 3600, "", Console())
    assert found.base_model == (str(model.BUNDLED) if suggested == "bundled" else f"openai/whisper-{suggested}")
    expected = suggested == "bundled" or (there == "tiny" and hours < 1)
    assert ("cannot be fetched now" in capsys.readouterr().out) == expected


def test_of_machines_that_a_key_opens_neither_name_nor_key_is_asked(tmp_path, monkeypatch):
    seen = [
        Seen(candidate=Candidate(name="localhost", addresses=("127.0.0.1",), port=2222), state=State.PAIRED),
        Seen(candidate=Candidate(name="b.local", addresses=("10.0.0.8",)), state=State.SILENT),
    ]
    monkeypatch.setattr(hosts, "found", lambda console, path: seen)
    questions, asked = Questions(answers={}), []
    questions.interactive = True

    def enter(key, message, suggested, check=str):
        asked.append(key)
        return suggested

    monkeypatch.setattr(questions, "text", enter)
    group = hosts._ask_new(questions, tmp_path / "distributed_hosts.json", tmp_path, Console())
    assert asked == ["workers"]
    assert [(one.address, one.port) for one in group.hosts.workers] == [("localhost", 2222)]


def test_ready_says_how_many_machines_were_found():
    near = [Candidate(name="a.local", addresses=("10.0.0.7",))]
    titles = [flow._with_count(option, near).title for option in flow.READY]
    assert titles[1] == "train on several machines: 1 other machine found" and titles[0] == flow.READY[0].title
    assert flow._with_count(flow.READY[1], []) is flow.READY[1]


@pytest.mark.parametrize(
    ("errors", "words", "told"),
    [(0, 0, ""), (6, 80, "about 8 errors in 100 words, by a few test clips. It knows"), (80, 80, "about 100 errors")],
)
def test_what_a_model_hears_before_it_is_trained_is_told(errors, words, told):
    found = duration.untouched_told(Speed(host="a", errors=errors, words=words), "whisper-base")
    assert told in found and bool(found) == bool(told) and ("little can be gained" in found) == ("knows" in told)


@pytest.mark.parametrize(
    ("method", "rate", "errors", "suited"),
    [
        ("lora", "0.001", 6, "0.0002"),
        ("lora", "0.001", 80, "0.001"),
        ("lora", "0.0002", 6, "0.0002"),  # an earlier run's, or the user's own
        ("full", "2.5e-05", 6, "2.5e-05"),
    ],
)
def test_the_rate_is_lower_for_speech_that_the_model_knows(draft, method, rate, errors, suited, capsys):
    shape = model.shape_of("openai/whisper-base")
    draft.model, draft.method = Model(base_model="openai/whisper-base", shape=shape), method
    draft.settings = {"learning_rate": rate}
    duration.suit_rate(draft, Speed(host="a", errors=errors, words=80), Console())
    assert draft.settings == {"learning_rate": suited}
    assert ("a fifth of the usual one" in capsys.readouterr().out) == (rate != suited)
