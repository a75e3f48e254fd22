"""The table of tools: what each does to a file, or which runtime it is, where it runs, and how its result is judged."""

from __future__ import annotations

from dataclasses import dataclass, replace

from portability.environments import CHROMIUM, MAIN, NODE, OLD_ORT, ORT_OPENVINO, TOOLS, Environment


@dataclass(frozen=True)
class Conversion:
    """A step from file to file. name: in workers/conversions.py. distribution: the package whose version counts."""

    name: str
    environment: Environment
    distribution: str


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A row of the matrix.

    name: as people call it. advice: what to do to use it.
    conversions: applied to the file one after the other.
    runtime: where the result runs; None is the ONNX Runtime of this environment, with function bodies only.
    precisions: of the file that it gets. judged_as: the precision whose limits count, "" for that of the file.
    only_finite: the result may differ, as quantised models do; it has to load and to give finite numbers.
    longest: the longest sequence that it gets, where longer ones take minutes.
    """

    name: str
    advice: str
    conversions: tuple[Conversion, ...] = ()
    runtime: Runtime | None = None
    precisions: tuple[str, ...] = ("fp32", "fp16")
    judged_as: str = ""
    only_finite: bool = False
    longest: int | None = None

    @property
    def version(self) -> str:
        """Name and pinned version of its package."""
        owner = self.runtime or self.conversions[-1]
        return f"{owner.distribution} {owner.environment.version(owner.distribution)}"


@dataclass(frozen=True)
class Runtime:
    """Something that runs a file. name: in workers/sessions.py; a page or Node has only one."""

    name: str
    environment: Environment
    distribution: str


INLINE = Conversion("effexport inline", MAIN, "effexport")
AS_IT_IS = "Give it the file as it is."
INLINE_FIRST = "Give it the file of `effexport build --inline` or `effexport inline`."
OWN_HALVES = (
    "For float16 use `effexport build --precision fp16`, which keeps in float32 what overflows or cancels there. "
    "An inlined file is refused by ONNX Runtime after this tool, which leaves the casts of bodies to float32 as they "
    "are but declares their results float16: convert the file as it is."
)
QUANTISED = "The file loads and runs, and its results are finite; how much accuracy is lost is for you to measure."


def converter(name: str, environment: Environment, distribution: str, advice: str = AS_IT_IS) -> Tool:
    return Tool(name=name, advice=advice, conversions=(Conversion(name, environment, distribution),))


def inlined(tool: Tool) -> Tool:
    """The tool, given the inlined file."""
    return replace(tool, name=f"{tool.name}, inlined", conversions=(INLINE, *tool.conversions))


def in_runtime(name: str, runtime: Runtime, advice: str = AS_IT_IS) -> tuple[Tool, ...]:
    """The runtime twice: with the file as it is, and inlined."""
    tool = Tool(name=name, advice=advice, runtime=runtime)
    return replace(tool, name=f"{name}, file as it is"), inlined(tool)


TABLE: tuple[Tool, ...] = (
    converter("effexport inline", MAIN, "effexport", "Made for tools that do not know model-local functions."),
    converter("onnx.inliner", MAIN, "onnx"),
    converter("onnxslim", TOOLS, "onnxslim"),
    converter("onnxsim", TOOLS, "onnxsim"),
    converter("onnxscript.optimizer", MAIN, "onnxscript"),
    converter("onnx_ir passes", MAIN, "onnx-ir"),
    # drops functions, and so runs after inlining, too
    converter("onnx.version_converter 23", MAIN, "onnx", INLINE_FIRST),
    *(inlined(converter(f"onnx.version_converter {n}", MAIN, "onnx", INLINE_FIRST)) for n in (18, 23, 25)),
    converter("onnxscript.version_converter 23", MAIN, "onnxscript"),
    *(
        converter(
            f"onnxruntime {level}",
            MAIN,
            "onnxruntime",
            "A file optimised by ONNX Runtime belongs to that release and, at level `all`, to that processor.",
        )
        for level in ("basic", "extended", "all")
    ),
    *(
        Tool(
            name=f"onnxconverter-common {name}",
            advice=OWN_HALVES,
            conversions=(Conversion(name, TOOLS, "onnxconverter-common"),),
            precisions=("fp32",),
            judged_as="fp16",
        )
        for name in ("float16", "float16 keep_io_types", "float16 op_block_list")
    ),
    *(
        replace(converter(name, TOOLS, "onnxruntime", QUANTISED), only_finite=True)
        for name in ("quantize_dynamic", "quantize_static")
    ),
    Tool(
        name="OpenVINO, inlined",
        advice="Use `--runtime openvino`. By itself: give it the inlined file, and ask for float32 with "
        "INFERENCE_PRECISION_HINT, because it chooses bfloat16 where the CPU has AMX.",
        conversions=(INLINE,),
        runtime=Runtime("openvino", MAIN, "openvino"),
    ),
    *in_runtime(
        "OpenVINO provider of ONNX Runtime",
        Runtime("onnxruntime-openvino", ORT_OPENVINO, "onnxruntime-openvino"),
        'Ask for float32: provider option load_config={"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}.',
    ),
    *in_runtime("onnxruntime-web in Node", Runtime("onnxruntime-web", NODE, "onnxruntime-web")),
    *in_runtime("onnxruntime-web in Chromium", Runtime("onnxruntime-web", CHROMIUM, "onnxruntime-web")),
    *(
        Tool(
            name=f"ONNX Runtime {environment.name.rpartition('-')[2]}",
            advice=AS_IT_IS,
            runtime=Runtime("onnxruntime", environment, "onnxruntime"),
        )
        for environment in OLD_ORT
    ),
    Tool(
        name="onnx.reference",
        advice="Slow: tried up to 64 tokens only.",
        runtime=Runtime("reference", MAIN, "onnx"),
        longest=64,
    ),
)
