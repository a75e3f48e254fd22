"""docs/others.md: what `prove` says of each file, and of the faults that were planted into some of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

from file_faults import FILE_FAULTS
from file_judge import LIMIT
from pages import table

from others.files import OTHERS

Result = Mapping[str, Any]
NAMES = {other.key: other.name for other in OTHERS}

HEAD = """# Files of other exporters, proven

What `effexport prove` says of ONNX files that other tools make: small models with random weights, each compared with
the module that the tool was given. `.venv/bin/python scripts/prove_others.py` makes the files and this page;
`scripts/others/files.py` has the models and the calls of the tools.
"""

COLUMNS = """
*cases*: inputs of other sizes, paddings and values that were compared. *error*: the largest, as a share of its limit.
*faults*: of those in `tests/support/file_faults.py` that found a place in the file, how many `prove` caught.
"""

FAULTS = """
## Planted faults

`tests/support/file_faults.py` has {kinds} kinds of faults that exporters and converters make. They find their place by
operators, constants and inputs; a kind that finds none in a file is not counted. Into {files} of the files, they were
planted {planted} times: {caught} times a check failed or the runtime refused the file, and {escaped} times the verdict
was *equal*. The latter are listed below, with the largest change of an answer over all cases, relative to the RMS of
the answer; the limit is {limit}.

| fault | in files | caught by |
|---|---|---|
"""


def page_of_results(results: Sequence[Result]) -> str:
    """results: those that there are, in the order of the rows."""
    parts = [HEAD, summary(results), COLUMNS, table(TABLE, map(row_of, results)), *causes(results), *faults(results)]
    return "\n".join(parts) + "\n"


def summary(results: Sequence[Result]) -> str:
    equal = sum(result["result"] == "passed" for result in results)
    text = f"**{equal} of {len(results)} files are equal to their module.**"
    undamaged = {other.key for other in OTHERS if other.is_faulted} - {r["row"] for r in results if "faults" in r}
    if missing := [key for key in NAMES if key not in {result["row"] for result in results}]:
        text += f" This run is partial: {', '.join(missing)} did not run."
    if undamaged:
        text += f" Faults were not planted into {', '.join(sorted(undamaged))}."
    return fill(text, 120, break_on_hyphens=False)


TABLE = ("model", "exporter", "nodes", "verdict", "cases", "error", "faults")


def row_of(result: Result) -> tuple[object, ...]:
    verdict = {"passed": "equal", "failed": "**not equal**", "refused": "**cannot be compared**"}[result["result"]]
    share = f"{result['share']:.2g}" if result.get("share") is not None else "–"
    found = result.get("faults")
    caught = f"{sum(bool(failure) for failure, _ in found.values())} of {len(found)}" if found else "–"
    cases = len(result.get("cases", ())) or "–"
    return NAMES[result["row"]], result["exporter"], result["size"], verdict, cases, share, caught


def causes(results: Sequence[Result]) -> Iterator[str]:
    """The failed checks of the files that are not equal, and their causes."""
    wrong = [result for result in results if result["result"] in ("failed", "refused")]
    if not wrong:
        return
    yield "\n## Not equal\n"
    for result in wrong:
        yield f"### {NAMES[result['row']]}, {result['exporter']}\n"
        yield FOUND.get(result["row"], "**Cause not known.**").strip() + "\n"
        lines = result["failed"].items() or [("refused", result["notes"][0])]
        yield "\n".join(f"* *{kind}*: {' '.join(detail.split())}" for kind, detail in lines) + "\n"


def faults(results: Sequence[Result]) -> Iterator[str]:
    planted = {result["row"]: result["faults"] for result in results if "faults" in result}
    if not planted:
        return
    pairs = [(failure, change) for found in planted.values() for failure, change in found.values()]
    yield FAULTS.format(
        kinds=sum(any(fault.name in found for found in planted.values()) for fault in FILE_FAULTS),
        files=len(planted),
        planted=len(pairs),
        caught=sum(bool(failure) for failure, _ in pairs),
        escaped=sum(not failure for failure, _ in pairs),
        limit=LIMIT,
    ).rstrip("\n")
    for fault in FILE_FAULTS:
        found = [faults[fault.name][0] for faults in planted.values() if fault.name in faults]
        if found:
            by = ", ".join(dict.fromkeys(name_of(failure) for failure in found if failure)) or "–"
            caught = sum(map(bool, found))
            number = str(len(found)) if caught == len(found) else f"**{caught} of {len(found)}**"
            yield f"| **{fault.name}**: {fault.description} | {number} | {by} |"
    yield "\n### Not caught\n"
    for key, found in planted.items():
        for name, (failure, change) in found.items():
            if not failure:
                effect = f"changes answers by {change:.1e}" if change else "changes no answer"
                yield f"* **{name}** in {key} {effect}."


def name_of(failure: str) -> str:
    """The check, or that the runtime refuses the file."""
    return "the runtime refuses the file" if "Error" in failure else failure


# By file: the cause, with code that shows it without effexport where the fault is the exporter's.
FOUND: dict[str, str] = {
    "torch-dynamo-llama": """\
