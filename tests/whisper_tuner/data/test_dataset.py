import json
import os

import pytest

from whisper_tuner.data.dataset import MOST_LETTERS, Sample, load_manifest, write_manifest
from whisper_tuner.data.formats.rows import AUDIO_COLUMNS, SPEAKER_COLUMNS, TEXT_COLUMNS
from whisper_tuner.errors import DataError
from whisper_tuner.problems import Kind

NOTE = "the id of 2 rows is that of an earlier one, first on line 3: it is called by its file"


@pytest.fixture
def folder(tmp_path, audio_file):
    (tmp_path / "audio").mkdir()
    audio_file(tmp_path / "audio" / "a.wav", seconds=0.5)
    audio_file(tmp_path / "audio" / "b.flac", seconds=1.25, rate=44_100)
    return tmp_path


def manifest(folder, text, name="m.csv", encoding="utf-8"):
    path = folder / name
    path.write_text(text, encoding=encoding)
    return path


def test_every_accepted_column_name(folder):
    for audio, text in [*((audio, "text") for audio in AUDIO_COLUMNS), *(("audio", text) for text in TEXT_COLUMNS)]:
        loaded = load_manifest(manifest(folder, f"{text},{audio}\nbonjour,audio/a.wav\n"))
        (sample,) = loaded.samples
        assert (sample.audio, sample.text, sample.line) == (folder / "audio/a.wav", "bonjour", 2), (audio, text)
        assert sample.duration_s == pytest.approx(0.5)
        assert loaded.problems == ()


def test_reads_json_lines(folder):
    rows = [
        {"audio_filepath": "audio/a.wav", "text": "un", "duration": 0.5},
        {"audio_filepath": str(folder / "audio/b.flac"), "text": "deux", "id": 7},
    ]
    loaded = load_manifest(manifest(folder, "\n".join(map(json.dumps, rows)), "m.jsonl"))
    assert [(s.id, s.text, s.duration_s, s.line) for s in loaded.samples] == [
        ("audio/a.wav", "un", 0.5, 1),
        ("7", "deux", 1.25, 2),
    ]


def test_a_text_too_long_for_any_clip_is_left_out_before_a_tokenizer_sees_it(folder):
    longest = MOST_LETTERS + 125  # b.flac lasts 1.25 s
    loaded = load_manifest(manifest(folder, f"audio,text\naudio/b.flac,{'x' * (longest + 1)}\n"))
    assert [(p.kind, p.what) for p in loaded.problems] == [
        (Kind.TOKENS, "the text of audio/b.flac has 10126 characters")
    ]
    [sample] = load_manifest(manifest(folder, f"audio,text\naudio/b.flac,{'x' * longest}\n")).samples
    assert len(sample.text) == longest


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "pipe.csv")
    with pytest.raises(DataError, match=r"pipe\.csv is not a file"):
        load_manifest(folder / "pipe.csv")


def test_a_host_reads_samples_whose_audio_lies_elsewhere(tmp_path):
    path = manifest(tmp_path, "audio,text,duration\nfar.wav,un,1.5\nother.wav,deux,\n")
    loaded = load_manifest(path, check_audio=False)
    assert [sample.duration_s for sample in loaded.samples] == [1.5]
    assert "no duration" in str(loaded.problems[0])


@pytest.mark.parametrize(
    ("column", "stated", "kept"),
    [
        ("duration", "1,25", 1.25),
        ("duration", "1.25s", 1.25),
        ("duration", "1.2 sec", 1.2),
        ("duration", "0:01.25", 1.25),
        ("duration", "00:00:01,250", 1.25),
        ("duration", "1250 ms", 1.25),
        ("duration_ms", "1250", 1.25),
        ("duration_seconds", ".125e1", 1.25),
        ("duration_ms", "1.25 s", 1.25),
        ("duration", "0:02", 1.25),  # rounded: the file says it better
        ("duration", "0:01", 1.25),
        ("duration_ms", "1.250", "b.flac lasts 0.00125 s"),  # a point between thousands
        ("duration", "2,500", "b.flac lasts 1.25 s, but the manifest says 2.5 s"),
        ("duration", "0:03", "b.flac lasts 1.25 s, but the manifest says 3 s"),
        ("duration", "1.250,0", "duration '1.250,0' is not a number of seconds"),
        ("duration", "1 min", "duration '1 min' is not a number of seconds"),
        ("duration", "00:00:01:06", "duration '00:00:01:06' is not a number of seconds"),
    ],
)
def test_durations_as_others_write_them(folder, column, stated, kept):
    loaded = load_manifest(manifest(folder, f"audio;text;{column}\naudio/b.flac;deux;{stated}\n"))
    assert [sample.duration_s for sample in loaded.samples] + [p.what for p in loaded.problems] == [kept]


