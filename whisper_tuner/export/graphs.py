"""Whisper's encoder and decoder as ONNX graphs, with the inputs and outputs that optimum and transformers.js expect.

The decoder is one graph with two branches: the first step computes the keys and values of the audio, the later ones
are given them. optimum's own exporter does not work with transformers 5; what transformers calls a cache, and its
masks, are no tensors, hence the plain arithmetic here. The weights are those of transformers.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional
from transformers import WhisperForConditionalGeneration

OPSET = 18
KINDS = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")  # what a layer keeps of tokens, and of audio
BATCH, TOKENS, PAST, FRAMES = map(
    Dim, ("batch_size", "decoder_sequence_length", "past_decoder_sequence_length", "encoder_sequence_length")
)


def encoder_graph(model: WhisperForConditionalGeneration, dtype: torch.dtype) -> ModelProto:
    """input_features [B, mels, 3000] -> last_hidden_state [B, 1500, width]."""
    config = model.config
    features = torch.zeros(2, config.num_mel_bins, 2 * config.max_source_positions)
    encoder = Encoder(_laid_out(model.model.encoder, dtype))
    return _exported(encoder, (features,), ({0: BATCH},), ["input_features"], ["last_hidden_state"])


def decoder_graphs(model: WhisperForConditionalGeneration, dtype: torch.dtype) -> tuple[ModelProto, ModelProto]:
    """Make the first step, and those after it; `merged` joins them.

    input_ids [B, tokens], encoder_hidden_states [B, 1500, width], past_key_values.N.KIND [B, heads, n, width of a head]
    -> logits [B, tokens, vocabulary] and present.N.KIND
    """
    config = model.config
    decoder = _laid_out(model.model.decoder, dtype)
    embedded, written = model.model.decoder.embed_tokens.weight, model.proj_out.weight
    output = None if torch.equal(embedded, written) else written.detach().T.contiguous().to(dtype)
    decoder.register_buffer("output", output)
    names = [f"{layer}.{kind}" for layer in range(config.decoder_layers) for kind in KINDS]
    present = [f"present.{name}" for name in names]
    ids, heard = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 5, config.d_model)
    dims = ({0: BATCH, 1: TOKENS}, {0: BATCH, 1: FRAMES})
    first = _exported(
        FirstStep(decoder), (ids, heard), dims, ["input_ids", "encoder_hidden_states"], ["logits", *present]
    )
    heads = config.decoder_attention_heads
    kept = [torch.zeros(2, heads, 5 if "encoder" in name else 4, config.d_model // heads) for name in names]
    kept_dims = tuple({0: BATCH, 2: FRAMES if "encoder" in name else PAST} for name in names)
    later = _exported(
        LaterStep(decoder),
        (ids, *kept),
        (dims[0], kept_dims),
        ["input_ids", *(f"past_key_values.{name}" for name in names)],
        ["logits", *(name for name in present if "decoder" in name)],
    )
    return first, later


def merged(first: ModelProto, later: ModelProto) -> ModelProto:
    """Join them to one decoder, with the input use_cache_branch [1] that chooses. Weights of both it has once.

    The keys and values of the audio, which do not change, come out of the later steps empty: optimum's layout.
    """
    for output in first.graph.output:
        if output.name not in {each.name for each in later.graph.output}:
            _, heads, _, width = (each.dim_value for each in output.type.tensor_type.shape.dim)
            empty = helper.make_tensor(f"{output.name}.empty", TensorProto.FLOAT, [0, heads, 1, width], [])
            later.graph.node.append(helper.make_node("Constant", [], [output.name], value=empty))
    theirs = {each.name: each for each in later.graph.initializer}
    shared = [each for each in first.graph.initializer if theirs.get(each.name) == each]
    known = {each.name for each in shared}
    # Without the lengths that differ between the branches: a present has as many tokens as came in until then.
    outputs = [copy.deepcopy(output) for output in first.graph.output]
    for output in outputs:
        if output.name != "logits":
            for axis, name in ((0, f"{output.name}.batch"), (2, f"{output.name}.length")):
                output.type.tensor_type.shape.dim[axis].dim_param = name
    first_step, later_step = (
        helper.make_graph(
            graph.node, graph.name, [], outputs, [each for each in graph.initializer if each.name not in known]
        )
        for graph in (first.graph, later.graph)
    )
    names = [output.name for output in outputs]
    choice = helper.make_node(
        "If", ["use_cache_branch"], names, name="step", else_branch=first_step, then_branch=later_step
    )
    inputs = {each.name: each for each in (*first.graph.input, *later.graph.input)}
    chooser = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    whole = helper.make_graph([choice], "decoder", [*inputs.values(), chooser], outputs, shared)
    opsets = {each.domain: each for model in (first, later) for each in model.opset_import}
    return helper.make_model(whole, opset_imports=[*opsets.values()], ir_version=first.ir_version)


class Encoder(nn.Module):
    encoder: Any  # laid out, it has parts that transformers' class does not know of

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_features: Tensor) -> Tensor:
        encoder = self.encoder
        hidden = functional.gelu(encoder.conv1(input_features.to(encoder.conv1.weight.dtype)))
        hidden = functional.gelu(encoder.conv2(hidden)).transpose(1, 2) + encoder.embed_positions.weight
        for layer in encoder.layers:
            normed = layer.self_attn_layer_norm(hidden)
            hidden = hidden + attended(layer.self_attn, normed, *keys_and_values(layer.self_attn, normed))
            hidden = hidden + transformed(layer, hidden)
        return encoder.layer_norm(hidden).float()


class DecoderStep(nn.Module):
    decoder: Any

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def logits(
        self, input_ids: Tensor, past: Sequence[Sequence[Tensor]] | None, audio: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Compute logits, and the keys and values of all tokens until now. past, audio: those of each layer."""
        decoder = self.decoder
        before, count = past[0][0].shape[2] if past else 0, input_ids.shape[1]
        embedded = decoder.table.index_select(1, input_ids.flatten()).T  # [B * tokens, width]
        hidden = embedded.unflatten(0, input_ids.shape) + decoder.embed_positions.weight[before : before + count]
        later = torch.arange(before + count)[None] > torch.arange(count)[:, None] + before  # [tokens, all tokens]
        mask = torch.where(later, float("-inf"), 0.0).to(hidden.dtype)
        present = []
        for number, layer in enumerate(decoder.layers):
            normed = layer.self_attn_layer_norm(hidden)
            keys, values = keys_and_values(layer.self_attn, normed)
            if past:
                old_keys, old_values = past[number]
                keys, values = torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)
            present.append((keys, values))
            hidden = hidden + attended(layer.self_attn, normed, keys, values, mask)
            hidden = hidden + attended(layer.encoder_attn, layer.encoder_attn_layer_norm(hidden), *audio[number])
            hidden = hidden + transformed(layer, hidden)
        output = decoder.table if decoder.output is None else decoder.output
        return (decoder.layer_norm(hidden) @ output).float(), present


