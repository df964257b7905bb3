import subprocess
import sys

import pytest
from transformers.models.whisper import tokenization_whisper

from whisper_tuner.errors import ConfigError
from whisper_tuner.languages import CODES, LANGUAGES, joined, language_code, text_language


def test_languages_are_codes_or_english_names():
    names = ("fr", "French", "<|fr|>", " CASTILIAN ", "JA", "<|JA|>")
    assert [language_code(name) for name in names] == ["fr", "fr", "fr", "es", "ja", "ja"]
    with pytest.raises(ConfigError, match="unknown language 'klingon'"):
        language_code("klingon")
    for missing in (None, "", " "):
        with pytest.raises(ConfigError, match="is told it"):
            language_code(missing)


@pytest.mark.parametrize(
    ("code", "names"),
    {
        "fr": ["fr-FR", "fr_CA", "fra", "fre", "fr_FR.UTF-8", "<|fr|>", "French (Canada)", "Canadian French", "fr-BEL"],
        "zh": [
            "zh-CN",
            "zh_Hant_TW",
            "cmn",
            "cmn_hans_cn",
            "Mandarin Chinese",
            "Chinese (Mandarin)",
            "zh-cmn-Hans",
            "zh-TWN",
        ],
        "yue": ["yue-Hant-HK", "zh-yue", "Chinese (Cantonese)", "Traditional Chinese (Cantonese)"],
        "pt": ["pt_BR", "Brazilian Portuguese", "Portuguese, Brazilian"],
        "no": ["nb-NO", "nor-NOR", "nob", "Norwegian Bokmål"],
        "nn": ["nn_NO", "Norwegian Nynorsk", "Norwegian (Nynorsk)"],
        "en": ["en-USA", "en-IND", "eng-GBR"],
        "de": ["de-AT", "de-ITA", "deu", "ger", "de_DE@euro"],
        "es": ["es-419", "spa"],
        "el": ["gre", "Greek, Modern (1453-)"],
        "ht": ["haitian_creole"],
        "he": ["iw-IL"],
        "jw": ["jv-ID", "jav"],
        "tl": ["fil_ph"],
        "haw": ["haw-US"],
    }.items(),
)
def test_locales_and_the_codes_and_names_of_others_are_whispers(code, names):
    assert {name: language_code(name) for name in names} == dict.fromkeys(names, code)


@pytest.mark.parametrize(
    "name",
    [
        "sh",
        "Serbo-Croatian",
        "zh-nan",
        "nan-TW",
        "und",
        "cn",
        "French-English",
        "fr-FR,de",
        "sign_language",
        "fr-",
        "-",
    ],
)
def test_what_is_not_one_of_whispers_languages_is_refused(name):
    with pytest.raises(ConfigError, match=f"unknown language '{name}'"):
        language_code(name)


def test_languages_are_whispers_and_no_other_spelling_hides_a_code():
    assert LANGUAGES.keys() == tokenization_whisper.LANGUAGES.keys() and not CODES.keys() & LANGUAGES.keys()
    names = tokenization_whisper.TO_LANGUAGE_CODE
    assert {name: language_code(name) for name in names} == names


@pytest.mark.parametrize(
    ("name", "meant"),
    {
        "germn": "german",
        "frensh": "french",
        "Brazilian Portugese": "portuguese",
        "french2": "french",
        "klingon": "",
    }.items(),
)
def test_the_nearest_name_is_suggested(name, meant):
    with pytest.raises(ConfigError) as raised:
        language_code(name)
    assert ("did you mean" in str(raised.value)) == bool(meant) and meant in str(raised.value)


@pytest.mark.parametrize(
    ("spoken", "task", "written"),
    [("ja", "transcribe", "ja"), ("ja", "translate", "en"), (None, "transcribe", None), (None, "translate", "en")],
)
def test_translations_are_english(spoken, task, written):
    assert text_language(spoken, task) == written


def test_pieces_are_joined_as_their_language_is_written():
    assert [joined(["a", "", "b"], language) for language in ("en", "ja", None)] == ["a b", "ab", "a b"]


def test_names_are_looked_up_without_torch_and_transformers():
    watch = "import sys; from whisper_tuner.languages import language_code; language_code('ja'); "
    heavy = "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", watch + heavy], check=False)
    assert done.returncode == 0