def test_an_id_that_names_something_else_takes_no_clip_away(folder, audio_file):
    """The first clip keeps it, also while it cannot be used; the others are called by their files."""
    for name in ("c", "d"):
        audio_file(folder / "audio" / f"{name}.wav", seconds=0.5, seed=ord(name))
    path = manifest(folder, "id,audio,text\n7,gone.wav,un\n7,audio/a.wav,un\n9,audio/b.flac,deux\n9,audio/c.wav,deux\n")
    for before in ([], ["7"]):
        loaded = load_manifest(path)
        assert [sample.id for sample in loaded.samples] == [*before, "audio/a.wav", "9", "audio/c.wav"]
        assert loaded.notes == (f"{path.name}: {NOTE}",)
        audio_file(folder / "gone.wav", seconds=0.5, seed=3)
    path = manifest(folder, "id,audio,text\naudio/c.wav,audio/d.wav,un\nx,audio/a.wav,un\nx,audio/c.wav,deux\n")
    assert [sample.id for sample in load_manifest(path).samples] == ["audio/c.wav", "x", "audio/c.wav-2"]


def test_parts_of_a_recording_are_not_trained_as_the_whole_for_want_of_a_known_column(folder):
    rows = "audio/b.flac,0,0.5,un\naudio/b.flac,0.5,1,deux\n"
    with pytest.raises(DataError, match=r"1 row with a recording of an earlier one, and another text\n.*start and end"):
        load_manifest(manifest(folder, f"audio,von,bis,text\n{rows}"))
    loaded = load_manifest(manifest(folder, f"audio,von,end,text\n{rows}"))
    assert {p.what for p in loaded.problems} == {
        "its row says where it ends, but not where it begins; rename the column if it is no time"
    }


def test_a_written_manifest_reads_back_the_same(folder):
    samples = [
        Sample(id="a", audio=folder / "audio/a.wav", text='dit "oui", puis non', duration_s=0.5, line=2),
        Sample(id="é", audio=folder / "audio/b.flac", text="deux\nlignes", duration_s=1.234, line=3),
    ]
    write_manifest(folder / "out.csv", samples)
    assert load_manifest(folder / "out.csv").samples == tuple(samples)
    assert "audio/a.wav" in (folder / "out.csv").read_text(encoding="utf-8")
    assert str(folder) not in (folder / "out.csv").read_text(encoding="utf-8")
    assert not list(folder.glob("*.part"))


def test_a_row_may_state_its_language_as_a_code_or_a_name(folder):
    text = "audio,text,language\naudio/a.wav,oui,French\naudio/b.flac,ja, DE \n"
    loaded = load_manifest(manifest(folder, text))
    assert [sample.language for sample in loaded.samples] == ["fr", "de"] and not loaded.problems
    text = "audio,text,language\naudio/a.wav,oui,\naudio/b.flac,ja,Klingon\n"
    loaded = load_manifest(manifest(folder, text))
    assert [sample.language for sample in loaded.samples] == [""]
    assert [str(problem) for problem in loaded.problems] == ["line 3: unknown language 'Klingon'"]
    assert loaded.problems[0].kind == Kind.LANGUAGE


def test_languages_and_clips_without_speech_are_written_and_read_back(folder):
    samples = [
        Sample(id="a", audio=folder / "audio/a.wav", text="", duration_s=0.5, line=2),
        Sample(id="b", audio=folder / "audio/b.flac", text="ja", duration_s=1.234, line=3, language="de"),
    ]
    write_manifest(folder / "out.csv", samples)
    assert load_manifest(folder / "out.csv", no_speech=True).samples == tuple(samples)
    loaded = load_manifest(folder / "out.csv")
    assert loaded.samples == tuple(samples[1:]) and loaded.problems[0].kind == Kind.NO_TEXT


def test_speakers_are_read_and_written(folder):
    for column in SPEAKER_COLUMNS:
        loaded = load_manifest(manifest(folder, f"audio,text,{column}\naudio/a.wav,oui,Anna\naudio/b.flac,non,\n"))
        assert [sample.speaker for sample in loaded.samples] == ["Anna", ""], column
    write_manifest(folder / "out.csv", loaded.samples)
    assert [sample.speaker for sample in load_manifest(folder / "out.csv").samples] == ["Anna", ""]
    assert (folder / "out.csv").read_text().splitlines()[0] == "id,audio_path,transcription,duration_s,speaker"


def test_times_of_a_text_are_read_and_written_and_told_where_they_cannot_be_used(folder):
    timed = "<|0.00|> oui<|0.20|><|0.25|> non<|0.50|>"
    rows = [f"audio/a.wav,oui non,{timed}", f"audio/b.flac,oui oui,{timed}", "audio/c.wav,un,"]
    (folder / "audio" / "c.wav").write_bytes((folder / "audio" / "a.wav").read_bytes())
    loaded = load_manifest(manifest(folder, "audio,text,timed_text\n" + "\n".join(rows) + "\n"))
    assert [sample.timed_text for sample in loaded.samples] == [timed, "", ""] and not loaded.problems
    [note] = loaded.notes
    assert note.endswith("the timed_text of 1 row does not say the same as their text, first on line 3: it is not used")
    write_manifest(folder / "out.csv", loaded.samples)
    assert [sample.timed_text for sample in load_manifest(folder / "out.csv").samples] == [timed, "", ""]
    sample = loaded.samples[0]
    assert sample.with_text("oui  non").timed_text == timed and sample.with_text("oui").timed_text == ""