class FirstStep(DecoderStep):
    def forward(self, input_ids: Tensor, encoder_hidden_states: Tensor) -> tuple[Tensor, ...]:
        heard = encoder_hidden_states.to(self.decoder.table.dtype)
        audio = [keys_and_values(layer.encoder_attn, heard) for layer in self.decoder.layers]
        logits, present = self.logits(input_ids, None, audio)
        return logits, *(kept.float() for pair in zip(present, audio, strict=True) for each in pair for kept in each)


class LaterStep(DecoderStep):
    def forward(self, input_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        kept = [each.to(self.decoder.table.dtype) for each in past]
        layers = [kept[start : start + len(KINDS)] for start in range(0, len(kept), len(KINDS))]
        logits, present = self.logits(input_ids, [layer[:2] for layer in layers], [layer[2:] for layer in layers])
        return logits, *(each.float() for layer in present for each in layer)


def split(attention: Any, hidden: Tensor) -> Tensor:
    """[B, n, width] -> [B, heads, n, width of a head]."""
    return hidden.unflatten(2, (attention.num_heads, attention.head_dim)).transpose(1, 2)


def keys_and_values(attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return split(attention, attention.k_proj(hidden)), split(attention, attention.v_proj(hidden))


def attended(attention: Any, hidden: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = split(attention, attention.q_proj(hidden) * attention.scaling) @ keys.transpose(2, 3)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return attention.out_proj((weights @ values).transpose(1, 2).flatten(2))


def transformed(layer: Any, hidden: Tensor) -> Tensor:
    return layer.fc2(functional.gelu(layer.fc1(layer.final_layer_norm(hidden))))


class Matrix(nn.Module):
    """A linear layer with its weight as ONNX multiplies, [in, out]: without a Transpose, which hinders quantising."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().T.contiguous())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        product = hidden @ self.weight
        return product if self.bias is None else product + self.bias


def _laid_out(part: Any, dtype: torch.dtype) -> nn.Module:
    """Copy the encoder or decoder. A decoder's embeddings are its `table` [width, vocabulary], for both ends."""
    part = copy.deepcopy(part).to(dtype).eval().requires_grad_(False)
    for name, linear in [(n, each) for n, each in part.named_modules() if isinstance(each, nn.Linear)]:
        part.set_submodule(name, Matrix(linear))
    if hasattr(part, "embed_tokens"):
        part.register_buffer("table", part.embed_tokens.weight.detach().T.contiguous())
        del part.embed_tokens
    return part


def _exported(
    module: nn.Module, arguments: tuple, dims: tuple, inputs: Sequence[str], outputs: Sequence[str]
) -> ModelProto:
    with quiet():
        program = torch.onnx.export(
            module.eval(),
            arguments,
            dynamic_shapes=dims,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
            input_names=inputs,
            output_names=outputs,
        )
        assert program is not None  # it is with dynamo
        return program.model_proto


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence a converter, which speaks of its own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
