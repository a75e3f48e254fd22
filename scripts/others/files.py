"""ONNX files that exporters other than effexport make of small models with random weights.

Every row makes a module, and its file, in the environment that has its exporter; packages are imported when a row is
made. Models of transformers have few layers and a vocabulary of 100 tokens.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DIM, HEADS, VOCABULARY, BATCH, LENGTH = 32, 4, 100, 2, 16
Inputs = Mapping[str, Tensor]
Export = Callable[[nn.Module, Inputs, Path], Path]


@dataclass(frozen=True)
class Other:
    """A file of another exporter.

    name: of the model. exporter: the distribution that makes the file, and how. environment: "" for .venv, or the name
    of the requirements in `scripts/others/`. make: the module as the exporter gets it. inputs: an example of a call.
    export: writes the file into a folder and returns its path. called: the module as the file calls it, if its inputs
    are not arguments of `forward`. is_faulted: whether faults are planted into it.
    """

    name: str
    exporter: str
    environment: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    export: Export
    called: Callable[[nn.Module], nn.Module] = lambda module: module
    is_faulted: bool = False

    @property
    def key(self) -> str:
        """A name for files and the command line."""
        return f"{self.exporter}-{self.name}".lower().replace(",", "").replace(" ", "-")

    @property
    def title(self) -> str:
        """The exporter with its version."""
        package, _, way = self.exporter.partition(" ")
        return f"{package} {version(package)} {way}".strip().replace("+cpu", "")


def ids() -> dict[str, Tensor]:
    """Tokens and a mask that hides the end of the second sample."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, 2 * LENGTH // 3 :] = 0
    return {"input_ids": torch.randint(5, VOCABULARY, (BATCH, LENGTH)), "attention_mask": mask}


def segments() -> dict[str, Tensor]:
    """Two texts in each sample."""
    found = ids()
    return found | {"token_type_ids": (torch.arange(LENGTH) >= LENGTH // 2).long().repeat(BATCH, 1)}


def tokens() -> dict[str, Tensor]:
    return {"input_ids": ids()["input_ids"]}


def vectors() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, LENGTH, DIM)}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


def waves() -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 640)}


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": 2 * DIM,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
GPT2: dict[str, Any] = {"n_embd": DIM, "n_head": HEADS, "n_layer": 2, "n_positions": 128}
T5: dict[str, Any] = {"d_model": DIM, "d_kv": 8, "d_ff": 2 * DIM, "num_layers": 2, "num_heads": HEADS}
SPEECH: dict[str, Any] = {
    "conv_dim": [16, 16],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
IMAGES: dict[str, Any] = {"image_size": 32, "patch_size": 8}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}


