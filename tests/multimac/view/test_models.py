import pytest

from multimac.view.models import model_named, short_name
from whisper_tuner.errors import ConfigError


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs, of which the older one has a model; and a model's folder elsewhere."""
    monkeypatch.chdir(tmp_path)
    for name in ("20260101-000000-mine", "20260102-000000-mine"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    final = tmp_path / "runs" / "20260101-000000-mine" / "final"
    final.mkdir()
    (final / "adapter_config.json").write_text("{}")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    return tmp_path / "config.ini"


FINAL = "runs/20260101-000000-mine/final"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("20260101-000000-mine", FINAL),
        ("20260101", FINAL),
        ("runs/20260101-000000-mine", FINAL),
        ("runs/20260101-000000-mine/", FINAL),
        (FINAL, FINAL),
        ("base", "base"),
        ("openai/whisper-tiny", "openai/whisper-tiny"),
    ],
)
def test_models_by_all_their_names(runs, name, found):
    assert model_named(name, runs) == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("last", "run 20260102-000000-mine has no model yet"),
        ("runs/20260102-000000-mine", "run 20260102-000000-mine has no model yet"),
        ("20260103", "there is no run '20260103'"),
        ("runs/20260101-000000-mien", "no folder runs/20260101-000000-mien, did you mean 'runs/20260101-000000-mine'"),
        ("runs/20260101-000000-mine/finall", "no folder .*, did you mean 'runs/20260101-000000-mine/final'"),
        ("runs", "runs is no model's folder"),
        ("base/config.json", "is a file, not a model's folder"),
    ],
)
def test_what_is_no_model_is_told_without_asking_the_hub(runs, name, message):
    with pytest.raises(ConfigError, match=message):
        model_named(name, runs)


@pytest.mark.parametrize(
    ("model", "name"),
    [(FINAL, "20260101-000000-mine"), ("./base", "base"), ("openai/whisper-tiny", "openai/whisper-tiny")],
)
def test_a_short_name_is_whole(runs, model, name):
    assert short_name(model) == name


def test_a_model_that_is_named_by_its_folder_needs_no_config(runs):
    runs.write_text("damaged")
    assert model_named("base", runs) == "base"
    with pytest.raises(ConfigError, match=r"config\.ini"):
        model_named("last", runs)
