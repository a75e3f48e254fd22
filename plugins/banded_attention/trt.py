"""The TensorRT plugins of `effexport::BandedAttention`: which tokens are global, what these see, and the band."""

from __future__ import annotations

from effexport.plugins.banded_attention import SIGNATURE
from effexport.plugins.trt_plugin import Launch, Plugin, Rewrite, Sizes, cdiv

# as in kernel_cuda.cu, native/attention.h and native/attention_slices.h; a test compares the launches
QUERIES = 64
WIDTH = 64
STATISTICS = 2
ATTEND_THREADS = 128
SCAN_THREADS = 256
WARPS = SCAN_THREADS // 32

OPERATOR = SIGNATURE.onnx_name
NODE = SIGNATURE.trt_node()
Q, K, V, Q_GLOBAL, K_GLOBAL, V_GLOBAL, KEEP, IS_GLOBAL, BIAS = NODE["inputs"]
# attributes that only the body reads
BOUNDS = ("most_globals", "all_up_to")
TOKENS, BEFORE = "tokens: int32 [batch n]", "before: int32 [batch starts]"


def find(s: Sizes) -> Launch:
    return Launch(s.batch, SCAN_THREADS, (s.batch, s.n), 2 * WARPS * 4)


def attend(s: Sizes, scalars: tuple[object, ...]) -> Launch:
    groups = s.batch * s.heads
    blocks = groups * cdiv(s.n, QUERIES) * cdiv(s.e, WIDTH)
    # two tiles of keys and their values, of any type; and Source
    shared_bytes = (1 << 15) + (2768 if s.T == "float32" else 3536)
    return Launch(blocks, ATTEND_THREADS, (groups, s.heads, s.n, s.d, s.e, *scalars, s.scale), shared_bytes)


def attend_near(s: Sizes) -> Launch:
    flags = (int(s.causal != 0), int(s.with_globals != 0))
    return attend(s, (s.left, s.right, s.block, *flags, s.offsets if s.with_bias else 0))


FIND = Plugin(
    name="BandedAttentionGlobals",
    op=OPERATOR,
    entry="effexport_banded_attention_globals",
    inputs=(IS_GLOBAL,),
    outputs=(TOKENS, BEFORE),
    sizes=lambda s: {"starts": cdiv(s.n, QUERIES) + 1},
    launch=find,
)
PARTIALS = Plugin(
    name="BandedAttentionPartials",
    op=OPERATOR,
    entry="effexport_banded_attention_partials_{T}",
    inputs=(Q_GLOBAL, K_GLOBAL, V_GLOBAL, KEEP, TOKENS, BEFORE),
    outputs=("partials: float32 [batch heads n row]",),
    attributes={"scale": float, "causal": int},
    sizes=lambda s: {"row": s.e + STATISTICS},
    launch=lambda s: attend(s, (int(s.causal != 0),)),
)
# without global tokens, nothing is read of the last three inputs
ATTEND = Plugin(
    name="BandedAttentionAttend",
    op=OPERATOR,
    entry="effexport_banded_attention_{T}",
    inputs=(
        *(Q, K, V, KEEP, IS_GLOBAL, BIAS),
        "tokens: int32 [samples places]",
        "before: int32 [samples starts]",
        "partials: float32 [samples groups rows row]",
    ),
    outputs=("out: T [batch heads n e]",),
    attributes={name: kind for name, kind in NODE["attributes"].items() if name not in BOUNDS},
    at_least=NODE["at_least"],
    launch=attend_near,
)


def nodes(s: Sizes) -> str:
    attributes = ", ".join(f"{name}: {kind.__name__} = @{name}" for name, kind in ATTEND.attributes.items())
    attend = f"{ATTEND.name} <{attributes}> (q, k, v, keep, is_global, bias, tokens, before, partials)"
    if not s.with_globals:
        return f"""
        nothing = 0.0
        ones2 = [1, 1]
        ones4 = [1, 1, 1, 1]
        no_tokens = Expand (nothing, ones2)
        tokens = Cast <to = 6> (no_tokens)
        before = Identity (tokens)
        partials = Expand (nothing, ones4)
        out = effexport.{attend}
    """
    see_all = f"{PARTIALS.name} <scale: float = @scale, causal: int = @causal>"
    return f"""
        tokens, before = effexport.{FIND.name} (is_global)
        partials = effexport.{see_all} (q_global, k_global, v_global, keep, tokens, before)
        out = effexport.{attend}
    """


IN_STEPS = Rewrite(**NODE, nodes=nodes)
PLUGINS = (FIND, PARTIALS, ATTEND)
CHOICES = (IN_STEPS,)