def transformers(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers with a small configuration, in which every weight counts."""

    def make() -> nn.Module:
        package = importlib.import_module("transformers")
        torch.manual_seed(0)
        return with_noise(getattr(package, kind)(getattr(package, f"{config}Config")(**SIZES | options)).eval())

    return make


def with_noise(module: nn.Module) -> nn.Module:
    """Let every parameter count: those that packages begin with zeros or ones get some noise."""
    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point() and weight.numel() > 1 and not weight.std() > 0:
                weight += 0.1 * torch.randn_like(weight)
    return module


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded_module() -> nn.Module:
        torch.manual_seed(0)
        return with_noise(make().eval())

    return seeded_module


class Tagger(nn.Module):
    """A recurrent network with a convolution before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.convolution = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.recurrence = nn.LSTM(DIM, DIM, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * DIM, 7)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.relu(self.convolution(self.embedding(input_ids).transpose(1, 2))).transpose(1, 2)
        return self.out(self.recurrence(x)[0]).log_softmax(dim=-1)


class Network(nn.Module):
    """Residual blocks of convolutions, as torchvision has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.block = nn.Sequential(
            nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16)
        )
        self.down = nn.Conv2d(16, 32, 3, 2, 1, groups=4)
        self.head = nn.Linear(32, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.pool(self.stem(pixel_values))
        x = nn.functional.hardswish(self.down(torch.relu(x + self.block(x))))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Encoder(nn.Module):
    """nn.TransformerEncoder with a mask of kept tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layers(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)


class Retention(nn.Module):
    """A causal linear recurrence in chunks: cumulative sums, einsum, and a top-k gate."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, 4), nn.Linear(DIM, DIM)
        self.experts = nn.Parameter(torch.randn(4, DIM, DIM) / DIM**0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
        state = torch.cumsum(torch.einsum("bsd,bse->bsde", k, v), dim=1)
        mixed = torch.einsum("bsd,bsde->bse", q, state) / (q * k.cumsum(dim=1)).sum(dim=-1, keepdim=True)
        weights, chosen = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        answers = torch.einsum("bsd,ide->bsie", mixed, self.experts)
        picked = answers.gather(2, chosen[..., None].expand(-1, -1, -1, DIM))
        return x + self.out((weights[..., None] * picked).sum(dim=2))


def foreign_nystrom() -> nn.Module:
    from nystrom_attention import Nystromformer

    return Nystromformer(dim=DIM, depth=1, dim_head=8, heads=HEADS, num_landmarks=4, pinv_iterations=3)


class Cached(nn.Module):
    """A causal model of transformers whose cache is one tensor per input, as files have it."""

    def __init__(self, model: nn.Module, wants_positions: bool = False) -> None:
        super().__init__()
        self.model, self.wants_positions = model, wants_positions

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **state: Tensor) -> dict[str, Tensor]:
        from transformers import DynamicCache

        positions = state.pop("position_ids", None)
        layers = len(state) // 2
        pairs = [tuple(state[f"past_key_values.{i}.{part}"] for part in ("key", "value")) for i in range(layers)]
        more = {} if positions is None else {"position_ids": positions}
        cache = DynamicCache(pairs)
        result = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **more
        )
        found = {"logits": result.logits}
        for i, (key, value) in enumerate(pairs_of_cache(result.past_key_values)):
            found |= {f"present.{i}.key": key, f"present.{i}.value": value}
        return found


def pairs_of_cache(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values by layer, in either release of transformers."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def past(length: int, *, positions: bool = False, heads: int = 2, head_dim: int = 16) -> dict[str, Tensor]:
    """A prompt after `length` tokens in the cache of two layers."""
    found = {"input_ids": ids()["input_ids"], "attention_mask": torch.ones(BATCH, length + LENGTH, dtype=torch.int64)}
    if positions:
        found["position_ids"] = torch.arange(length, length + LENGTH).repeat(BATCH, 1)
    for i in range(2):
        for part in ("key", "value"):
            found[f"past_key_values.{i}.{part}"] = torch.randn(BATCH, heads, length, head_dim)
    return found


# exporters


def by_torch(
    module: nn.Module, inputs: Inputs, path: Path, *, free: Mapping[str, tuple[int, ...]] | None = None
) -> Path:
    axes = free or dict.fromkeys(inputs, (0, 1))
    shapes = {name: dict.fromkeys(axes[name], torch.export.Dim.DYNAMIC) for name in inputs}
    torch.onnx.export(
        module,
        (),
        str(path),
        kwargs=dict(inputs),
        dynamo=True,
        dynamic_shapes=shapes,
        external_data=False,
        verbose=False,
    )
    return path


def by_torchscript(
    module: nn.Module, inputs: Inputs, path: Path, *, free: Mapping[str, tuple[int, ...]] | None = None
) -> Path:
    axes = free or dict.fromkeys(inputs, (0, 1))
    named = {name: {axis: NAMES[axis] for axis in own} for name, own in axes.items()}
    torch.onnx.export(
        module,
        tuple(inputs.values()),
        str(path),
        dynamo=False,
        dynamic_axes=named,
        input_names=list(inputs),
        output_names=["result"],
    )
    return path


NAMES = ("batch", "sequence", "height", "width")


def by_transformers(module: nn.Module, inputs: Inputs, path: Path, **options: Any) -> Path:
    from transformers.exporters import OnnxConfig, OnnxExporter

    exported = OnnxExporter().export(module, dict(inputs), config=OnnxConfig(dynamic=True, **options))
    exported.save_pretrained(path.parent)
    return path


def by_optimum(module: nn.Module, inputs: Inputs, path: Path, *, task: str) -> Path:
    from optimum.exporters.onnx import onnx_export_from_model

    onnx_export_from_model(module, path.parent, task=task, do_validation=False)
    return path


def checkpoint_of(module: nn.Module, folder: Path) -> Path:
    """The folder of a checkpoint with a tokenizer of words, as builders read it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "w0")),
        unk_token="w0",
        bos_token="w1",
        eos_token="w2",
        pad_token="w0",
    )
    module.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return folder


