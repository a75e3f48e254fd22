"""Files of weights that are given to a build."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file
from small_builds import module_from_path

from effexport.base.spec import build_spec_from_options
from effexport.export.module_source import module_from_seed
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch")
SMALL = {"variant": "lsh", "dim": 32, "heads": 2, "layers": 1, "seq_len": 64, "vocab_size": 16}


def test_rotations_of_other_hash_rounds_are_left_out_of_the_file(tmp_path: Path) -> None:
    four, eight = (build_spec_from_options(SMALL | {"num_hashes": count}, None) for count in (4, 8))
    tensors = module_from_seed(four).state_dict()
    rotations = [name for name in tensors if name.endswith("rotations")]
    given = tmp_path / "weights.safetensors"
    save_file(tensors, given)
    with pytest.raises(SpecError, match=f"hash rounds or buckets, leave {rotations[0]} out of the file: rotations"):
        module_from_path(eight, given)
    save_file({name: tensor for name, tensor in tensors.items() if name not in rotations}, given)
    assert module_from_path(eight, given).state_dict()[rotations[0]].shape[2] == 8
