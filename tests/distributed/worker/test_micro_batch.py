"""Real steps of the bundled model on clips of up to 30 s, whose memory is really measured."""

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile
import torch
from torch import nn

from distributed.plan.run_spec import RunSpec
from distributed.worker import micro_batch
from distributed.worker.micro_batch import (
    RESERVE,
    SPARE,
    Share,
    TooLittleMemory,
    Trial,
    fit_into_memory,
    out_of_memory_told,
    share_of_memory,
)
from distributed.worker.whisper_wrapper import WhisperModelWrapper
from exogym.comm.comm import SingleComm
from exogym.samplers.elastic import ElasticSampler
from exogym.settings import LoopSettings
from exogym.strategy import build_strategy
from exogym.train_node import TrainNode
from whisper_tuner.config import Profile
from whisper_tuner.data.batch_shapes import BatchLayout
from whisper_tuner.data.batches import ShardBatches
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.data.labels import label_encoder
from whisper_tuner.fact_store import FactStore
from whisper_tuner.model.base_model import load_base, prepare
from whisper_tuner.model.machine_memory import machine_memory
from whisper_tuner.model.memory import AFTER_A_STEP_BYTES, CUDA_CONTEXT, FLOAT

PROJECT = Path(__file__).parents[3]
MODEL = PROJECT / "bundled" / "model"
CPU = torch.device("cpu")
MB = 10**6
PLENTY = Share(device=CPU, bytes=10**15, most=10**15)
SPEC = RunSpec(run_id="a-run-of-the-tests", run_dir=".", cache_dir=".")


class Work:
    """A fresh model with its clips, `seconds` long, all in one batch of an epoch."""

    def __init__(
        self, folder: Path, seconds, *, audio_context: str = "cropped", batch_size: int = 6, dropout: float = 0.0
    ):
        model, processor = load_base(MODEL)
        model.config.apply_spec_augment = dropout > 0
        settings = {"batch_size": batch_size, "dropout": dropout, "audio_context": audio_context}
        profile = Profile(base_model=str(MODEL), train=folder, **settings)
        self.model = WhisperModelWrapper(prepare(model, profile), processor, "cpu")
        self.batches = ShardBatches(
            [sample_of(folder, number, duration) for number, duration in enumerate(seconds)],
            profile,
            features=FeatureStore(folder / "cache", processor.feature_extractor),
            labels=label_encoder(model, processor.tokenizer),
        )

    def fit(self, share: Share, validation: ShardBatches | None = None, facts: FactStore | None = None) -> list[dict]:
        events: list[dict] = []
        fit_into_memory(
            self.model,
            self.batches,
            validation,
            share=share,
            precision="float32",
            events=events.append,
            facts=facts,
        )
        return events

    def train(self, steps: int = 3) -> nn.Module:
        torch.manual_seed(1)
        np.random.seed(1)
        node = TrainNode(
            self.model,
            SingleComm(),
            build_strategy("diloco", {"H": 2}),
            ElasticSampler(self.batches, SingleComm().members, SingleComm().members[0]),
            LoopSettings(max_steps=steps, device="cpu"),
        )
        node.run()
        return self.model

    def parts(self, numbers: list[int]) -> list[dict]:
        """What is computed at once of a step of these clips."""
        return next(iter(self.batches.read([numbers])))

    def gradients(self) -> list[torch.Tensor]:
        """Of the first step, as TrainNode adds them up."""
        self.model.train()
        [[numbers, *_]] = self.batches.plan(0, None, ["a"], [1.0])
        tokens = 0
        for batch in self.parts(numbers):
            loss, weight = self.model(batch)
            (loss * weight).backward()
            tokens += weight
        return [parameter.grad / tokens for parameter in self.model.parameters() if parameter.grad is not None]


def sample_of(folder: Path, number: int, seconds: float) -> Sample:
    path = folder / f"{number}-{seconds}.wav"
    if not path.exists():
        noise = np.random.default_rng(number).normal(0, 0.1, round(16_000 * seconds))
        soundfile.write(path, noise, 16_000)
    text = "turn on the light " * (1 + number % 3)
    return Sample(id=path.stem, audio=path, text=text, duration_s=seconds, line=number + 2)


@pytest.fixture(autouse=True)
def _many_positions(monkeypatch):
    """As much at once as memory allows, which is what is tested here."""
    monkeypatch.setattr("distributed.worker.micro_batch.CPU_POSITIONS", 10**6)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def work(tmp_path):
    return lambda *seconds, **options: Work(tmp_path, seconds or (20.0,) * 6, **options)