def by_genai(module: nn.Module, inputs: Inputs, path: Path, *, precision: str = "fp32") -> Path:
    folder = checkpoint_of(module, path.parent / "checkpoint")
    command = [sys.executable, "-P", "-m", "onnxruntime_genai.models.builder", "-i", folder, "-o", path.parent]
    done = subprocess.run(
        [*command, "-p", precision, "-e", "cpu", "-c", path.parent / "cache"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return path


def by_mobius(module: nn.Module, inputs: Inputs, path: Path, **options: Any) -> Path:
    from mobius import build

    package = build(str(checkpoint_of(module, path.parent / "checkpoint")), dtype="f32", **options)
    package.save(str(path.parent))
    return path


BERT = transformers("BertModel", "Bert")
DISTILBERT = transformers("DistilBertModel", "DistilBert", dim=DIM, n_heads=HEADS, n_layers=2, hidden_dim=2 * DIM)
DEBERTA = transformers("DebertaV2Model", "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"])
MODERNBERT = transformers("ModernBertModel", "ModernBert", local_attention=8)
WAV2VEC2 = transformers("Wav2Vec2Model", "Wav2Vec2", **SPEECH)
VIT = transformers("ViTModel", "ViT", **IMAGES, add_pooling_layer=False)
RESNET = transformers("ResNetForImageClassification", "ResNet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
LLAMA = transformers("LlamaModel", "Llama", **GROUPED, use_cache=False)
# GroupQueryAttention of onnxruntime takes heads of a multiple of 16
LLAMA_LM = transformers("LlamaForCausalLM", "Llama", **GROUPED | {"head_dim": 16})
QWEN_LM = transformers("Qwen3ForCausalLM", "Qwen3", **GROUPED | {"head_dim": 16})
GPT2_LM = transformers("GPT2LMHeadModel", "GPT2", **GPT2)
GPT2_PAST = partial(past, 8, positions=True, heads=HEADS, head_dim=8)
by_optimum_with_cache = partial(by_optimum, task="text-generation-with-past")
by_torchscript_for_images = partial(by_torchscript, free={"pixel_values": (0, 2, 3)})
by_torchscript_for_batches = partial(by_torchscript, free={"pixel_values": (0,)})
DYNAMO, SCRIPT = "torch dynamo", "torch TorchScript"
OTHERS = (
    Other("BERT", DYNAMO, "", BERT, ids, by_torch, is_faulted=True),
    Other("Llama", DYNAMO, "", LLAMA, ids, by_torch),
    Other("DeBERTa-v2", DYNAMO, "", DEBERTA, ids, by_torch),
    Other("T5 encoder", DYNAMO, "", transformers("T5EncoderModel", "T5", **T5), ids, by_torch),
    Other("Retention and experts", DYNAMO, "", seeded(Retention), vectors, by_torch, is_faulted=True),
    Other("Wav2Vec2", DYNAMO, "", WAV2VEC2, waves, by_torch),
    Other("TransformerEncoder", SCRIPT, "", seeded(Encoder), ids, by_torchscript),
    Other("LSTM tagger", SCRIPT, "", seeded(Tagger), tokens, by_torchscript, is_faulted=True),
    Other("Convolutions", SCRIPT, "", seeded(Network), images, by_torchscript_for_images, is_faulted=True),
    Other("ViT", SCRIPT, "", VIT, images, by_torchscript_for_batches, is_faulted=True),
    Other("nystrom-attention", SCRIPT, "", seeded(foreign_nystrom), vectors, by_torchscript),
    Other("BERT", "transformers", "5", BERT, ids, by_transformers, is_faulted=True),
    Other("ModernBERT", "transformers", "5", MODERNBERT, ids, by_transformers),
    Other(
        "Llama, fused", "transformers", "5", LLAMA, ids, partial(by_transformers, ort_fusions="cpu"), is_faulted=True
    ),
    Other("Wav2Vec2", "transformers", "5", WAV2VEC2, waves, by_transformers),
    Other(
        "DistilBERT",
        "optimum-onnx",
        "4",
        DISTILBERT,
        ids,
        partial(by_optimum, task="feature-extraction"),
        is_faulted=True,
    ),
    Other(
        "GPT-2 with a cache", "optimum-onnx", "4", GPT2_LM, GPT2_PAST, by_optimum_with_cache, Cached, is_faulted=True
    ),
    Other("ResNet", "optimum-onnx", "4", RESNET, images, partial(by_optimum, task="image-classification")),
    Other("Llama", "onnxruntime-genai", "5", LLAMA_LM, partial(past, 8), by_genai, Cached),
    Other(
        "Qwen3, 4 bits",
        "onnxruntime-genai",
        "5",
        QWEN_LM,
        partial(past, 8),
        partial(by_genai, precision="int4"),
        Cached,
    ),
    Other("BERT", "mobius-onnx", "5", BERT, segments, by_mobius),
    Other("Qwen3", "mobius-onnx", "5", QWEN_LM, partial(past, 8, positions=True), by_mobius, Cached, is_faulted=True),
)
