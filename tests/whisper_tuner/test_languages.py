import subprocess
import sys

import pytest

from whisper_tuner.errors import ConfigError
from whisper_tuner.languages import joined, language_code, text_language


def test_languages_are_codes_or_english_names():
    names = ("fr", "French", "<|fr|>", " CASTILIAN ", "JA", "<|JA|>")
    assert [language_code(name) for name in names] == ["fr", "fr", "fr", "es", "ja", "ja"]
    with pytest.raises(ConfigError, match="unknown language 'klingon'"):
        language_code("klingon")
    for missing in (None, "", " "):
        with pytest.raises(ConfigError, match="needs a language"):
            language_code(missing)


@pytest.mark.parametrize(
    ("spoken", "task", "written"),
    [("ja", "transcribe", "ja"), ("ja", "translate", "en"), (None, "transcribe", None), (None, "translate", "en")],
)
def test_translations_are_english(spoken, task, written):
    assert text_language(spoken, task) == written


def test_pieces_are_joined_as_their_language_is_written():
    assert [joined(["a", "", "b"], language) for language in ("en", "ja", None)] == ["a b", "ab", "a b"]


def test_names_are_looked_up_without_torch():
    watch = "import sys; from whisper_tuner.languages import language_code; language_code('ja'); "
    done = subprocess.run([sys.executable, "-c", watch + "sys.exit('torch' in sys.modules)"], check=False)
    assert done.returncode == 0
