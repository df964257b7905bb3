"""Which language the wizard suggests: one that is known, or that the model hears; else none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from small_whisper import write_whisper
from test_wizard_terminal import BACK, ENTER, NO_TIME, Screen, folder
from transformers import WhisperForConditionalGeneration

import cli_typer
from multimac.wizard import model as asking
from multimac.wizard.draft import Data, Draft, Model
from multimac.wizard.questions import Questions, _refused
from whisper_tuner.config import ConfigFile
from whisper_tuner.data.dataset import Sample
from whisper_tuner.errors import ConfigError
from whisper_tuner.languages import language_code

# A machine that runs tests may be busy.
PATIENT = f"from multimac.wizard import model; model.LISTENING_S = 120.0; {NO_TIME}"

__all__ = ["folder"]


def hears(code: str, path: Path) -> Path:
    """A multilingual Whisper that hears this language in any clip: its decoder's output is the same everywhere."""
    write_whisper(path, multilingual=True, seconds=5)
    model = WhisperForConditionalGeneration.from_pretrained(path)
    norm, embedding = model.model.decoder.layer_norm, model.get_output_embeddings().weight
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.copy_(embedding[model.generation_config.lang_to_id[f"<|{code}|>"]])
        embedding[model.generation_config.lang_to_id[f"<|{code}|>"]] *= 100
    model.save_pretrained(path)
    return path


@pytest.mark.slow
def test_what_the_model_hears_is_shown_as_a_guess_and_heard_once(folder, tmp_path):
    hears("fr", tmp_path / "model")
    config = (folder / "config.ini").read_text()
    (folder / "config.ini").write_text(f"[model:mine]\nbase_model = {tmp_path}/model\n{config}")
    screen = Screen(folder, first=PATIENT)
    try:
        screen.expect("Which recordings")
        screen.type(ENTER)
        screen.expect("A guess of this model: it sounds like French in 5 of 5 clips.", timeout=150)
        screen.expect("Language of the speech (en, fr, German, ...): fr")
        screen.type(ENTER)
        screen.expect("Ready?")
        screen.type(BACK)
        assert "guess" not in screen.expect("Language of the speech (en, fr, German, ...): fr", timeout=5)
        screen.type("x" + ENTER)
        screen.expect("unknown language 'frx'")
    finally:
        screen.end()


@pytest.fixture
def draft(tmp_path) -> Draft:
    clips = tuple(
        Sample(id=str(number), audio=tmp_path / f"{number}.wav", text="a", duration_s=number, line=number)
        for number in range(1, 21)
    )
    config = tmp_path / "config.ini"
    config.write_text("[model:mine]\nbase_model = openai/whisper-tiny\n")
    data = Data(manifests={"train": tmp_path / "train.csv"}, samples={"train": clips})
    model = Model(base_model="openai/whisper-tiny", section="mine")
    return Draft(config_path=config, config_text=config.read_text(), model=model, data=data)


@pytest.mark.parametrize(
    ("heard", "suggested", "told"),
    [
        (["fr", "de", "fr", "fr"], "fr", "it sounds like French in 3 of 4 clips"),
        (["fr", "de", "fr", "en"], "", "it sounds like French in 2 of 4 clips"),
        ([], "", ""),
    ],
)
def test_only_what_is_heard_in_most_clips_is_suggested(draft, monkeypatch, capsys, heard, suggested, told):
    """The published model is not here: its outcome is made up."""
    listened = []
    monkeypatch.setattr(asking, "folder_here", lambda base_model: Path(base_model))
    monkeypatch.setattr(asking, "languages_heard", lambda folder, clips, limit_s: listened.extend(clips) or heard)
    assert suggestion(draft, Questions()) == suggested
    assert told in capsys.readouterr().out
    assert [path.name for path in listened] == ["11.wav", "13.wav", "15.wav", "17.wav", "19.wav"]  # the longer half


