"""Options and facts of Reformer's LSH layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from effexport.models.attention_spec import Hashes
from effexport.models.contract import HostileInputs
from effexport.models.shapes import Product, Shapes
from effexport.models.validation import MOST_REPEATS, as_written, check_count, nearest_multiples, require
from effexport.models.variants.local import LookAroundSpec

# Exported graphs pad the numbers of buckets in float32, which is exact below this.
MOST_BUCKETS = 2**24


# Tokens that buckets_by_length allows at least: rotations for so many are small.
LEAST_MAX_SEQ_LEN = 8192


HF_ROUNDING = (
    "mask_constants 'hf' reproduces what rounding to float32 does to tokens that can only attend to themselves: up to "
    "0.4 %"
)


@dataclass(frozen=True, kw_only=True, repr=False)
class LSHSpec(LookAroundSpec):
    """Reformer's LSH layer.

    num_hashes: independent hash rounds. num_buckets: even count, or even factors of it (None: about
    2·seq_len/chunk_length, a power of two, by the rule of transformers). hash_seed: seed of the rotations, drawn once.
    mask_constants: "safe" combines the rounds with a max-subtracted softmax; "hf" reproduces the rounding of
    transformers, whose round weights do not add up to one for a token that can only attend to itself.

    The others are what reformer-pytorch does. buckets_by_length: as many buckets as the padded input has chunks, an
    even number, for inputs of up to `max_seq_len` tokens. rotations_per_head: False: all heads share one rotation.
    pad_bucket: "last" keeps padding apart, behind all buckets; "hashed" hashes and sorts it with the rest, and a token
    that is padding sees only itself. scaled_keys: divide logits by √head_dim, with keys of length one without an
    epsilon under the root. rotary: rotates after hashing. self_logit: the logit of a token's own key.
    attend_across_buckets: False: a token sees only its own bucket (eq. 4 of the paper). allow_duplicates: False: a pair
    that meets in several rounds counts once. As in reformer-pytorch, a pair that meets across the ends of two rounds
    (`circular`) is not counted there, which raises its logit by log(1e9) if it meets nowhere else.
    """

    variant: ClassVar[str] = "lsh"
    place: ClassVar[int] = 40
    layer: ClassVar[str] = "variants.lsh.layer.LSHAttention"
    formula: ClassVar[str] = "softmax over sorted hash chunks of QQ̂ᵀ, combined over rounds"
    cost: ClassVar[str] = "r·n·c·d"
    is_hashed: ClassVar[bool] = True
    hostile: ClassVar[HostileInputs] = HostileInputs(zero_tokens=True)
    option_labels: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "num_hashes": lambda rounds: f"lsh, {rounds} round{'s' * (rounds != 1)}"
    }

    num_hashes: int = 2
    num_buckets: int | tuple[int, ...] | None = None
    hash_seed: int = 0
    mask_constants: Literal["safe", "hf"] = "safe"
    buckets_by_length: bool = False
    rotations_per_head: bool = True
    pad_bucket: Literal["last", "hashed"] = "last"
    scaled_keys: bool = False
    self_logit: float = -1e5
    attend_across_buckets: bool = True
    allow_duplicates: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            -1e8 <= self.self_logit <= 0,
            f"self_logit is {self.self_logit}; expected -1e8 to 0, between the logits of hidden and of other keys",
        )
        require(
            not self.buckets_by_length or self.num_buckets is None,
            f"num_buckets is {as_written(self.num_buckets)}, but buckets_by_length derives it from the length of the "
            "input; leave one of them out",
        )
        check_count("num_hashes", self.num_hashes, MOST_REPEATS)
        # `of_layer` adds the number of the layer
        require(0 <= self.hash_seed < 2**63, f"hash_seed is {self.hash_seed}; expected 0 to 2^63 - 1")
        given = as_written(self.num_buckets)
        for factor in self.bucket_factors:
            require(
                factor >= 2 and factor % 2 == 0,
                f"num_buckets is {given}; each count must be even, because buckets are the signs of "
                f"projections; the nearest that work: {nearest_multiples(factor, 2)}",
            )
        require(
            self.total_buckets < MOST_BUCKETS,
            f"num_buckets is {given}, {self.total_buckets} in all; expected fewer than {MOST_BUCKETS}",
        )

    @property
    def bucket_factors(self) -> tuple[int, ...]:
        """The factors of the bucket count; a single number when it is not factorised. The most there can be, if they
        depend on the length of the input."""
        if self.max_seq_len is not None:
            return (self.max_seq_len // self.chunk_length,)
        if self.num_buckets is None:
            return automatic_num_buckets(self.seq_len, self.chunk_length)
        return (self.num_buckets,) if isinstance(self.num_buckets, int) else self.num_buckets

    @property
    def total_buckets(self) -> int:
        """Number of buckets of one round, without the extra one for padding."""
        return math.prod(self.bucket_factors)

    @property
    def hashes(self) -> Hashes:
        return Hashes(self.heads * self.num_hashes, self.total_buckets)

    @property
    def max_seq_len(self) -> int | None:
        """Only buckets_by_length sets a limit: a rotation has a column for every two chunks of the longest input."""
        if not self.buckets_by_length:
            return None
        longest = max(2 * self.seq_len, LEAST_MAX_SEQ_LEN)
        return math.ceil(longest / self.pad_multiple) * self.pad_multiple

    @property
    def pad_multiple(self) -> int:
        return 2 * self.chunk_length if self.buckets_by_length else self.chunk_length

    @property
    def why_not_invariant(self) -> str:
        if self.buckets_by_length:
            return "buckets_by_length: the padded length of a batch decides how many buckets there are"
        return super().why_not_invariant or self.why_padding_counts

    @property
    def why_padding_counts(self) -> str:
        if self.pad_bucket == "last":
            return ""
        return "pad_bucket=hashed: padding is sorted with the rest, so its content shifts chunk boundaries"

    @property
    def why_float64_differs(self) -> str:
        return HF_ROUNDING if self.mask_constants == "hf" else ""

    @property
    def has_fused_form(self) -> bool:
        """True if the fused operators have all options that are set."""
        return (
            not (self.buckets_by_length or self.scaled_keys)
            and self.attend_across_buckets
            and self.allow_duplicates
            and self.pad_bucket == type(self).pad_bucket
            and self.self_logit == type(self).self_logit
        )

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("LSHHash", "LSHSort", "LSHAttention") if fused and self.has_fused_form else ("LSHSort",)

    @property
    def projected(self) -> tuple[int, dict[str, int]]:
        """Queries and keys are one."""
        return self.heads, {"qk": self.head_size, "v": self.head_size}

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        directions = self.num_hashes * sum(self.bucket_factors) // 2
        yield Product(batch * self.heads, seq_len, self.head_size, directions)  # rotations
        # every round has chunks of its own
        yield from super().core_products(batch * self.num_hashes, seq_len)

    def largest_intermediate(self, batch: int, seq_len: int) -> int:
        return super().largest_intermediate(batch * self.num_hashes, seq_len)

    def weights(self) -> Shapes:
        heads, half = self.heads if self.rotations_per_head else 1, sum(self.bucket_factors) // 2
        return super().weights() | {"hash.rotations": (heads, self.head_size, self.num_hashes, half)}

    def least_elements(self, batch: int, seq_len: int) -> int:
        """With the logits of every round."""
        return super().least_elements(batch * self.num_hashes, seq_len)

    def of_layer(self, number: int) -> Self:
        return dataclasses.replace(self, hash_seed=self.hash_seed + number)


def automatic_num_buckets(seq_len: int, chunk_length: int, max_seq_len: int | None = None) -> tuple[int, ...]:
    """Bucket factors for a sequence length, by the rule of transformers' Reformer.

    A power of two near 2·seq_len/chunk_length, split into two factors where it exceeds
    2·max(√(max_seq_len/chunk_length), chunk_length).
    """
    power = int(math.log2(2 * max(1, seq_len // chunk_length)))
    limit = 2 * max(math.isqrt((max_seq_len or seq_len) // chunk_length), chunk_length)
    if 2**power <= limit:
        return (2**power,)
    return (2 ** (power // 2), 2 ** (power - power // 2))
