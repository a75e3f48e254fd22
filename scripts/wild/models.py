"""The published models, as their packages ship them: random weights, few layers, and inputs of any length.

transformers and the packages of layers that models/adapters/ knows are those of .venv; the others are listed in
scripts/wild-requirements.txt. A package is imported when a model of it is made, so that one that does not load costs
its own models only.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DIM, HEADS, VOCABULARY = 64, 4, 200
FREE_IMAGE = {0: "batch", 2: "height", 3: "width"}
LENGTHS = (40, 100, 257)
# Lengths where each token takes long, and sides of small images; of images of one size.
SHORT, ONE_SIDE = (8, 16, 24), (64, 64, 64)


@dataclass(frozen=True)
class Model:
    """One row. package: the distribution. make: the module. inputs: by argument, of a batch and a length, which is
    the side of images. lengths: the second is that of the example. dynamic: as `effexport.export` takes it. mask: the
    argument that says which tokens count; answers to others are not compared."""

    name: str
    package: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    lengths: tuple[int, int, int] = LENGTHS
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    mask: str = ""


def ids(batch: int, length: int, name: str = "input_ids") -> dict[str, Tensor]:
    return {name: torch.randint(5, VOCABULARY, (batch, length))}


def padded_ids(batch: int, length: int) -> dict[str, Tensor]:
    """Tokens, and a mask that hides the last third of every second sample."""
    counts = torch.tensor([length - i % 2 * (length // 3) for i in range(batch)])
    kept = torch.arange(length)[None] < counts[:, None]
    return {"input_ids": torch.where(kept, ids(batch, length)["input_ids"], 0), "attention_mask": kept.long()}


def first_is_global(batch: int, length: int) -> dict[str, Tensor]:
    marked = (torch.arange(length) == 0).long().repeat(batch, 1)
    return {**padded_ids(batch, length), "global_attention_mask": marked}


def vectors(batch: int, length: int, *names: str, dim: int = DIM) -> dict[str, Tensor]:
    return {name: torch.randn(batch, length, dim) for name in names or ("x",)}


def images(batch: int, side: int, name: str = "x", channels: int = 3) -> dict[str, Tensor]:
    return {name: torch.randn(batch, channels, side, side)}


def sana_inputs(batch: int, side: int) -> dict[str, Tensor]:
    captions, times = torch.randn(batch, 20, 32), torch.randint(0, 1000, (batch,))
    return {**images(batch, side, "hidden_states", 4), "encoder_hidden_states": captions, "timestep": times}


def loftr_inputs(batch: int, length: int) -> dict[str, Tensor]:
    return vectors(batch, length, "feat0", "feat1")


def import_torchvision() -> None:
    """Import torchvision, which timm, vit-pytorch and transformers do, if it is there. Its wheel on PyPI has operators
    for CUDA; where PyTorch is for CPUs it cannot load them, and then does not import. No model here uses them."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        importlib.import_module("torchvision")


def of(package: str, name: str, *sizes: Any, **options: Any) -> Callable[[], nn.Module]:
    """A function that makes a class, or calls a function, of a package."""
    return lambda: getattr(importlib.import_module(package), name)(*sizes, **options)


