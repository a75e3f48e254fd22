"""Causes of files of others that are not equal to their modules, for docs/others.md."""

from __future__ import annotations

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
    "optimum-onnx-gpt-2-with-a-cache": """\
Not a fault of the file, but a limit of `prove`: the mask has as many places as the cache and the tokens together, and
`prove` varies each of these sizes by itself. GPT-2 in PyTorch answers 21 tokens with a mask of 24 after a cache of 8,
and the file refuses them. All other cases are equal.
""",
    "onnxruntime-genai-qwen3-4-bits": """\
Not a fault: the file is quantised to 4 bits, which the report says, and `prove` holds it to the limits of a float file.
""",
}
