"""Gradients, staging, ranks and audio: on every device that is here, and with faults put into the device's copy."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import noop_context_fn
from torch.utils.data import Subset

from distributed.checkup.doctor import deep as doctor_audio
from distributed.checkup.doctor.deep import LIMIT, Holder, check_audio_formats, check_ranks, check_staging
from distributed.checkup.doctor.gradients import (
    FAULTY_POSITIONS,
    Parity,
    Shape,
    check_decoding,
    compare,
    compare_checkpointed,
    deviation,
    large_shapes,
    profile_shapes,
    small_whisper,
    wide_shapes,
    wide_whisper,
)
from distributed.checkup.findings import Severity, ok
from distributed.worker.whisper_wrapper import WhisperModelWrapper
from exogym import device as devices
from exogym.trainer import LocalTrainer
from multimac.commands.doctor import doctor
from whisper_tuner.config import Profile
from whisper_tuner.errors import ExitStatus
from whisper_tuner.model.layers import SplitLinear

DEVICES = list(dict.fromkeys(["cpu", devices.choose().type]))
CPU = torch.device("cpu")
FEW = [Shape(4, 200, 8), Shape(2, 200, 8), Shape(4, 200, 8)]
WEIGHT = "encoder.layers.1.fc1.weight"


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def whisper():
    return small_whisper()


class Fault:
    """Of a device: the gradient of one weight is wrong by a factor, always or after a change of batch size."""

    def __init__(self, factor: float, after_change: bool):
        self.factor, self.after_change = factor, after_change
        self.clips = self.before = None

    def put_into(self, model) -> None:
        model.register_forward_pre_hook(self._count)
        model.get_submodule("model.model").get_parameter(WEIGHT).register_hook(self._spoil)

    def _count(self, module, arguments):
        self.before, self.clips = self.clips, len(arguments[0]["labels"])

    def _spoil(self, grad):
        changed = self.before not in (None, self.clips)
        return grad * self.factor if changed or not self.after_change else grad


@pytest.fixture
def broken(monkeypatch):
    """break_(model): what is done to a Whisper on its way to the device."""

    def place(break_):
        def to(model, device):
            break_(moved := nn.Module.to(model, device))
            return moved

        monkeypatch.setattr(WhisperModelWrapper, "to", to)

    return place


@pytest.fixture
def faulty(broken):
    return lambda factor, *, after_change=False: broken(Fault(factor, after_change).put_into)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sound_device_agrees_with_float64(whisper, device):
    found = compare(Parity(whisper, torch.device(device)), FEW, "test", quiet)
    assert found.severity is Severity.OK, found.what
    assert all(step["worst_error"] < 5e-3 for step in found.figures["steps"])
    assert "4 x 100, 2 x 100" in found.what


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [1.01, 1000.0, 0.0, float("nan")])
def test_a_wrong_gradient_is_found_and_named(whisper, faulty, device, factor):
    faulty(factor)
    found = compare(Parity(whisper, torch.device(device)), FEW[:1], "test", quiet)
    assert found.severity is Severity.ERROR
    off = {1.01: "0.01", 1000.0: "1e+03", 0.0: "1"}.get(factor, "inf")
    assert f"the gradient of {WEIGHT} is off by {off} times its size (limit 0.005)" in found.what
    assert "1 of 103 parameters wrong" in found.what and "the loss is right" in found.what
    assert "device = cpu" in found.remedy or device == "cpu"
    json.dumps(found.figures, allow_nan=False)


def test_a_gradient_that_is_wrong_after_a_change_of_batch_size_is_found(whisper, faulty):
    faulty(1000.0, after_change=True)
    found = compare(Parity(whisper, CPU), FEW, "test", quiet)
    assert found.severity is Severity.ERROR
    assert "batch 2 of 3 (2 x 100, after 4 x 100)" in found.what
    assert "2 of 3 batches" in found.what


def test_a_wrong_loss_is_found(whisper, broken):
    broken(lambda model: model.register_forward_hook(lambda module, call, output: (output[0] * 1.01, output[1])))
    found = compare(Parity(whisper, CPU), FEW[:1], "test", quiet)
    assert found.severity is Severity.ERROR
    assert "the loss is 1.0e-02 off" in found.what


def test_bf16_has_a_limit_of_its_own(whisper, faulty):
    assert compare(Parity(whisper, CPU, "bf16"), FEW[1:2], "test", quiet).severity is Severity.OK
    faulty(1.5)
    found = compare(Parity(whisper, CPU, "bf16"), FEW[1:2], "test", quiet)
    assert found.severity is Severity.ERROR
    assert found.remedy == "Set precision = float32 in the profile."


def test_a_single_wrong_element_counts():
    expected = torch.ones(1000, 1000)
    found = expected.clone()
    found[3, 4] = 1.02
    assert deviation(expected, found) == pytest.approx(0.02, rel=1e-4)
    assert deviation(expected, None) == float("inf")


def test_the_check_leaves_the_model_as_it_was(whisper, faulty):
    before = copy.deepcopy(whisper.state_dict())
    faulty(2.0)
    compare(Parity(whisper, CPU), FEW[:1], "test", quiet)
    assert all(torch.equal(value, whisper.state_dict()[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in whisper.parameters())


def profile(tmp_path, rows: int = 11, **settings) -> Profile:
    lines = [f"{i},{i}.wav,hello,{2 + i % 3}" for i in range(rows)]
    (tmp_path / "train.csv").write_text("id,audio,text,duration\n" + "\n".join(lines))
    return Profile(base_model="x/y", train=tmp_path / "train.csv", **settings)


def test_the_shapes_are_those_of_the_profile(whisper, tmp_path):
    """Eleven clips of 2 to 4 s in batches of four: buckets of 250, 350 and 450 frames, and a last batch of three; by
    default one of them is padded to 30 s now and then.
    """
    cropped = [(4, 450), (3, 450), (4, 250), (4, 350), (4, 450)]
    for context, expected in (("cropped", cropped), ("mixed", [*cropped, (1, 3000)])):
        settings = {"batch_size": 8, "accumulation": 2, "audio_context": context}
        shapes, source = profile_shapes(whisper, profile(tmp_path, **settings), torch.device("mps"))
        assert [(shape.clips, shape.frames) for shape in shapes] == expected
        assert source == "the profile"


@pytest.mark.parametrize(("device", "most"), [("mps", 16), ("cuda", 24)])
def test_full_context_is_30_seconds_and_shapes_are_those_that_training_computes(whisper, tmp_path, device, most):
    settings = {"batch_size": 32 if device == "mps" else 24, "audio_context": "full"}
    shapes, source = profile_shapes(whisper, profile(tmp_path, **settings), torch.device(device))
    assert [(shape.clips, shape.frames) for shape in shapes] == [(most, 3000), (11, 3000), (most, 3000)]
    assert (shapes[0].positions > FAULTY_POSITIONS) == (device == "cuda")
    assert source == ("the profile, 16 of 32 clips at a time" if device == "mps" else "the profile")


def test_a_fault_that_training_keeps_away_from_is_a_warning(whisper, faulty, monkeypatch):
    monkeypatch.setattr("exogym.device.most_terms", lambda device: 300)
    faulty(1000.0, after_change=True)
    past, below = [Shape(2, 200, 8), Shape(4, 200, 8)], [Shape(4, 200, 8), Shape(2, 200, 8)]
    found = compare(Parity(whisper, CPU), past, "test", quiet)
    assert found.severity is Severity.WARNING and "batch 2 of 2 (4 x 100, after 2 x 100)" in found.what
    assert found.remedy == "On this GPU training computes at most 300 positions at once: it is not affected."
    assert compare(Parity(whisper, CPU), below, "test", quiet).severity is Severity.ERROR


def test_a_wide_output_layer_is_checked_as_it_is_trained(monkeypatch):
    monkeypatch.setattr("exogym.device.most_terms", lambda device: 32_766)
    wide = wide_whisper()
    parity = Parity(wide, CPU)
    assert type(parity.candidate.model.proj_out) is SplitLinear and type(wide.model.proj_out) is nn.Linear
    found = compare(parity, wide_shapes(wide)[:2], "51,866 tokens", quiet)
    assert found.severity is Severity.OK, found.what


def test_a_profile_of_single_clips_changes_its_batch_size_too(whisper, tmp_path):
    shapes, _ = profile_shapes(whisper, profile(tmp_path, batch_size=1), CPU)
    assert {shape.clips for shape in shapes} == {1, 2}


def test_without_a_manifest_the_bundled_data_stand_in(whisper, tmp_path):
    missing = Profile(base_model="x/y", train=tmp_path / "no.csv")
    assert profile_shapes(whisper, missing, CPU)[1] == "the bundled data"


def test_large_batches_pass_the_known_fault_after_a_smaller_one(whisper):
    positions = [shape.positions for shape in large_shapes(whisper, torch.device("mps"))]
    past = [at for at, count in enumerate(positions) if count > FAULTY_POSITIONS]
    assert len(past) == 3
    assert all(positions[at - 1] < FAULTY_POSITIONS for at in past)


@pytest.mark.parametrize("device", DEVICES)
def test_decoding_is_compared(device):
    found = check_decoding(torch.device(device), quiet)
    assert found.severity is Severity.OK, found.what


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most_rows", "at_once", "words"),
    [
        (1, False, "WER and texts cannot be trusted, training and validation loss can"),
        (10**6, True, "no loss, WER or text can be trusted"),
    ],
)
def test_a_bias_that_is_dropped_in_decoding_is_found(monkeypatch, most_rows, at_once, words):
    """As macOS 26 does it on an M1, to a linear layer over a single row (pytorch 188438): each cached step is one."""
    linear = torch.nn.functional.linear

    def dropping(states, weight, bias=None):
        is_exact = states.dtype == torch.float64
        return linear(states, weight, bias if is_exact or states.shape[-2] > most_rows else None)

    monkeypatch.setattr("torch.nn.functional.linear", dropping)
    found = check_decoding(CPU, quiet)
    assert found.severity is Severity.ERROR and words in found.what
    assert found.figures["cached"] > 0.1 and (found.figures["at_once"] > 0.1) == at_once


@pytest.mark.parametrize("device", DEVICES)
def test_checkpointing_changes_no_gradient(device):
    found = compare_checkpointed(torch.device(device), quiet)
    assert found.severity is Severity.OK, found.what


def test_other_dropout_in_the_second_pass_is_found(monkeypatch):
    monkeypatch.setattr("distributed.worker.whisper_wrapper.same_draws", lambda device: noop_context_fn())
    found = compare_checkpointed(CPU, quiet)
    assert found.severity is Severity.ERROR and found.figures["worst_error"] > 0.1
    assert "gradient_checkpointing changes a gradient by up to" in found.what and "dropout = 0" in found.remedy


@pytest.fixture
def small_chunks(monkeypatch):
    """As many chunks, and a thousandth of the bytes."""
    monkeypatch.setattr("exogym.flat.CHUNK", 1 << 14)


@pytest.mark.parametrize("device", DEVICES)
def test_staging_is_exact(device, small_chunks):
    found = check_staging(torch.device(device), quiet)
    assert found.severity is Severity.OK, found.what


def test_staging_through_fewer_bits_is_found(small_chunks, monkeypatch):
    monkeypatch.setattr(Holder, "to", lambda model, device: nn.Module.to(model, torch.bfloat16))
    found = check_staging(CPU, quiet)
    assert found.severity is Severity.ERROR
    assert "values were not the same when read back" in found.what


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_agree(device):
    found = check_ranks(torch.device(device), quiet)
    assert found.severity is Severity.OK, found.what
    assert found.figures["steps"] == 5
    assert found.figures["moved"] > 100 * LIMIT


class LonelyTrainer(LocalTrainer):
    """Its rank 0 trains its share of the samples, and hears nothing of the others."""

    def fit(self, *, num_nodes, **settings):
        share = Subset(self.train_dataset, range(len(self.train_dataset) // num_nodes))
        alone = LocalTrainer(self.model, share)
        alone.fit(num_nodes=1, **settings)
        self.result = alone.result
        return alone.model


def test_ranks_that_do_not_exchange_are_found(monkeypatch):
    monkeypatch.setattr("distributed.checkup.doctor.deep.LocalTrainer", LonelyTrainer)
    found = check_ranks(CPU, quiet)
    assert found.severity is Severity.ERROR and found.figures["off"] > 10 * LIMIT
    assert "off those of one" in found.what


def test_audio_formats_decode():
    found = check_audio_formats(quiet)
    assert found.severity is Severity.OK, found.what
    assert found.what.startswith("wav, flac, ogg, mp3, m4a")


def test_without_ffmpeg_m4a_is_a_warning(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("whisper_tuner.data.audio.HOMEBREW_FOLDERS", ())
    found = check_audio_formats(quiet)
    assert found.severity is Severity.WARNING
    assert "not m4a: neither ffmpeg nor afconvert" in found.what


def test_audio_that_decodes_to_something_else_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_audio, "PITCH", 441.0)
    path = tmp_path / "other.wav"
    samples = doctor_audio.tone(16_000)
    doctor_audio.soundfile.write(path, samples, 16_000)
    monkeypatch.setattr(doctor_audio, "PITCH", 523.0)
    assert "something else" in doctor_audio._problem(path)


@pytest.mark.slow
def test_a_fault_in_the_gradients_fails_the_command(faulty, capsys, monkeypatch, tmp_path, small_chunks):
    """The whole command: the row names the parameter and by how much, the other rows are there, the status is 5."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(
        "distributed.checkup.doctor.deep.check_ranks", lambda device, tell: ok("tried by a test of its own")
    )
    (tmp_path / "config.ini").write_text(
        f"[profile:mine]\nbase_model = x/y\ntrain = {tmp_path}/no.csv\nbatch_size = 3\n"
    )
    faulty(1000.0, after_change=True)
    status = doctor(config=tmp_path / "config.ini", profile="mine", deep=True)
    assert status == ExitStatus.HOST
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    cells = " ".join(line.split("│")[3].strip() for line in shown.splitlines() if line.count("│") == 4)
    assert f"gradient of {WEIGHT} is off by 1e+03 times its size" in cells
    states = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in shown.splitlines() if "│" in line}
    assert (states["gradients"], states["large batch"]) == ("problem", "problem")
    assert (states["staging"], states["two ranks"]) == ("ok", "ok")


@pytest.mark.slow
def test_a_device_that_is_not_there_is_a_row_like_others(capsys, tmp_path):
    absent = "cuda" if torch.backends.mps.is_available() else "mps"
    text = f"[profile:mine]\nbase_model = x/y\ntrain = {tmp_path}/no.csv\ndevice = {absent}\n"
    (tmp_path / "config.ini").write_text(text)
    assert doctor(config=tmp_path / "config.ini", profile="mine", deep=True, as_json=True) == ExitStatus.HOST
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert f"device {absent} is set" in findings["device"]["detail"]
    assert findings["deep checks"]["state"] == "problem" and "audio formats" not in findings