def shares(work: Work, clips: float) -> Share:
    """With room for about so many clips."""
    trial = Trial(
        model=work.model,
        batches=work.batches,
        longest=work.batches.longest(),
        share=PLENTY,
        precision="float32",
    )
    needs = trial.measure(4)
    trained = sum(parameter.numel() for parameter in work.model.parameters() if parameter.requires_grad)
    later = (AFTER_A_STEP_BYTES + FLOAT) * trained + SPARE
    room = int(needs.one + (clips - 1) * needs.more + later)
    return replace(PLENTY, bytes=room, most=room)


def at_once(batches: ShardBatches) -> int:
    """How many of the longest clips."""
    return batches.at_once(*batches.longest())


def state_of(model: nn.Module) -> list:
    tensors = [value.clone() for value in (*model.parameters(), *model.buffers())]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [tensors, gradients, [module.training for module in model.modules()]]


def test_what_a_step_takes_is_measured_once_for_such_a_model_and_such_clips(work, tmp_path, monkeypatch):
    facts, one, measured = FactStore(tmp_path / "facts"), work(), []
    share = shares(one, 3.5)
    real = Trial._measured
    monkeypatch.setattr(Trial, "_measured", lambda trial, clips: measured.append(clips) or real(trial, clips))
    assert at_once(one.batches) == 6
    one.fit(share, facts=facts)
    first, few, again = len(measured), at_once(one.batches), work()
    assert first and few < 6
    again.fit(share, facts=facts)
    assert len(measured) == first and at_once(again.batches) == few
    for other in (work(dropout=0.5), work(*(25.0,) * 6), work(batch_size=1)):
        before = len(measured)
        other.fit(PLENTY, facts=facts)
        assert len(measured) > before


def chance() -> tuple:
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


def test_the_measurement_leaves_no_trace(work):
    own = work(3.0, 2.0, dropout=0.3)
    own.model.register_buffer("calls", torch.zeros(()))

    def count(model, *_call):
        model.calls += 1

    own.model.register_forward_hook(count)
    own.model.model.model.decoder.eval()
    next(own.model.parameters()).grad = torch.ones_like(next(own.model.parameters()))
    before, chance_before = state_of(own.model), chance()
    own.fit(PLENTY)
    torch.testing.assert_close(state_of(own.model), before, rtol=0, atol=0)
    assert chance() == chance_before


def test_an_error_amid_the_measurement_leaves_none_either(work):
    own = work(3.0, dropout=0.3)
    before, chance_before = state_of(own.model), chance()

    def fail(*_call):
        torch.rand(3)
        raise ZeroDivisionError

    broken = own.model.model.model.decoder.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        own.fit(PLENTY)
    broken.remove()
    torch.testing.assert_close(state_of(own.model), before, rtol=0, atol=0)
    assert chance() == chance_before


