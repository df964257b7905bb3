import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperProcessor

from whisper_tuner.errors import ModelError, RunError
from whisper_tuner.eval.evaluation import transcribe
from whisper_tuner.export.final import load_model, name_base, save_final
from whisper_tuner.model.base_model import full_frames, load_base, prepare, set_language


@pytest.fixture
def adapted(multilingual, profile_of):
    """A peft model whose adapters do something."""
    torch.manual_seed(1)
    model = prepare(multilingual[0], profile_of(method="lora", lora_r=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def logits(model):
    whisper = model.get_base_model() if isinstance(model, PeftModel) else model
    features = torch.randn(1, 80, full_frames(model), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return whisper.eval()(features, decoder_input_ids=torch.tensor([[257, 1, 2]])).logits


def test_full_model_loads_with_plain_transformers(multilingual, tmp_path, clips):
    model, processor = multilingual
    set_language(model, "fr")
    out = save_final(model, processor, tmp_path / "final", "openai/whisper-tiny")
    again = WhisperForConditionalGeneration.from_pretrained(out)
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    assert again.generation_config.lang_to_id == model.generation_config.lang_to_id
    assert (again.generation_config.language, again.generation_config.task) == ("fr", "transcribe")
    loaded = WhisperProcessor.from_pretrained(out)
    paths = [clip.audio for clip in clips[:2]]
    assert transcribe(again, loaded, paths) == transcribe(model, processor, paths, language="fr")
    torch.testing.assert_close(logits(load_model(out)[0]), logits(model), rtol=0, atol=0)


def test_adapter_loads_with_plain_peft(adapted, multilingual, multilingual_folder, tmp_path):
    out = save_final(adapted, multilingual[1], tmp_path / "final", multilingual_folder)
    base = WhisperForConditionalGeneration.from_pretrained(multilingual_folder)
    assert not torch.allclose(logits(base), logits(adapted))
    loaded = PeftModel.from_pretrained(base, out)
    torch.testing.assert_close(logits(loaded), logits(adapted))
    assert len(load_file(out / "adapter_model.safetensors")) == sum("lora_" in n for n, _ in adapted.named_parameters())
    assert not (out / "model.safetensors").exists()
    WhisperProcessor.from_pretrained(out)


def test_adapter_finds_its_base_beside_it_also_after_a_move(adapted, multilingual, multilingual_folder, tmp_path):
    shutil.copytree(multilingual_folder, tmp_path / "here" / "models" / "base")
    out = tmp_path / "here" / "runs" / "1" / "final"
    save_final(adapted, multilingual[1], out, tmp_path / "here" / "models" / "base")
    (tmp_path / "here").rename(tmp_path / "there")
    moved = tmp_path / "there" / "runs" / "1" / "final"
    named = json.loads((moved / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == "../../../models/base"
    assert str(tmp_path) not in "".join(p.read_text() for p in moved.iterdir() if p.suffix in (".json", ".md"))
    model, _ = load_model(moved)
    assert not isinstance(model, PeftModel)
    torch.testing.assert_close(logits(model), logits(adapted), rtol=1e-4, atol=1e-4)


def test_hub_ids_are_kept_and_a_base_can_be_given(adapted, multilingual, multilingual_folder, tmp_path):
    """And what is merged then can be saved as a full model."""
    out = save_final(adapted, multilingual[1], tmp_path / "final", "openai/whisper-tiny")
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "openai/whisper-tiny"
    assert "openai/whisper-tiny" in (out / "README.md").read_text()
    merged, processor = load_model(out, multilingual_folder)
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-4)
    full = save_final(merged, processor, tmp_path / "full", multilingual_folder)
    torch.testing.assert_close(logits(load_base(full)[0]), logits(adapted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kept", [(), ("tokenizer.json", "tokenizer_config.json"), ("preprocessor_config.json",)])
def test_what_an_adapter_lacks_is_its_bases(adapted, multilingual, multilingual_folder, tmp_path, kept):
    """peft alone saves no processor and no generation config."""
    out = save_final(adapted, multilingual[1], tmp_path / "final", multilingual_folder)
    for path in out.iterdir():
        if not path.name.startswith("adapter") and path.name not in kept:
            path.unlink()
    for base in (None, multilingual_folder, load_base(multilingual_folder)[0]):
        merged, processor = load_model(out, base)
        torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-4)
        assert processor.tokenizer.get_vocab() == multilingual[1].tokenizer.get_vocab()
        assert processor.feature_extractor.nb_max_frames == 500
        assert merged.generation_config.lang_to_id == multilingual[0].generation_config.lang_to_id


@pytest.mark.parametrize("method", ["full", "lora"])
def test_files_for_other_runtimes_are_there(multilingual, multilingual_folder, profile_of, tmp_path, method):
    model, processor = multilingual
    out = save_final(prepare(model, profile_of(method=method)), processor, tmp_path / "final", multilingual_folder)
    assert WhisperFeatureExtractor.from_pretrained(out).nb_max_frames == 500
    assert (out / "preprocessor_config.json").is_file() and (out / "generation_config.json").is_file()
    vocabulary, added = (json.loads((out / name).read_text()) for name in ("vocab.json", "added_tokens.json"))
    assert sorted([*vocabulary.values(), *added.values()]) == list(range(len(processor.tokenizer)))
    assert vocabulary["<|endoftext|>"] == 256 and added["<|startoftranscript|>"] == 257


def test_an_interrupted_save_leaves_the_old_model_and_the_next_one_succeeds(multilingual, tmp_path, monkeypatch):
    model, processor = multilingual
    out = save_final(model, processor, tmp_path / "final", "base")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as broken, pytest.raises(RunError, match="disk full"):
        broken.setattr(type(processor), "save_pretrained", fail)
        save_final(model, processor, out, "base")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    save_final(model, processor, out, "base")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_damaged_and_mismatched_adapters_are_named(adapted, multilingual, multilingual_folder, tmp_path):
    out = save_final(adapted, multilingual[1], tmp_path / "final", multilingual_folder)
    weights = (out / "adapter_model.safetensors").read_bytes()
    (out / "adapter_model.safetensors").write_bytes(weights[:100])
    with pytest.raises(ModelError, match="final does not load as an adapter"):
        load_model(out)
    (out / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="names no base model"):
        load_model(out)


def test_a_moved_adapter_tells_which_base_is_missing_and_where(adapted, multilingual, multilingual_folder, tmp_path):
    out = save_final(adapted, multilingual[1], tmp_path / "runs" / "one" / "final", multilingual_folder)
    named = json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
    moved = tmp_path / "elsewhere" / "deeper" / "still" / "final"
    moved.parent.mkdir(parents=True)
    out.rename(moved)
    with pytest.raises(ModelError, match="its base model is missing") as told:
        load_model(moved)
    assert named in str(told.value)
    assert str((moved / named).resolve()) in str(told.value)
    assert "adapter_config.json" in told.value.remedy
    name_base(moved, multilingual_folder)  # what the remedy says
    torch.testing.assert_close(logits(load_model(moved)[0]), logits(adapted), rtol=1e-4, atol=1e-4)
