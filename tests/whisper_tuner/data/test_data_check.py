import csv
import json
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from whisper_tuner.config import Profile
from whisper_tuner.data import audio_check
from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.check import PROBLEMS_FILE, check_data, check_manifest
from whisper_tuner.data.dataset import load_manifest, write_manifest
from whisper_tuner.data.labels import label_encoder, token_limit
from whisper_tuner.errors import ConfigError, DataError, ModelError
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.hub import check_model
from whisper_tuner.problems import Kind

BUNDLED = Path(__file__).parents[3] / "bundled"


def spoiled(source: Path, target: Path, share: float) -> None:
    target.write_bytes(source.read_bytes()[: int(source.stat().st_size * share)])


@pytest.fixture
def folder(tmp_path, audio_file):
    for number, name in enumerate(("a.wav", "b.wav", "c.wav", "d.wav", "e.flac", "f.wav")):
        audio_file(tmp_path / name, seconds=1 + number / 10, seed=number)
    audio_file(tmp_path / "long.wav", seconds=31)
    spoiled(tmp_path / "a.wav", tmp_path / "cut.wav", 0.5)
    spoiled(tmp_path / "e.flac", tmp_path / "cut.flac", 0.5)
    spoiled(tmp_path / "a.wav", tmp_path / "only-header.wav", 44 / (tmp_path / "a.wav").stat().st_size)
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "words.wav").write_text("these are words")
    shutil.copy(tmp_path / "b.wav", tmp_path / "copy-of-b.wav")
    shutil.copy(tmp_path / "c.wav", tmp_path / "copy-of-c.wav")
    return tmp_path


BAD_ROWS = [
    ("n1,gone.wav,text,", Kind.NO_AUDIO),
    ("n2,,text,", Kind.NO_AUDIO),
    ("n3,cut.wav,text,", Kind.TRUNCATED),
    ("n4,cut.flac,text,", Kind.TRUNCATED),
    ("n5,words.wav,text,", Kind.UNREADABLE),
    ("n6,empty.wav,text,", Kind.EMPTY_AUDIO),
    ("n7,only-header.wav,text,", Kind.EMPTY_AUDIO),
    ("n8,a.wav, ,", Kind.NO_TEXT),
    ("n9,long.wav,text,", Kind.TOO_LONG),
    ("n10,long.wav,text,4", Kind.DURATION),
    (f"n11,f.wav,{'zwölf ' * 200},", Kind.TOKENS),
    ("n12,d.wav,text,9.5", Kind.DURATION),
    ("n13,d.wav,text,nan", Kind.DURATION),
    ("n14,d.wav,one, two,3", Kind.COLUMNS),
    ('n15,d.wav,"never closed,', Kind.QUOTING),
    ("n16,a.wav,other text,", Kind.SAME_AUDIO),
    ("n17,./a.wav,fine,", Kind.SAME_ROW),
    ("n18,copy-of-b.wav,fine,", Kind.SAME_ROW),
    ("n19,copy-of-c.wav,other text,", Kind.SAME_AUDIO),
]
GOOD_ROWS = ["a,a.wav,fine,", "b,b.wav,fine,1.1", "c,c.wav,fine,", 'e,e.flac,"fine, too",', "a,d.wav,no speaker twice,"]


@pytest.fixture
def evict(monkeypatch):
    """A file's content goes to iCloud: macOS says so in a flag that only itself can set (man chflags there)."""
    stat, evicted = Path.stat, set()

    def flagged(path: Path, **more):
        found = stat(path, **more)
        if path not in evicted:
            return found
        fields = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return SimpleNamespace(**fields, st_flags=0x40000000)

    monkeypatch.setattr(Path, "stat", flagged)
    return evicted.add