Where a boolean mask hides every key of a query, `F.scaled_dot_product_attention` returns 0 in PyTorch. The file returns
the mean of all values: `torch.onnx` adds the lowest finite number to hidden scores, and looks for NaN afterwards, which
only −∞ would have made. That concerns queries of samples without a kept token, and queries before the first kept token
in a causal model. Export with `dynamo=False`, or let every query keep a key.

```python
import onnxruntime, torch


class Attention(torch.nn.Module):
    def forward(self, x, keep):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, keep)


x, keep = torch.ones(1, 1, 4, 8), torch.zeros(1, 1, 4, 4, dtype=torch.bool)
torch.onnx.export(Attention(), (x, keep), "a.onnx", dynamo=True)
print(Attention()(x, keep)[0, 0, 0, 0].item())  # 0.0
print(onnxruntime.InferenceSession("a.onnx").run(None, {"x": x.numpy(), "keep": keep.numpy()})[0][0, 0, 0, 0])  # 1.0
```
""",
    "torch-torchscript-transformerencoder": """\
The length of the example is a constant in the graph, although `dynamic_axes` declares it free: `nn.MultiheadAttention`
reshapes with Python numbers, which a trace keeps.

```python
import onnxruntime, torch


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]


x, free = torch.randn(2, 16, 8), {"x": {0: "batch", 1: "seq"}}
torch.onnx.export(Attention().eval(), (x,), "a.onnx", dynamo=False, input_names=["x"], dynamic_axes=free)
onnxruntime.InferenceSession("a.onnx").run(None, {"x": x[:, :9].numpy()})
# Reshape: Input shape:{9,2,8}, requested shape:{16,4,4}
```
""",
    "torch-torchscript-nystrom-attention": """\
The same cause in another package: nystrom-attention pads to a multiple of its landmarks and sums over segments with
Python numbers, which a trace keeps.
""",
    "onnxruntime-genai-llama": """\
`GroupQueryAttention` counts the ones of the mask and takes them for a length: a mask that hides another place than the
last ones gives other answers, or an error, where PyTorch hides just that place. Masks of prompts padded at the end have
no such places.
""",
    "onnxruntime-genai-qwen3-4-bits": """\
The same, and no fault of its own: the file is quantised to 4 bits, which the report says, and `prove` holds it to the
limits of a float file.
""",
    "mobius-onnx-bert": """\
The mask of tokens, [batch, seq] in int64, is the mask of ONNX's `Attention`, whose shape is [queries, keys] and which
is added to the scores unless it is boolean: hidden tokens take part, and a batch of two samples fails.

```python
import numpy as np, onnxruntime, torch
from mobius import build
from transformers import BertConfig, BertModel

sizes = dict(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
module = BertModel(BertConfig(**sizes)).eval()
module.save_pretrained("bert")
build("bert", dtype="f32").save("bert/onnx")
session = onnxruntime.InferenceSession("bert/onnx/model.onnx")
ids = np.arange(7).reshape(1, 7)
feeds = {"input_ids": ids, "attention_mask": np.array([[1, 1, 1, 1, 0, 0, 0]]), "token_type_ids": 0 * ids}
expected = module(**{name: torch.tensor(x) for name, x in feeds.items()}).last_hidden_state[0, 0]
print(np.abs(session.run(None, feeds)[0][0, 0] - expected.detach().numpy()).max())  # 0.003 with these weights
session.run(None, {name: x.repeat(2, 0) for name, x in feeds.items()})  # Add node: broadcast an axis … 2 by 7
```
""",
}
