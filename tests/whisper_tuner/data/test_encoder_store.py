import os
from pathlib import Path

import numpy as np
import pytest
import torch

from distributed.worker.whisper_wrapper import WhisperModelWrapper
from whisper_tuner.data.batch_shapes import LABEL_GRID, BatchLayout
from whisper_tuner.data.batches import ShardBatches
from whisper_tuner.data.encoder_store import EncoderStore
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.data.labels import label_encoder
from whisper_tuner.errors import RunError
from whisper_tuner.model.base_model import prepare

GB = 10**9


@pytest.fixture(params=["padded", "not padded"])
def parts(request, multilingual, clips, tmp_path, profile_of):
    """(wrapper, batches) of a frozen encoder, with a store or without."""
    model, processor = multilingual

    def parts(store: bool, **settings):
        profile = profile_of(**{"method": "decoder", "batch_size": 8, "seed": 0, **settings})
        trained = prepare(model, profile)
        kept = EncoderStore(tmp_path / "encoder", model.model.encoder, precision="float32") if store else None
        batches = ShardBatches(
            clips,
            profile,
            features=FeatureStore(tmp_path / "features", processor.feature_extractor),
            labels=label_encoder(model, processor.tokenizer, language="fr"),
            encoder_store=kept,
        )
        if request.param == "padded":
            # Each clip by its own length, as with a store.
            batches.layout = BatchLayout(label_grid=LABEL_GRID, fixed_cost=0)
        else:
            batches.layout = BatchLayout(is_padded=False, few_lengths=False)
        return WhisperModelWrapper(trained, processor, "cpu", encoder_store=kept).train(), batches

    return parts


def losses(wrapper, batches, epoch=0):
    """Of each step, with the gradients of the epoch."""
    wrapper.zero_grad()
    batches.begin_epoch(epoch)
    found = []
    for step in batches.read(batches.plan(epoch, None, ["a"], [1.0])[0]):
        for batch in step:
            loss, tokens = wrapper(batch)
            (loss * tokens).backward()
            found.append(("encoder_states" in batch, loss.item(), tokens))
    return found, [weight.grad for weight in wrapper.parameters() if weight.grad is not None]


@pytest.mark.parametrize("settings", [{"method": "decoder"}, {"method": "lora", "lora_part": "decoder", "lora_r": 4}])
@pytest.mark.parametrize("context", ["cropped", "mixed", "full"])
def test_losses_and_gradients_are_those_of_the_encoder_itself(parts, settings, context):
    plain, gradients = losses(*parts(False, audio_context=context, **settings))
    torch.manual_seed(0)
    wrapper, batches = parts(True, audio_context=context, **settings)
    first, _ = losses(wrapper, batches)
    again, kept = losses(wrapper, batches)
    assert {stored for stored, *_ in first} == {False} and {stored for stored, *_ in again} == {True}
    if settings["method"] == "decoder":  # the matrices of LoRA begin with other random values
        assert [loss for _, loss, _ in again] == pytest.approx([loss for _, loss, _ in plain], rel=1e-3)
        for one, other in zip(gradients, kept, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3 * one.abs().max().item())
    assert [figures for _, *figures in again] == [figures for _, *figures in first]  # to the bit


def test_clips_have_the_same_neighbours_length_in_each_epoch(parts):
    wrapper, batches = parts(True)
    losses(wrapper, batches, 0)
    assert all(stored for stored, *_ in losses(wrapper, batches, 1)[0])


def test_other_weights_have_other_outputs(multilingual, tmp_path):
    encoder = multilingual[0].model.encoder
    store = EncoderStore(tmp_path, encoder, precision="float32")
    mel = np.zeros((80, 100), np.float32)
    store.put([store.key(mel)], torch.ones(1, 50, store.d_model))
    assert torch.equal(store.get([store.key(mel)])[0], torch.ones(50, store.d_model))
    assert store.get([store.key(mel + 1)]) is None and store.get([store.key(mel[:, :50])]) is None
    assert EncoderStore(tmp_path, encoder, precision="bf16").get([store.key(mel)]) is None
    with torch.no_grad():
        encoder.layers[0].fc1.weight[0, 0] += 1
    assert EncoderStore(tmp_path, encoder, precision="float32").get([store.key(mel)]) is None


def test_what_fp16_cannot_hold_is_not_kept(multilingual, tmp_path):
    store = EncoderStore(tmp_path, multilingual[0].model.encoder, precision="float32")
    states = torch.ones(2, 50, store.d_model)
    states[0, 0, 0] = 1e6
    states[1, 0, 0] = 1 / 3
    used = store.put([b"a" * 16, b"b" * 16], states)
    assert store.get([b"a" * 16]) is None
    assert torch.equal(used[0], states[0]) and torch.equal(used[1], store.get([b"b" * 16])[0])


def test_a_full_disk_is_told_once(multilingual, tmp_path, monkeypatch):
    told = []
    store = EncoderStore(tmp_path, multilingual[0].model.encoder, precision="float32", warn=told.append)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for _ in range(2):
        store.put([b"a" * 16, b"b" * 16], torch.ones(2, 50, store.d_model))
    [what] = told
    assert "No space left on device" in what and "slower" in what


def test_a_budget_that_is_too_small_is_refused_with_the_figure(multilingual, tmp_path):
    store = EncoderStore(tmp_path, multilingual[0].model.encoder, precision="float32")
    with pytest.raises(RunError, match=r"take 3\.0 GB, but encoder_cache_gb allows 2\.0 GB") as caught:
        store.make_room(3 * GB, 2 * GB)
    assert "encoder_cache_gb, or set it to 0" in str(caught.value)
    with pytest.raises(RunError, match=r"free"):
        store.make_room(10**18, 10**19)


def test_other_models_outputs_make_room(multilingual, tmp_path):
    store = EncoderStore(tmp_path, multilingual[0].model.encoder, precision="float32")
    for age, name in enumerate(("new", "old")):
        folder = Path(tmp_path / name)
        folder.mkdir()
        (folder / "1.data").write_bytes(bytes(1000))
        os.utime(folder, (1e9 - age, 1e9 - age))
    store.make_room(500, 1600)
    assert {path.name for path in tmp_path.iterdir()} == {"new", store.directory.name}


def test_an_encoder_that_is_not_trained_has_no_dropout(parts):
    wrapper, _ = parts(False, dropout=0.5)
    assert not wrapper._whisper.model.encoder.training and wrapper._whisper.model.decoder.training
    wrapper, _ = parts(False, dropout=0.5, method="full")
    assert wrapper._whisper.model.encoder.training