def suggestion(draft: Draft, questions: Questions | SimpleNamespace) -> str:
    """What is suggested for the language."""
    suggested = []
    questions.text = lambda key, message, default, check: suggested.append(default) or "fr"
    assert asking.ask_language(questions, draft, Console()) == "fr"
    return suggested[0]


@pytest.mark.parametrize(
    ("section", "stated", "inherited", "known"),
    [("de", "fr", "it", "de"), ("", "fr", "it", "fr"), ("", "", "it", "it"), ("", "", "", "")],
)
def test_a_language_is_known_from_the_data_or_the_configuration(draft, section, stated, inherited, known):
    draft.data.language, draft.data.stated_language = section, stated
    if section:
        draft.data.section = "mine"
        draft.config_text += f"[dataset:mine]\ntrain = train.csv\nlanguage = {section}\n"
    if inherited:
        draft.config_text += f"language = {inherited}\n" if not section else f"[DEFAULT]\nlanguage = {inherited}\n"
    assert suggestion(draft, SimpleNamespace(interactive=False)) == known


@pytest.mark.parametrize(("locale", "code"), [("fr", "fr"), ("sv-SE", "sv"), ("rw", "")])
def test_the_locale_of_common_voice_is_its_language(folder, monkeypatch, capsys, locale, code):
    """Whisper does not know Kinyarwanda; a script is told to say what is to be taken."""
    (folder / "cv" / "clips").mkdir(parents=True)
    lines = ["client_id\tpath\tsentence\tlocale"]
    for number, audio in enumerate(sorted(folder.glob("*.ogg"))):
        audio.rename(folder / "cv" / "clips" / audio.name)
        lines.append(f"{number}\t{audio.name}\tText {number}\t{locale}")
    (folder / "cv" / "train.tsv").write_text("\n".join(lines) + "\n")
    answers = {"model": "openai/whisper-tiny", "data": str(folder / "cv"), "start": "later", "name": "mine"}
    (folder / "answers.json").write_text(json.dumps(answers))
    monkeypatch.chdir(folder)
    status = cli_typer.main(["wizard", "--answers", "answers.json"])
    if code:
        assert status == 0 and ConfigFile(folder / "config.ini").profile("mine").language == code
    else:
        assert status == 3 and "language is missing, and it has no default" in capsys.readouterr().err


@pytest.mark.parametrize(("all_the_same", "model"), [(True, "openai/whisper-tiny.en"), (False, "openai/whisper-tiny")])
def test_whether_an_english_only_model_is_to_learn_another_language_is_asked(
    draft, monkeypatch, capsys, all_the_same, model
):
    draft.model, questions, asked = Model(base_model="openai/whisper-tiny.en"), Questions(), []
    questions.text = lambda *_: "fr"
    questions.confirm = lambda key, message, default: asked.append((message, default)) or all_the_same
    others = iter(["openai/whisper-tiny.en", "openai/whisper-tiny"])  # what is suggested again is asked of again
    monkeypatch.setattr(asking, "ask_model", lambda *_, **__: Model(base_model=next(others)))
    assert asking.ask_language(questions, draft, Console()) == "fr" and draft.model.base_model == model
    message = "openai/whisper-tiny.en is English-only, and your recordings are French: train it all the same?"
    assert asked == [(message, False), *([] if all_the_same else [(message, True)])]
    assert ("it is told no language" in capsys.readouterr().out) == all_the_same


def test_why_a_language_is_refused_is_one_sentence_that_fits_the_bottom_line():
    assert _refused(language_code, "frnech") == "unknown language 'frnech', did you mean 'french'?"


def test_texts_are_compared_in_their_language_also_by_an_english_only_model(draft, capsys):
    draft.model = Model(base_model="openai/whisper-tiny.en")
    told = Questions(answers={"language": "French"})
    assert asking.ask_language(told, draft, Console()) == "fr"
    assert "Texts are compared as French" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="stated nowhere"):
        asking.ask_language(Questions(answers={}), draft, Console())
