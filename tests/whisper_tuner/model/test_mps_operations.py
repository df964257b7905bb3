"""Each operation of a training step has a kernel for Apple's GPU, by torch's own table of kernels.

So nothing needs PYTORCH_ENABLE_MPS_FALLBACK. Also: no float64, which that GPU has not. Recorded on the CPU, where some
operations run as others than on mps; what those need there is in RUN_AS.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed.worker.whisper_wrapper import WhisperModelWrapper
from whisper_tuner.model.base_model import encode, prepare, whisper_of

TABLE = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
# By what these run on mps: they stand in the table as made of others, for every device.
RUN_AS = {
    "_foreach_mul_": ("mul.out",),
    "_foreach_norm": ("linalg_vector_norm.out",),
    "_foreach_add_": ("add.out",),
    "_safe_softmax": ("_softmax.out", "eq.Scalar_out", "all.out", "where.self"),
    "_to_copy": ("_copy_from",),
    "copy_": ("_copy_from",),
    "clone": ("_copy_from",),
    "convolution": ("_mps_convolution",),
    "convolution_backward": ("mps_convolution_backward",),
    "embedding": ("index_select",),
    "index_put_": ("_index_put_impl_",),
    "index_put": ("_index_put_impl_",),
    "addmm": ("linear", "linear_backward"),
    "bernoulli_": ("bernoulli_.float", "native_dropout", "native_dropout_backward"),
    "div_": ("div.out",),
    "mul": ("mul.out",),
    "sum": ("sum.IntList_out",),
    "stack": ("cat.out",),
    "arange": ("arange.start_out",),
}
# They only make a tensor, fill it, or look at one in another way.
NO_KERNEL = {
    *("detach", "empty_like", "expand", "lift_fresh", "new_zeros", "ones", "ones_like", "scalar_tensor", "select"),
    *("slice", "split", "squeeze", "t", "transpose", "unsqueeze", "zeros", "zeros_like", "alias", "_unsafe_view"),
}


@cache
def kernels() -> dict[str, set[str]]:
    """By operation, the devices for which it has a kernel; one that is written through its `out=` has that one's."""
    rows = {row["func"].split("(")[0]: row for row in yaml.load(TABLE.read_text(), Loader=yaml.CSafeLoader)}

    def devices(row: dict) -> set[str]:
        own = {device.strip() for devices in row.get("dispatch", {}) for device in devices.split(",")}
        delegate = row.get("structured_delegate")
        return own | (devices(rows[delegate]) if delegate else set())

    return {name: devices(row) for name, row in rows.items()}


def missing(operation: str) -> list[str]:
    """What it needs that has no kernel on mps."""
    packet, _, overload = operation.partition(".")
    if packet in NO_KERNEL:
        return []
    name = packet if overload == "default" else operation
    return [need for need in RUN_AS.get(packet, (name,)) if "MPS" not in kernels().get(need, ())]


class Recorded(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations, self.double = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "aten":
            self.operations.add(str(function).removeprefix("aten."))
        tensors = (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
        if any(tensor.dtype == torch.float64 for tensor in tensors):
            self.double.add(str(function))
        return result


def train_one_step(model, precision: str) -> None:
    """As TrainNode and a strategy do, with fused AdamW, on 2 s and on all that the encoder takes."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    for frames in (200, 500):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            states = encode(model, torch.ones(2, 80, frames))
            labels = torch.tensor([[5, 6, 7, -100], [5, 6, 7, 8]])
            inputs = labels.clamp(min=0)
            logits = model(encoder_outputs=states, decoder_input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / 7 * 7).backward()
        torch._foreach_mul_([weight.grad for weight in weights if weight.grad is not None], 0.5)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize(
    ("method", "checkpointing", "precision"),
    [("full", False, "bf16"), ("full", True, "float32"), ("lora", True, "bf16"), ("decoder", False, "float32")],
)
def test_a_training_step_needs_no_kernel_that_mps_lacks(multilingual, profile_of, method, checkpointing, precision):
    model = prepare(multilingual[0], profile_of(method=method, dropout=0.1, lora_dropout=0.1)).train()
    if checkpointing:
        WhisperModelWrapper(model, None, "cpu").checkpoint_gradients()
    config = whisper_of(model).config
    config.apply_spec_augment, config.mask_time_prob, config.mask_feature_prob = True, 0.3, 0.3
    with Recorded() as recorded, sdpa_kernel(SDPBackend.MATH):  # as on mps
        train_one_step(model, precision)
    assert len(recorded.operations) > 40 and not recorded.double
    assert {operation: needs for operation in sorted(recorded.operations) if (needs := missing(operation))} == {}


def test_an_operation_that_mps_lacks_is_seen():
    assert missing("embedding_renorm_.default") == ["embedding_renorm_"]
    assert missing("no_such_operation.default") == ["no_such_operation"]
