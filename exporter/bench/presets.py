"""Published experiments to repeat, and the figures that were published. Loads no framework."""

from __future__ import annotations

from dataclasses import dataclass

from effexport.bench.grid import Grid, Model


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published experiment to repeat."""

    name: str
    grid: Grid
    rounds: int
    max_seconds: float


LENGTHS = (512, 1024, 2048, 4096, 8192)

LINEAR_BLOG = Preset(
    name="linear-blog",
    # The original timed a GPU (T4); a row that would take longer than --max-seconds gets fewer than its 100 runs.
    grid=Grid(
        models=(Model("softmax"), Model("linear")),
        seq_lens=(128, 256, 512, 1024, 2048, 4096, 6000),
        batches=(32,),
        heads=1,
        head_dim=64,
    ),
    rounds=100,
    max_seconds=60.0,
)

NYSTROM_TABLE1 = Preset(
    name="nystrom-table1",
    # The paper does not say how many heads its instance had; here 8 heads of 64, and its convolution is included.
    grid=Grid(
        models=(
            Model("softmax"),
            Model("nystrom", label="nystrom-64"),
            Model("nystrom", {"num_landmarks": 32}),
        ),
        seq_lens=LENGTHS,
        scope="attention",
    ),
    rounds=15,
    max_seconds=20.0,
)

REFORMER_ROUNDS = Preset(
    name="reformer-rounds",
    # The paper keeps the tokens of a batch constant; here the batch is 1, so compare tokens per second.
    grid=Grid(
        models=(Model("softmax"), *(Model("lsh", {"num_hashes": rounds}) for rounds in (1, 2, 4, 8))),
        seq_lens=(1024, 2048, 4096, 8192, 16384),
    ),
    rounds=15,
    max_seconds=20.0,
)

AFT_TABLE = Preset(
    name="aft-table",
    # The paper times whole models, most of them in training; here it is one layer with its projections, forward.
    grid=Grid(
        models=tuple(Model(name) for name in ("softmax", "aft-full", "aft-simple", "aft-local", "aft-conv")),
        seq_lens=(197, 1024, 2048, 4096),
        scope="attention",
    ),
    rounds=15,
    max_seconds=20.0,
)

PRESETS: dict[str, Preset] = {
    preset.name: preset for preset in (LINEAR_BLOG, NYSTROM_TABLE1, REFORMER_ROUNDS, AFT_TABLE)
}


Cell = str | float | tuple[float, float] | None


@dataclass(frozen=True)
class Published:
    """A published table, or a claim without one, which has neither columns nor rows.

    columns: heads, that of the row's name first. rows: the name, then a cell for each further column; a pair is memory
    in MB and time in ms. note: caveats for comparisons.
    """

    preset: str
    title: str
    source: str
    note: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()


PUBLISHED: tuple[Published, ...] = (
    Published(
        preset="nystrom-table1",
        title="Nyströmformer, Table 1",
        source="Xiong et al., Nyströmformer (AAAI 2021), Table 1: memory in MB and time in ms, on a GTX 1080 Ti",
        note="One instance through the self-attention module alone, forward, in PyTorch. Milliseconds on different "
        "machines do not compare; the ratios to softmax do, roughly. effexport does not have Linformer and Longformer.",
        columns=("Model", "512", "1024", "2048", "4096", "8192"),
        rows=(
            ("Transformer", (54, 0.8), (186, 2.4), (685, 10.0), (2620, 32.9), (10233, 155.4)),
            ("Linformer-256", (41, 0.7), (81, 1.3), (165, 2.7), (366, 5.3), (635, 11.3)),
            ("Longformer-257", (32.2, 2.4), (65, 4.6), (130, 9.2), (263, 18.5), (455, 36.2)),
            ("Nyströmformer-64", (35, 0.7), (63, 1.3), (118, 2.7), (229, 5.9), (450, 12.3)),
            ("Nyströmformer-32", (26, 0.6), (49, 1.2), (96, 2.6), (193, 5.6), (383, 11.5)),
        ),
    ),
    Published(
        preset="linear-blog",
        title="“Linear Attention Is All You Need”",
        source="Towards Data Science: “up to 60 times” as fast as softmax; one layer, width 64 per head, batch 32, "
        "128 to 6000 tokens, 100 runs, on a T4",
        note="Published as a chart; there is no table. It timed a kernel that is not linear attention: its two sums "
        "contract the channels of the values away, O(seq · head_dim) work instead of O(seq · head_dim²), so that "
        "each sequence gives one vector and channels are not mixed. What is measured here is linear attention as its "
        "paper defines it, so “up to 60 times” is not a goal.",
    ),
    Published(
        preset="reformer-rounds",
        title="Reformer, speed by rounds and length",
        source="Kitaev et al., Reformer (ICLR 2020), Figure 5, right: curves, on 8 GPUs or 8 TPU v3 cores",
        note="The paper has no table of speeds. The figure says that with the tokens of a batch fixed, the time of LSH "
        "attention stays flat as sequences grow, for every number of rounds, while that of full attention rises.",
    ),
    Published(
        preset="reformer-rounds",
        title="Reformer in Long Range Arena",
        source="Tay et al., Long Range Arena (ICLR 2021), Table 2: training steps per second (GB per device), "
        "text task, batch 32, on 4 × 4 TPU v3",
        note="Independent of Reformer's authors, and of whole models in training: there Reformer was slower than the "
        "Transformer at every length up to 4K, and needed less memory.",
        columns=("Model", "1K", "2K", "3K", "4K"),
        rows=(
            ("Transformer", "8.1 (0.85)", "4.9 (2.65)", "2.3 (5.51)", "1.4 (9.48)"),
            ("Local attention", "9.2 (0.42)", "8.4 (0.76)", "7.4 (1.06)", "7.4 (1.37)"),
            ("Reformer", "4.4 (0.48)", "2.2 (0.99)", "1.5 (1.53)", "1.1 (2.28)"),
            ("Linear Transformer", "9.1 (0.37)", "9.3 (0.57)", "8.6 (0.80)", "7.8 (1.03)"),
        ),
    ),
    Published(
        preset="aft-table",
        title="AFT, Table 2: CIFAR-10",
        source="Zhai et al., An Attention Free Transformer (2021), Table 2: training, batch 32, on 8 V100",
        note="Whole models in training, so neither figure is that of a layer; the order of the models is what "
        "compares.",
        columns=("Model", "Bits per dimension", "Iterations per second", "GB per GPU"),
        rows=(
            ("Transformer, 12 × 512", 2.88, 1.35, 30.6),
            ("Transformer, 24 × 256", 2.86, 1.36, 30.4),
            ("Image Transformer", "2.90", 1.61, 22.3),
            ("AFT-local-256, 12 × 512", "2.80", 1.68, 11.4),
            ("AFT-local-256, 24 × 256", 2.74, 1.67, 12.8),
            ("AFT-simple, 24 × 256", 2.89, 2.15, 9.5),
        ),
    ),
    Published(
        preset="aft-table",
        title="AFT, Table 4: enwik8",
        source="Zhai et al., An Attention Free Transformer (2021), Table 4: training, batch 128, 1024 tokens, "
        "on 8 V100",
        note="Whole models in training, as in Table 2.",
        columns=("Model", "Bits per character", "Iterations per second", "GB per GPU"),
        rows=(
            ("Transformer, 12 × 512", 1.137, 1.42, 29.4),
            ("Transformer, 24 × 256", "1.130", 1.57, 28.3),
            ("Reformer", 1.195, 1.05, 20.9),
            ("Synthesizer", 1.298, 1.49, 29.9),
            ("Linear Transformer", 1.207, 1.46, 10.6),
            ("Performer", 1.199, 1.44, 10.1),
            ("AFT-local-32, 12 × 512", "1.180", 1.85, 11.3),
            ("AFT-local-32, 24 × 256", 1.154, 2.04, 11.2),
            ("AFT-simple", 1.209, 2.61, 9.6),
        ),
    ),
    Published(
        preset="aft-table",
        title="AFT, Table 7: ImageNet",
        source="Zhai et al., An Attention Free Transformer (2021), Table 7: inference, batch 256, 197 tokens, "
        "on a V100",
        note="At 197 tokens AFT-full is about as fast as attention, not faster.",
        columns=("Model", "Top-1 in %", "Images per second", "GB"),
        rows=(
            ("DeiT tiny", 72.2, 2507, 1.9),
            ("DeiT small", 79.9, 1010, 2.9),
            ("LambdaNetwork tiny", 72.4, 2157, 2.7),
            ("LambdaNetwork small", 80.0, 1057, 5.8),
            ("AFT-full tiny", 72.4, 2523, 1.8),
            ("AFT-full small", 79.8, 1011, 2.6),
            ("AFT-conv tiny, kernel 11, 32 heads", 73.9, 2359, 1.8),
            ("AFT-conv tiny, kernel 11, 192 heads", 74.8, 2365, 2.2),
            ("AFT-conv small, kernel 11, 16 heads", 80.2, 989, 2.5),
            ("AFT-conv small, kernel 11, 384 heads", 80.8, 936, 3.2),
            ("AFT-conv small, kernel 15, 384 heads", 81.0, 936, 3.2),
        ),
    ),
)


# titles of the pages of each preset
TITLES: dict[str, str] = {
    "nystrom-table1": "Nyströmformer, Table 1",
    "linear-blog": "Linear attention, “up to 60 times”",
    "reformer-rounds": "Reformer, rounds and length",
    "aft-table": "AFT, Tables 2, 4 and 7",
}


def published_of(preset: str) -> tuple[Published, ...]:
    """The publications that a preset repeats; none for "" and for unknown names."""
    return tuple(one for one in PUBLISHED if one.preset == preset)