@pytest.fixture
def profile(folder):
    """All that can be wrong with a row, once."""
    lines = ["id,audio,text,duration", *GOOD_ROWS, *(row for row, _ in BAD_ROWS)]
    (folder / "train.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Profile(base_model=str(BUNDLED / "model"), train=folder / "train.csv")


def test_every_kind_of_problem_is_found_with_its_line_and_listed(profile, folder):
    run, store = folder / "run", folder / "store"
    run.mkdir()
    manifest = check_data(profile, run, store)["train"]
    assert [sample.id for sample in manifest.samples] == ["a", "b", "c", "e", "d.wav"]
    expected = [(line, kind) for line, (_, kind) in enumerate(BAD_ROWS, start=len(GOOD_ROWS) + 2)]
    assert [(problem.line, problem.kind) for problem in manifest.problems] == expected
    listed = list(csv.DictReader((run / PROBLEMS_FILE).open(encoding="utf-8")))
    assert [(int(row["line"]), row["kind"]) for row in listed] == expected
    assert {row["manifest"] for row in listed} == {str(folder / "train.csv")} and all(row["what"] for row in listed)


def test_refusing_names_counts_and_rows_and_where_all_are_listed(profile, folder):
    strict = Profile(base_model=profile.base_model, train=profile.train, bad_rows="refuse")
    with pytest.raises(DataError) as error:
        check_data(strict, folder / "run", folder / "store")
    said = str(error.value)
    assert error.value.exit_status == 4
    assert f"{len(BAD_ROWS)} rows cannot be used" in said and "3 wrong duration" in said
    assert "train.csv line 7: no such audio file" in said and "bad_rows = skip" in said
    listed = folder / "store" / PROBLEMS_FILE
    assert str(listed) in said and len(listed.read_text(encoding="utf-8").splitlines()) == len(BAD_ROWS) + 1


def test_what_is_left_is_what_the_ranks_keep(profile, folder, english):
    """The list in the run folder is read back whole, and every text in it fits: the ranks check neither again."""
    model, processor = english  # 64 positions
    checkpoint = folder / "model"
    model.save_pretrained(checkpoint)
    processor.save_pretrained(checkpoint)
    profile = Profile(base_model=str(checkpoint), train=profile.train)
    samples = check_data(profile, folder, folder / "store")["train"].samples
    write_manifest(folder / "list.csv", samples)
    again = load_manifest(folder / "list.csv", check_audio=False)
    assert [s.id for s in again.samples] == [s.id for s in samples] and not again.problems
    encoder = label_encoder(model, processor.tokenizer)
    assert all(encoder.encode(sample.text) for sample in samples)


@pytest.mark.parametrize(("task", "kept"), [("transcribe", 2), ("translate", 1)])
def test_the_ranks_keep_what_is_left_of_a_translation(multilingual, multilingual_folder, tmp_path, task, kept):
    """Sixty letters fill the decoder; the space before English text is one too many."""
    for name in ("a", "b"):
        soundfile.write(tmp_path / f"{name}.wav", np.full(1600, ord(name) / 1e3, np.float32), 16_000)
    (tmp_path / "train.csv").write_text(f"audio,text\na.wav,short\nb.wav,{'x' * 60}\n")
    profile = Profile(base_model=str(multilingual_folder), language="Japanese", task=task, train=tmp_path / "train.csv")
    samples = check_data(profile, tmp_path / "run", tmp_path / "store")["train"].samples
    model, processor = multilingual
    encoder = label_encoder(model, processor.tokenizer, language="Japanese", task=task)
    assert len(samples) == kept and all(encoder.encode(sample.text) for sample in samples)


def test_a_manifest_without_a_usable_row_is_an_error_also_for_the_test_set(profile, folder):
    (folder / "test.csv").write_text("audio,text\ngone.wav,words\n")
    with pytest.raises(DataError, match=r"test\.csv: no usable row"):
        check_data(replace(profile, test=folder / "test.csv"), folder, folder / "store")


def test_clips_are_opened_only_once(tmp_path, monkeypatch):
    audio = tmp_path / "audio"
    audio.mkdir()
    soundfile.write(tmp_path / "x.wav", np.zeros(1600, np.float32), 16_000)
    stem = (tmp_path / "x.wav").read_bytes()
    lines = ["audio,text,duration"]
    for number in range(40):
        (audio / f"{number}.wav").write_bytes(stem[:-4] + number.to_bytes(4, "little"))
        lines.append(f"audio/{number}.wav,text {number},0.1")
    (tmp_path / "m.csv").write_text("\n".join(lines))
    first = check_manifest(tmp_path / "m.csv", 30.0, tmp_path / "store")
    assert len(first.samples) == 40 and not first.problems

    def never(path):
        raise AssertionError(f"{path} was opened again")

    monkeypatch.setattr(audio_check, "examine", never)
    assert check_manifest(tmp_path / "m.csv", 30.0, tmp_path / "store") == first


def test_a_pass_that_is_stopped_is_taken_up_by_the_next(folder, monkeypatch):
    stop, opened = threading.Event(), []
    examine = audio_check.examine

    def one_then_stop(path):
        opened.append(path)
        stop.set()
        return examine(path)

    (folder / "m.csv").write_text("audio,text\na.wav,a\nb.wav,b\nc.wav,c\n")
    monkeypatch.setattr(audio_check, "_THREADS", 1)
    monkeypatch.setattr(audio_check, "examine", one_then_stop)
    with pytest.raises(audio_check.Stopped):
        check_manifest(folder / "m.csv", 30.0, folder / "store", stop)
    stop.clear()
    check_manifest(folder / "m.csv", 30.0, folder / "store")
    assert [path.name for path in opened] == ["a.wav", "b.wav", "c.wav"]


def test_a_pass_that_is_interrupted_keeps_what_was_known(folder, monkeypatch):
    (folder / "m.csv").write_text("audio,text\na.wav,a\nb.wav,b\nc.wav,c\n")
    check_manifest(folder / "m.csv", 30.0, folder / "store")
    (folder / "b.wav").touch()
    opened, examine = [], audio_check.examine

    def interrupted_at_first(path):
        opened.append(path.name)
        if len(opened) == 1:
            raise KeyboardInterrupt
        return examine(path)

    monkeypatch.setattr(audio_check, "examine", interrupted_at_first)
    with pytest.raises(KeyboardInterrupt):
        check_manifest(folder / "m.csv", 30.0, folder / "store")
    check_manifest(folder / "m.csv", 30.0, folder / "store")
    assert opened == ["b.wav", "b.wav"]


def test_a_file_that_goes_away_while_it_is_looked_at_is_not_there(tmp_path, audio_file):
    clip = audio_file(tmp_path / "a.wav", seconds=1)

    class GoesAway(threading.Event):
        def is_set(self) -> bool:  # asked once the file's size is known, before it is opened
            clip.unlink()
            return False

    assert audio_check.AudioIndex(stop=GoesAway())[clip].kind == Kind.NO_AUDIO


def test_audio_that_is_in_icloud_only_is_named_and_not_opened(folder, monkeypatch, evict):
    """Also where its header is known from before: training would open it."""
    (folder / "m.csv").write_text("audio,text\na.wav,one\nb.wav,two\n")
    check_manifest(folder / "m.csv", 30.0, folder / "store")
    evict(folder / "a.wav")
    opened, examine = [], audio_check.examine
    monkeypatch.setattr(audio_check, "examine", lambda path: opened.append(path.name) or examine(path))
    for store, expected in (("store", []), ("new store", ["b.wav"])):
        manifest = check_manifest(folder / "m.csv", 30.0, folder / store)
        (problem,) = manifest.problems
        assert opened == expected
        assert [sample.audio.name for sample in manifest.samples] == ["b.wav"]
        assert problem.kind == Kind.EVICTED and "a.wav is in iCloud only" in problem.what
        assert problem.what.endswith(f"In Finder: Keep Downloaded, or run: brctl download {folder}")


def test_a_model_that_is_in_icloud_only_is_named(tmp_path, evict):
    shutil.copytree(BUNDLED / "model", tmp_path / "model")
    evict(tmp_path / "model" / "model.safetensors")
    with pytest.raises(ModelError, match=r"model.safetensors is in iCloud only\n.*brctl download") as caught:
        check_model(Profile(base_model=str(tmp_path / "model"), train=tmp_path / "train.csv"))
    assert str(tmp_path / "model") in str(caught.value)


def test_audio_whose_length_is_not_known_is_sound(tmp_path, audio_file, need_program):
    """An MP3 without a Xing header, a WAV as SoX pipes it, a FLAC that was written into a pipe."""
    wav = audio_file(tmp_path / "a.wav", seconds=20, seed=1)
    ffmpeg = [need_program("ffmpeg"), "-v", "error", "-i", wav]
    subprocess.run([*ffmpeg, "-write_xing", "0", "-b:a", "40k", tmp_path / "b.mp3"], check=True)
    piped = subprocess.run([*ffmpeg, "-f", "flac", "-"], check=True, capture_output=True)
    (tmp_path / "c.flac").write_bytes(piped.stdout)
    data = bytearray(wav.read_bytes())
    at = data.index(b"data") + 4
    data[at : at + 4] = (0x7FFFF000).to_bytes(4, "little")
    (tmp_path / "d.wav").write_bytes(data)
    for name in ("b.mp3", "c.flac", "d.wav"):
        seconds, kind, what = audio_check.examine(tmp_path / name)
        assert (kind, what) == ("", "") and seconds == pytest.approx(20, rel=0.02)
        assert len(load_audio(tmp_path / name)) == pytest.approx(20 * 16_000, rel=0.02)
    short = (tmp_path / "b.mp3").read_bytes()
    subprocess.run([*ffmpeg, "-b:a", "40k", tmp_path / "e.mp3"], check=True)
    (tmp_path / "e.mp3").write_bytes((tmp_path / "e.mp3").read_bytes()[: len(short) // 2])
    assert audio_check.examine(tmp_path / "e.mp3")[1] == Kind.TRUNCATED


def test_a_changed_file_is_looked_at_again_and_a_damaged_index_does_no_harm(profile, folder):
    store = folder / "store"
    (folder / "m.csv").write_text("audio,text\na.wav,fine\n")
    assert check_manifest(folder / "m.csv", 30.0, store).samples
    (folder / "a.wav").write_bytes(b"")
    assert check_manifest(folder / "m.csv", 30.0, store).problems[0].kind == Kind.EMPTY_AUDIO
    for damage in ("", "[]"):
        FactStore(store / CACHE).file.write_text(damage)
        assert check_manifest(folder / "m.csv", 30.0, store).problems[0].kind == Kind.EMPTY_AUDIO


@pytest.mark.parametrize("name", ["english", "multilingual"])
@pytest.mark.parametrize(
    ("language", "task"), [("fr", "transcribe"), ("Japanese", "transcribe"), ("ja", "translate"), ("THAI", "translate")]
)
@given(text=st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=70))
@example(text="<|endoftext|>" * 30)
@example(text=" leading")
@example(text="a" * 60)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_token_limits_are_those_of_the_label_encoder(name, language, task, text, request):
    model, processor = request.getfixturevalue(name)
    folder = request.getfixturevalue(f"{name}_folder")
    encoder = label_encoder(model, processor.tokenizer, language=language, task=task)
    try:
        encoder.encode(text)
        fits = True
    except DataError:
        fits = False
    assert (token_limit(str(folder), language=language, task=task).excess(text) == "") is fits


def test_a_language_that_the_model_does_not_know_is_an_error(multilingual_folder, english_folder):
    for language in ("", "xx", "Klingon"):
        with pytest.raises(ConfigError, match="language"):
            token_limit(str(multilingual_folder), language=language)
    assert token_limit(str(multilingual_folder), language="French") == token_limit(
        str(multilingual_folder), language="fr"
    )
    assert token_limit(str(english_folder), language="").longest == 62


def test_models_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        token_limit(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        token_limit(str(tmp_path))
    with pytest.raises(ModelError, match="not on this disk"):
        token_limit("nobody/no-such-model")


def test_rows_without_text_are_kept_where_the_profile_trains_them(folder, english_folder):
    (folder / "m.csv").write_text("id,audio,text\na,a.wav,\nb,b.wav,fine\n")
    profile = Profile(base_model=str(english_folder), train=folder / "m.csv", test=folder / "m.csv", no_speech="train")
    run_dir = folder / "run"
    run_dir.mkdir()
    found = check_data(profile, run_dir, folder / "store")
    assert [[sample.text for sample in found[kind].samples] for kind in ("train", "test")] == [["", "fine"]] * 2
    skipping = replace(profile, no_speech="skip")
    assert [sample.id for sample in check_data(skipping, run_dir, folder / "store")["train"].samples] == ["b"]


def test_a_row_in_a_language_that_the_model_does_not_know_is_left_out(
    folder, multilingual_folder, english_folder, tmp_path
):
    """As Cantonese, which only the newest models know. English-only models look at no language."""
    model = shutil.copytree(multilingual_folder, tmp_path / "older")
    stated = json.loads((model / "generation_config.json").read_text())
    del stated["lang_to_id"]["<|yue|>"]
    (model / "generation_config.json").write_text(json.dumps(stated))
    (folder / "m.csv").write_text("id,audio,text,language\na,a.wav,one,yue\nb,b.wav,two,de\nc,c.wav,three,\n")
    run_dir = folder / "run"
    run_dir.mkdir()

    def ids(base):
        profile = Profile(base_model=str(base), train=folder / "m.csv", language="fr")
        manifest = check_data(profile, run_dir, folder / "store")["train"]
        return [sample.id for sample in manifest.samples], manifest.problems

    kept, [problem] = ids(model)
    assert kept == ["b", "c"] and problem.kind == Kind.LANGUAGE
    assert str(problem) == "line 2: a: the model does not know the language 'yue'"
    assert ids(multilingual_folder) == ids(english_folder) == (["a", "b", "c"], ())
