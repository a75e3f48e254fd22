#!/usr/bin/env python3
"""Pack artifacts of an earlier commit, one of each kind, to see that later ones still open, verify, run and refit them.

Builds with the environment of a checkout of that commit (its `scripts/quickstart.sh` makes it), so that nothing of the
present code takes part:

    git worktree add ../earlier db4d7bd && ../earlier/scripts/quickstart.sh && ../earlier/scripts/test.sh --all -k none
    .venv/bin/python scripts/corpus.py ../earlier tests/corpus/db4d7bd.tar.xz
    .venv/bin/python scripts/corpus.py ../earlier build/large.tar.xz --large    # widths and lengths of real models
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# Options of `effexport build` by the name of the artifact. SIZES is put in where a kind takes sizes.
SIZES = "--dim 16 --heads 2 --layers 1 --seq-len 16 --batch 2"
LARGE = "--dim 256 --heads 4 --layers 4 --seq-len 1024 --batch 2"
KINDS = {
    "softmax": "--variant softmax SIZES",
    "linear": "--variant linear SIZES --external-data",
    "nystrom": "--variant nystrom SIZES --pool mean --normalize",
    "lsh": "--variant lsh SIZES",
    "aft-full": "--variant aft-full SIZES",
    "aft-simple": "--variant aft-simple SIZES",
    "aft-local": "--variant aft-local SIZES",
    "aft-conv": "--variant aft-conv SIZES",
    "attention": "--variant nystrom --scope attention --dim 16 --heads 2 --seq-len 16",
    "causal": "--variant linear SIZES --causal --lm-head",
    "fp16": "--variant nystrom SIZES --precision fp16",
    "int8": "--variant linear SIZES --precision int8",
    "inlined": "--variant lsh SIZES --inline",
    "engine": "--variant linear SIZES --target trt-rtx",
    "classifier": "--checkpoint checkpoint",
    "module": "--module mine:make",
    "image": "--module mine:image",
}
MODULE = '''
"""Models of a user."""

import torch
import torch.nn.functional as F
from torch import nn


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 5)

    def forward(self, words, attention_mask):
        q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in self.qkv(self.table(words)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask[:, None, None].bool())
        return self.out(mixed.transpose(1, 2).flatten(2))


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 4)

    def forward(self, image):
        return self.head(self.patches(image).flatten(2).mean(-1))


def make():
    ones = torch.ones(2, 12, dtype=torch.int64)
    return Mine(), {"words": torch.randint(0, 50, (2, 12)), "attention_mask": ones}


def image():
    return Image(), torch.randn(2, 3, 12, 12)
'''
# Runs in the environment of the checkout, which has the tokenizers and checkpoints of its tests.
CHECKPOINT = """
import sys
from pathlib import Path
from transformers import NystromformerConfig, NystromformerForSequenceClassification
import torch
from random_tokenizers import saved_tokenizer

torch.manual_seed(0)
labels = {0: "NO", 1: "MAYBE", 2: "YES"}
config = NystromformerConfig(
    vocab_size=210, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=40, segment_means_seq_len=8, num_landmarks=8, conv_kernel_size=3, pad_token_id=0,
    id2label=labels, label2id={name: i for i, name in labels.items()},
)
NystromformerForSequenceClassification(config).save_pretrained(sys.argv[1])
saved_tokenizer("bert", Path(sys.argv[1]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of the earlier commit, with its .venv")
    parser.add_argument("output", type=Path, help="the archive, .tar.xz")
    parser.add_argument("--large", action="store_true", help="sizes of real models")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), args.checkout.resolve(), LARGE if args.large else SIZES)
        with tarfile.open(args.output, "w:xz", preset=9) as archive:
            archive.add(folder, arcname=".", filter=anonymous)
    print(f"{args.output}: {len(KINDS)} artifacts, {args.output.stat().st_size / 1e6:.2f} MB")
    return 0


def make(folder: Path, checkout: Path, sizes: str) -> None:
    python = checkout / ".venv" / "bin" / "python"
    (folder / "mine.py").write_text(MODULE, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(checkout / "tests" / "support"), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([python, "-c", CHECKPOINT, "checkpoint"], cwd=folder, env=environment, check=True)
    for name, options in KINDS.items():
        words = options.replace("SIZES", sizes).split()
        print(f"effexport build {' '.join(words)} -o {name}", file=sys.stderr)
        built = subprocess.run(
            [python, "-P", "-m", "effexport", "build", *words, "-o", name], cwd=folder, capture_output=True, text=True
        )
        if built.returncode:
            raise SystemExit(f"{name}: exit status {built.returncode}\n{built.stderr}")


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member without owner and time: the same artifacts make the same archive."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    sys.exit(main())