def test_where_all_fits_a_measured_run_gives_the_same_bits(work):
    seconds = (6.0, 5.0, 4.0, 3.0, 2.0, 1.0)
    unmeasured = work(*seconds, batch_size=2, dropout=0.1)
    unmeasured.batches.layout = BatchLayout(is_padded=False, few_lengths=False)
    unmeasured = unmeasured.train()
    measured = work(*seconds, batch_size=2, dropout=0.1)
    [event] = measured.fit(PLENTY)
    assert event["type"] == "memory" and event["clips"] == event["at_once"] == 2
    for one, other in zip(unmeasured.parameters(), measured.train().parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_small_share_cuts_the_batch_and_not_the_gradient(work):
    whole, cut = work(), work()
    whole.batches.layout = BatchLayout(is_padded=False, few_lengths=False)
    before = cut.batches.plan_settings()
    warning, event = json.loads(json.dumps(cut.fit(shares(cut, 2.5))))
    assert warning["type"] == "warning" and "6 clips of 20.2 s at once would need" in warning["what"]
    clips = at_once(cut.batches)
    assert 1 <= clips <= 3 and warning["what"].endswith(f"it computes {clips} at a time")
    assert event["clips"] == 6 and event["at_once"] == clips and event["clip_s"] == 20.2
    assert (
        cut.batches.plan_settings() == before
    )  # or ranks with other shares, and its own checkpoints, would be refused
    for one, other in zip(whole.gradients(), cut.gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_validation_obeys_the_same_limit(work, tmp_path):
    own, validation = work(), work().batches
    own.fit(shares(own, 2.5), validation)
    assert at_once(validation) == at_once(own.batches) < 6


def test_longer_clips_of_the_validation_do_not_cut_the_training(work):
    own, longer = work(*[5.0] * 6), work(*[30.0] * 6).batches
    [event] = own.fit(shares(own, 12), longer)
    assert event["clips"] == event["at_once"] == at_once(own.batches) == 6 and event["clip_s"] < 6
    assert 1 <= at_once(longer) < 6


def test_a_batch_that_is_not_cut_keeps_no_gradients(work):
    own = work(20.0, batch_size=1)
    own.model.large = nn.Parameter(torch.zeros(1).expand(10**8))  # far more than measurements differ by
    share = shares(own, 1)
    trained = sum(parameter.numel() for parameter in own.model.parameters() if parameter.requires_grad)
    less = share.bytes - FLOAT * trained // 2
    [event] = own.fit(replace(share, bytes=less, most=less))
    assert event["at_once"] == 1 and event["needed"] < less


@pytest.mark.slow
def test_what_other_programs_hold_now_refuses_nobody(work):
    """A Mac with a browser open has little memory available, and gives back what it is asked for."""
    own = work(20.0, 20.0, batch_size=2)
    events = own.fit(replace(shares(own, 0.1), most=PLENTY.most))
    assert at_once(own.batches) == 1 and "it computes 1 at a time" in events[1]["what"]


def test_a_batch_of_one_clip_is_not_cut(work):
    own = work(20.0, batch_size=1)
    warning, event = own.fit(replace(shares(own, 0.1), most=PLENTY.most))
    assert "gradient_checkpointing" in warning["what"] and "at a time" not in warning["what"]
    assert event["type"] == "memory" and event["clips"] == event["at_once"] == 1


def test_where_a_clip_of_30_s_does_not_fit_none_is_padded_to_that(work):
    cropped, own, roomy = work(*[2.0] * 6), *(work(*[2.0] * 6, audio_context="mixed") for _ in range(2))
    warning, *_, event = own.fit(shares(cropped, 2))
    assert warning["what"].startswith("no clip is padded or joined to 30 s (audio_context = mixed")
    assert event["clip_s"] < 3 and own.batches.full_clip() is None
    [event] = roomy.fit(PLENTY)
    assert event["clip_s"] == 30.0 and roomy.batches.full_clip()
    for each, longest in ((own, 220), (roomy, 3000)):
        [[numbers]] = each.batches.plan(0, None, ["a"], [1.0])
        assert max(max(part["lengths"].frames) for part in each.parts(numbers)) == longest


def test_not_one_clip_fits(work):
    own = work(20.0)
    with pytest.raises(TooLittleMemory) as caught:
        own.fit(replace(shares(own, 0.1), workers=4))
    said = str(caught.value)
    assert said.startswith("one clip of 20.2 s needs") and "but this worker's share is" in said
    assert "4 workers share this machine" in said and "method = lora" in said


@pytest.mark.slow
def test_one_clip_that_fits_without_its_activations_is_trained_alike(work):
    plain, small, checkpointed = works = [work(29.0, batch_size=1) for _ in range(3)]
    for own in works:  # deep enough that layers take more than all else
        layers = own.model.model.model.encoder.layers
        layers.extend(copy.deepcopy(layers[0]) for _ in range(8))
    checkpointed.model.checkpoint_gradients()
    [about], [less] = plain.fit(PLENTY), checkpointed.fit(PLENTY)
    share = (about["needed"] + less["needed"]) // 2
    assert less["needed"] < about["needed"] - 50 * MB
    warning, event = small.fit(replace(PLENTY, bytes=share, most=share))
    assert warning["what"].startswith("one clip of 29.2 s needs") and "gradient_checkpointing" in warning["what"]
    assert event["needed"] < share
    for own, other in zip(small.gradients(), plain.gradients(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


POSITIONS = 3100  # three clips of 20.2 s


@pytest.fixture
def few_terms(monkeypatch):
    """The device sums over few terms, as Apple's GPU does."""
    monkeypatch.setattr("exogym.device.most_terms", lambda device: POSITIONS)


def positions_of(work: Work, run: Callable[[], object]) -> list[int]:
    """Positions of each forward pass."""
    seen = []

    def look(model, inputs):
        seen.append(inputs[0]["input_features"].shape[1] // 2)

    hook = work.model.register_forward_pre_hook(look)
    run()
    hook.remove()
    return seen


@pytest.mark.slow
def test_no_pass_has_more_positions_than_the_device_sums_rightly(work, few_terms):
    whole, cut, validation = work(), work(), work().batches
    whole.batches.layout = BatchLayout(is_padded=False, few_lengths=False)
    before = cut.batches.plan_settings()
    events = []
    trials = positions_of(cut, lambda: events.extend(cut.fit(PLENTY, validation)))
    assert max(trials) <= POSITIONS
    assert [event["type"] for event in events] == ["memory"]
    assert events[0]["clips"] == events[0]["at_once"] == 3
    assert validation.at_once(*validation.longest()) == 3 and cut.batches.plan_settings() == before
    expected, gradients = [], []
    assert positions_of(whole, lambda: expected.extend(whole.gradients())) == [6 * 1010]
    assert positions_of(cut, lambda: gradients.extend(cut.gradients())) == [3 * 1010, 3 * 1010]
    for one, other in zip(expected, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_parts_of_a_step_that_is_not_padded_are_alike(work, few_terms):
    own = work(*[20.0] * 6, *[5.0] * 6, batch_size=12)
    own.fit(PLENTY)
    [step] = own.batches.plan(0, None, ["a"], [1.0])[0]
    parts = [list(part["lengths"].frames) for part in own.parts(step)]
    assert [len(part) for part in parts] == [4, 4, 4] and {sum(part) for part in parts} == {2 * 2020 + 2 * 520}


def test_little_memory_and_few_terms_are_both_obeyed(work, few_terms):
    own = work(*[20.0] * 12, batch_size=12)
    share = shares(own, 7)
    passes = positions_of(own, lambda: own.fit(share))
    assert max(passes) <= POSITIONS
    assert at_once(own.batches) in (2, 3)


@pytest.mark.parametrize("compiles", [False, True])
def test_labels_have_few_lengths_where_each_shape_has_a_price(work, monkeypatch, compiles):
    monkeypatch.setattr("exogym.device.compiles_shapes", lambda device: compiles)
    own, validation = work(5.0, 4.0), work(5.0, 4.0).batches  # the second has a longer text
    _, bare = own.batches.longest()
    own.fit(PLENTY, validation)
    expected = -(-bare // 8) * 8 if compiles else bare
    assert bare % 8 and own.batches.longest()[1] == validation.longest()[1] == expected


def test_memory_that_runs_out_is_told_with_figures_and_a_remedy():
    full = "MPS backend out of memory (MPS allocated: 9.10 GiB, other allocations: 1.20 GiB, max allowed: 10.67 GiB). "
    with pytest.raises(TooLittleMemory) as caught, out_of_memory_told():
        raise RuntimeError(full + "Tried to allocate 412.00 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=")
    told = str(caught.value)
    assert told.startswith("memory ran out while training: the GPU's memory is full: torch holds 9.10 GiB and")
    assert "of 10.67 GiB that it may take; 412.00 MiB more are needed\n  Train with method = lora" in told
    assert "WATERMARK" not in told
    with pytest.raises(RuntimeError, match="shapes do not"), out_of_memory_told():
        raise RuntimeError("shapes do not match")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 3.50 "
            "MiB is free. Process 13649 has 139.14 GiB memory in use. If reserved but unallocated memory is large try "
            "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
            "the GPU's memory is full: of 139.80 GiB 3.50 MiB is free; 2.00 MiB more are needed",
        ),
        (
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/",
            "CUDA error: out of memory",
        ),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUBLAS_STATUS_ALLOC_FAILED"),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "cublasCreate"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_what_cuda_says_of_a_full_card_is_understood(said, told):
    with pytest.raises(TooLittleMemory) as caught, out_of_memory_told(loading=True):
        raise RuntimeError(said)
    first = str(caught.value).split("\n")[0]
    assert first.startswith("memory ran out while the model was loaded: ") and told in first
    assert "PYTORCH" not in first and "https" not in str(caught.value)


def test_a_large_card_is_not_left_empty(monkeypatch):
    """A tenth of an H200 would be 15 GB."""
    total = 150_000 * MB
    monkeypatch.setattr(micro_batch.devices, "choose", lambda *_, **__: torch.device("cuda", 0))
    monkeypatch.setattr(micro_batch.devices, "memory_in_use", lambda device: 0)
    monkeypatch.setattr(micro_batch.devices, "sharers", lambda device, workers: workers)
    monkeypatch.setattr(micro_batch.devices, "own_memory", lambda device: (9_500 * MB, total))
    share = share_of_memory(SPEC, "cuda")
    assert (share.bytes, share.most) == (5_500 * MB, total - 4_000 * MB)
    pair = share_of_memory(replace(SPEC, machine_workers=2), "cuda")
    assert (pair.bytes, pair.most) == (2_750 * MB, total // 2 - 2_000 * MB)
    many = share_of_memory(replace(SPEC, machine_workers=16), "cuda")
    assert 16 * (many.most + CUDA_CONTEXT) < total
    monkeypatch.setattr(micro_batch.devices, "own_memory", lambda device: (8_000 * MB, 8_000 * MB))
    assert share_of_memory(SPEC, "cuda").bytes == 7_100 * MB


def test_a_card_that_other_programs_have_filled(work, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(Trial, "_step", full)
    said = "but other programs hold it: this worker's share of what they leave is 1.0 MB"
    with pytest.raises(TooLittleMemory, match=said):
        work(5.0, 4.0).fit(Share(device=CPU, bytes=MB, most=10**15))


PEAK = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from test_micro_batch import CPU, PLENTY, Work
from distributed.worker import micro_batch
from exogym import device as devices
torch.set_num_threads(1)
micro_batch.CPU_POSITIONS = 10**6
work = Work(Path(sys.argv[1]), (30.0,) * 8, batch_size=8)
devices.empty_cache(CPU)
budget = devices.memory_in_use(CPU) + int(sys.argv[2])
with devices.PeakMemory(CPU) as peak:
    try:
        if sys.argv[3] == "fit":
            work.fit(replace(PLENTY, bytes=budget, most=budget))
        work.train(2)
    except Exception as error:
        print(error)
print(work.batches.at_once(*work.batches.longest()), budget, peak.bytes)
"""


@pytest.fixture
def trained(tmp_path):
    """In a process of its own: how many clips it computed at once, its budget, its peak, and what it said.

    Not by getrusage: on Linux a process that is spawned begins with the peak of the one that spawned it.
    """

    def train(spare: int, how: str) -> tuple[int, int, int, str]:
        folders = map(str, [PROJECT / "gym", PROJECT, Path(__file__).parent])
        environment = {**os.environ, "PYTHONPATH": ":".join(folders)}
        command = [sys.executable, "-c", PEAK, str(tmp_path), str(spare), how]
        process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
        *said, figures = process.stdout.strip().split("\n")
        return *map(int, figures.split()), "\n".join(said)

    return train


@pytest.mark.slow
def test_the_resident_peak_stays_below_the_share(trained):
    at_once, budget, peak, _ = trained(450 * MB, "fit")
    assert 1 < at_once < 8 and peak < budget
    at_once, budget, peak, _ = trained(450 * MB, "as it is")
    assert at_once == 8 and peak > budget


@pytest.mark.slow
def test_a_trial_is_broken_off_before_it_takes_too_much(trained):
    _, budget, peak, said = trained(30 * MB, "fit")
    assert "one clip of 30.0 s needs more than" in said and peak < budget + 30 * MB


HOLD = "import sys; held = bytearray(int(sys.argv[3])); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def sibling():
    """Another process that looks like a worker of a run, and holds memory."""
    processes = []

    def start(run: str, held: int) -> None:
        command = [sys.executable, "-c", HOLD, "distributed.worker.main", run, str(held)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert processes[-1].stdout.readline() == b"held\n"

    yield start
    for process in processes:
        process.communicate()


def test_workers_share_what_is_available_and_what_they_hold(sibling):
    known = machine_memory()
    alone = share_of_memory(SPEC, "cpu")
    reserve = RESERVE * known["total"]
    assert alone.bytes == pytest.approx(known["available"] + psutil.Process().memory_info().rss - reserve, abs=1e9)
    assert share_of_memory(replace(SPEC, machine_workers=4), "cpu").bytes == pytest.approx(alone.bytes / 4, abs=0.3e9)


def test_a_worker_that_comes_late_has_its_share_all_the_same(sibling, monkeypatch):
    """What the others have taken is theirs, and not taken from its share."""
    known = machine_memory()
    pair = replace(SPEC, machine_workers=2)
    monkeypatch.setattr(
        "distributed.worker.micro_batch.machine_memory", lambda: known
    )  # others use this machine as well
    before = share_of_memory(pair, "cpu").bytes
    sibling("another-run", 400 * MB)
    assert share_of_memory(pair, "cpu").bytes == pytest.approx(before, abs=50 * MB)
    sibling(SPEC.run_id, 400 * MB)
    assert share_of_memory(pair, "cpu").bytes - before == pytest.approx(200 * MB, abs=50 * MB)
