from pathlib import Path

import pytest

from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ConfigError

TEXT = """\
[DEFAULT]
seed = 7
epochs = 3

[model:small]
base_model = openai/whisper-small
learning_rate = 1.25e-5

[dataset:mine]
train = data/train.csv   ; relative to this file
language = fr
epochs = 4

[profile:mine]
model = small
dataset = mine
method = lora
lora_targets = q_proj, v_proj
"""


@pytest.fixture
def config(tmp_path):
    def read(text: str = TEXT) -> ConfigFile:
        path = tmp_path / "config.ini"
        path.write_text(text, encoding="utf-8")
        return ConfigFile(path)

    return read


def test_a_profile_inherits_from_model_and_dataset_and_default(config, tmp_path):
    profile = config().profile("mine")
    assert profile.base_model == "openai/whisper-small"
    assert profile.learning_rate == 1.25e-5
    assert profile.train == tmp_path / "data" / "train.csv"
    assert profile.seed == 7
    assert profile.epochs == 4  # the data set is nearer than DEFAULT
    assert profile.lora_targets == ("q_proj", "v_proj")
    assert profile.runs_dir == tmp_path / "runs"


def test_every_value_knows_where_it_came_from(config):
    origin = config().profile_values("mine").origin
    assert origin["epochs"] == "config.ini:12 [dataset:mine]"
    assert origin["seed"] == "config.ini:2 [DEFAULT]"


def test_an_existing_folder_wins_over_a_hub_id(config, tmp_path):
    (tmp_path / "openai" / "whisper-small").mkdir(parents=True)
    assert Path(config().profile("mine").base_model) == tmp_path / "openai" / "whisper-small"


@pytest.mark.parametrize(
    ("old", "new", "place", "words"),
    [
        ("epochs = 4", "epochs = 0", "config.ini:12", "at least 1"),
        ("learning_rate = 1.25e-5", "learning_rate = nan", "config.ini:7", "finite"),
        ("dataset = mine", "dataset = mien", "config.ini", "did you mean 'mine'"),
    ],
)
def test_a_mistake_is_named_with_its_line(config, old, new, place, words):
    with pytest.raises(ConfigError) as raised:
        config(TEXT.replace(old, new, 1)).profile("mine")
    assert place in str(raised.value) and words in str(raised.value)


def test_what_was_taken_out_is_named_with_what_to_use(config):
    with pytest.raises(ConfigError, match=r"config\.ini:\d+ .*audio_context = pack is no longer there") as caught:
        config(f"{TEXT}audio_context = pack\n").profile("mine")
    assert "docs/performance.md" in str(caught.value)
