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