def transformers(kind: str, part: str = "", **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers with a small configuration. part: of the model, such as its encoder."""

    def make() -> nn.Module:
        package = importlib.import_module("transformers")
        name = kind.removesuffix("EncoderModel") if kind.endswith("T5EncoderModel") else kind.removesuffix("Model")
        module = getattr(package, kind)(getattr(package, f"{name}Config")(**SIZES | options)).eval()
        return getattr(module, part) if part else module

    return make


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": 2 * DIM,
    "pad_token_id": 0,
    "initializer_range": 0.1,
    "use_cache": False,
}
T5: dict[str, Any] = {"d_model": DIM, "d_kv": 16, "d_ff": 2 * DIM, "num_layers": 2, "num_heads": HEADS}
REFORMER: dict[str, Any] = {
    "attn_layers": ["local", "lsh"],
    "attention_head_size": 16,
    "lsh_attn_chunk_length": 16,
    "local_attn_chunk_length": 16,
    "num_buckets": 8,
    "num_hashes": 2,
    "feed_forward_size": DIM,
    "hash_seed": 1,
    "axial_pos_embds": False,
    "max_position_embeddings": 512,
}
ENCODER: dict[str, Any] = {
    "d_model": DIM,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_ffn_dim": 2 * DIM,
    "decoder_ffn_dim": DIM,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
}
QWEN: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DENSE: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
WAVES: dict[str, Any] = {
    "conv_dim": [32, 32],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
MATCHER: dict[str, Any] = {
    "stage_num_blocks": [1, 1, 1, 1],
    "out_features": [16, 16, 32, 64],
    "stage_stride": [2, 1, 2, 2],
    "num_attention_layers": 1,
    "num_attention_heads": 8,
}
LM: dict[str, Any] = {"num_tokens": VOCABULARY, "max_seq_len": 512, "dim": DIM, "depth": 2, "heads": HEADS}
LAYERS: dict[str, Any] = {"dim": DIM, "depth": 2, "heads": HEADS, "dim_head": 16}
SANA: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": DIM,
    "caption_channels": 32,
    "sample_size": 16,
}
LINFORMER: dict[str, Any] = {"dim": DIM, "seq_len": 128, "depth": 2, "k": 32, "heads": HEADS}
SINKHORN: dict[str, Any] = {"dim": DIM, "max_seq_len": 512, "depth": 2, "heads": HEADS, "bucket_size": 32}
PERCEIVER: dict[str, Any] = {
    "num_freq_bands": 4,
    "depth": 2,
    "max_freq": 10.0,
    "input_channels": DIM,
    "input_axis": 1,
    "num_latents": 16,
    "latent_dim": DIM,
    "latent_heads": HEADS,
    "num_classes": 10,
}
COARSE = {"d_model": DIM, "nhead": HEADS, "layer_names": ["self", "cross"] * 2, "attention": "linear"}
SERIES: dict[str, Any] = {"num_variates": 7, "lookback_len": 96, "pred_length": 12}
VIT: dict[str, Any] = {"dim": DIM, "image_size": 64, "patch_size": 8, "num_classes": 10}


def timm(name: str, **of_sizes: Any) -> Model:
    """A model for images of one size, as it is trained, unless of_sizes has fields that say otherwise."""
    make = of("timm", "create_model", name, pretrained=False, num_classes=10)
    return replace(Model(name, "timm", make, images, (128, 128, 128)), **of_sizes)


def reformer_lm() -> nn.Module:
    from reformer_pytorch import Autopadder, ReformerLM

    sizes = {"heads": HEADS, "dim_head": 16, "bucket_size": 32, "n_hashes": 2}
    return Autopadder(ReformerLM(VOCABULARY, DIM, 2, 512, causal=True, **sizes))


def efficient_vit() -> nn.Module:
    transformer = of("nystrom_attention", "Nystromformer", **LAYERS, num_landmarks=16)()
    return of("vit_pytorch.efficient", "ViT", **VIT, transformer=transformer)()


def x_decoder() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=DIM, depth=2, heads=HEADS, attn_dim_head=16, alibi_pos_bias=True)
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=512, attn_layers=layers)


def mamba() -> nn.Module:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=DIM, n_layers=2))


def retnet() -> nn.Module:
    from yet_another_retnet.retnet import RetNetDecoder, RetNetDecoderLayer

    return RetNetDecoder(RetNetDecoderLayer(DIM, HEADS, 2 * DIM), 2)


class Fla(nn.Module):
    """Projections around a naive function of fla. arguments: from (q, k, v) of (batch, heads, seq, head_dim) and
    gates, to what the function takes, and back."""

    def __init__(self, folder: str, function: str, call: Callable[..., Tensor], gates: int = 1) -> None:
        super().__init__()
        # by its path: the package itself needs Triton
        found = importlib.util.find_spec("fla")
        assert found is not None
        assert found.origin is not None
        file = Path(found.origin).parent / "ops" / folder / "naive.py"
        spec = importlib.util.spec_from_file_location(f"fla_{folder}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.call = partial(call, getattr(module, function))
        self.qkv, self.gate, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, gates), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(x).chunk(3, dim=-1))
        return self.out(self.call(q, k, v, self.gate(x)).flatten(2))


def retention(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    return function(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def gated(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return function(q, k, v, nn.functional.logsigmoid(gate).unflatten(-1, (HEADS, -1)) / 16)[0]


def delta(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    beta, decay = gate.chunk(2, dim=-1)
    k = nn.functional.normalize(k, dim=-1)
    return function(q, k, v, beta=beta.sigmoid(), g=nn.functional.logsigmoid(decay))[0]


def text(name: str, kind: str, part: str = "", **options: Any) -> Model:
    """A model of transformers that takes tokens and a mask."""
    return Model(name, "transformers", transformers(kind, part, **options), padded_ids, mask="attention_mask")


def layers(name: str, package: str, **options: Any) -> Model:
    """Two layers, which take vectors. The class has the name of the row, in this function and the next one."""
    return Model(name, package, of(package.replace("-", "_"), name, **LAYERS | options), vectors)


def language(name: str, package: str, *sizes: Any, lengths: tuple[int, int, int] = LENGTHS, **options: Any) -> Model:
    """A language model, which takes tokens without a mask."""
    make = of(package.replace("-", "_"), name, *sizes, **options)
    return Model(name, package, make, partial(ids, name="x"), lengths)


def fla(name: str, folder: str, function: str, call: Callable[..., Tensor], gates: int = 1) -> Model:
    return Model(name, "fla-core", lambda: Fla(folder, function, call, gates), vectors, SHORT)


MODELS = (
    text("BERT", "BertModel"),
    text("DistilBERT", "DistilBertModel", dim=DIM, n_heads=HEADS, n_layers=2, hidden_dim=2 * DIM),
    text("DeBERTa-v2", "DebertaV2Model", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    text("ModernBERT", "ModernBertModel", local_attention=32),
    replace(
        text("Nyströmformer", "NystromformerModel", num_landmarks=8, segment_means_seq_len=128, conv_kernel_size=5),
        lengths=(128, 128, 128),
    ),
    text("RoFormer", "RoFormerModel", embedding_size=DIM),
    text("ESM", "EsmModel", position_embedding_type="rotary", mask_token_id=4, token_dropout=True),
    text("T5 encoder", "T5EncoderModel", **T5),
    text("LongT5 local", "LongT5EncoderModel", **T5, local_radius=15),
    text("LongT5 tglobal", "LongT5EncoderModel", **T5, local_radius=15, encoder_attention_type="transient-global"),
    text("Llama", "LlamaModel", num_key_value_heads=2),
    text("Longformer", "LongformerModel", attention_window=[32, 32], max_position_embeddings=600),
    replace(
        text(
            "Longformer, 512 tokens wide", "LongformerModel", attention_window=[512, 512], max_position_embeddings=2100
        ),
        inputs=first_is_global,
        lengths=(300, 700, 2000),
    ),
    text("LED encoder", "LEDModel", "encoder", **ENCODER, attention_window=[32, 32]),
    text("BigBird", "BigBirdModel", block_size=8, num_random_blocks=2, max_position_embeddings=512),
    text("Qwen3-Next", "Qwen3NextModel", **QWEN),
    text("Qwen3-Next, dense", "Qwen3NextModel", **QWEN | DENSE),
    Model("FNet", "transformers", transformers("FNetModel"), ids),
    Model("Reformer", "transformers", transformers("ReformerModel", **REFORMER), ids),
    Model("RWKV", "transformers", transformers("RwkvModel"), ids, SHORT),
    Model("Mamba", "transformers", transformers("MambaModel"), ids, SHORT),
    text("Mamba-2", "Mamba2Model", num_heads=8, head_dim=16, state_size=16, n_groups=2),
    Model(
        "Whisper encoder",
        "transformers",
        transformers("WhisperModel", "encoder", **ENCODER, num_mel_bins=20, max_source_positions=100),
        lambda batch, length: {"input_features": torch.randn(batch, 20, length)},
        (200, 200, 200),
    ),
    Model(
        "Wav2Vec2",
        "transformers",
        transformers("Wav2Vec2Model", **WAVES),
        lambda batch, length: {"input_values": torch.randn(batch, length)},
        (400, 1000, 2570),
        {"input_values": {0: "batch", 1: "samples"}},
    ),
    Model(
        "EfficientLoFTR",
        "transformers",
        transformers("EfficientLoFTRModel", **MATCHER),
        lambda batch, side: {"pixel_values": torch.randn(batch, 2, 3, side, side)},
        ONE_SIDE,
    ),
    timm("efficientvit_b1", lengths=(96, 128, 160), dynamic={"x": FREE_IMAGE}),
    timm("xcit_nano_12_p16_224"),
    timm("edgenext_small"),
    timm("mobilevitv2_100"),
    Model(
        "LoFTR coarse transformer",
        "kornia",
        of("kornia.feature.loftr.loftr_module", "LocalFeatureTransformer", COARSE),
        loftr_inputs,
        (100, 300, 700),
    ),
    layers("Performer", "performer-pytorch", nb_features=32),
    language("PerformerLM", "performer-pytorch", **LM, dim_head=16),
    Model("Efficient ViT (Nyström)", "vit-pytorch", efficient_vit, partial(images, name="img"), ONE_SIDE),
    Model(
        "SimpleViT",
        "vit-pytorch",
        of("vit_pytorch", "SimpleViT", **VIT, depth=2, heads=HEADS, mlp_dim=2 * DIM),
        partial(images, name="img"),
        ONE_SIDE,
    ),
    Model(
        "Encoder, rotary",
        "x-transformers",
        of("x_transformers", "Encoder", dim=DIM, depth=2, heads=HEADS, attn_dim_head=16, rotary_pos_emb=True),
        vectors,
    ),
    Model("Decoder, ALiBi", "x-transformers", x_decoder, partial(ids, name="x")),
    Model("ReformerLM in Autopadder", "reformer-pytorch", reformer_lm, partial(ids, name="x")),
    language("LinformerLM", "linformer", VOCABULARY, **LINFORMER, lengths=(128, 128, 128)),
    language("LocalTransformer", "local-attention", **LM, dim_head=16, local_attn_window_size=32),
    layers("Nystromformer", "nystrom-attention", num_landmarks=16),
    Model(
        "TransMIL",
        "torchmil",
        of("torchmil.models.transmil", "TransMIL", (DIM,), att_dim=DIM, n_landmarks=16),
        lambda batch, length: vectors(batch, length, "X"),
    ),
    language("LinearAttentionTransformerLM", "linear-attention-transformer", **LM, causal=True),
    Model("RetNet", "yet-another-retnet", retnet, vectors),
    Model("AFTFull", "aft-pytorch", of("aft_pytorch.aft_pytorch", "AFTFull", 512, DIM, 48), vectors),
    Model(
        "SANA",
        "diffusers",
        of("diffusers", "SanaTransformer2DModel", **SANA),
        sana_inputs,
        SHORT,
        {"hidden_states": FREE_IMAGE},
    ),
    Model("mamba.py", "mambapy", mamba, vectors, SHORT),
    layers("Conformer", "conformer", conv_kernel_size=15),
    Model(
        "Perceiver",
        "perceiver-pytorch",
        of("perceiver_pytorch", "Perceiver", **PERCEIVER),
        lambda batch, length: vectors(batch, length, "data"),
    ),
    language("SinkhornTransformerLM", "sinkhorn-transformer", VOCABULARY, **SINKHORN, lengths=(64, 128, 256)),
    language("HTransformer1D", "h-transformer-1d", **LM, dim_head=16, block_size=16),
    Model(
        "AxialImageTransformer",
        "axial-attention",
        of("axial_attention", "AxialImageTransformer", 32, 1, heads=HEADS, reversible=False),
        partial(images, channels=32),
        SHORT,
        {"x": FREE_IMAGE},
    ),
    Model(
        "iTransformer",
        "itransformer",
        of("iTransformer", "iTransformer", **LAYERS | SERIES),
        lambda batch, length: {"x": torch.randn(batch, length, 7)},
        (96, 96, 96),
    ),
    fla("Retention, naive", "retention", "naive_retention", retention),
    fla("GLA, naive", "gla", "naive_recurrent_gla", gated, DIM),
    fla("Gated DeltaNet, naive", "gated_delta_rule", "naive_recurrent_gated_delta_rule", delta, 2 * HEADS),
)
