"""`effexport list`."""

from __future__ import annotations

import click

from effexport.commands._options import debug_option, json_option, stderr_console

# variant → (formula, time per layer); n tokens, d channels, m landmarks, c chunk length, r rounds, s window
SUMMARIES: dict[str, tuple[str, str]] = {
    "softmax": ("softmax(QKᵀ/√d) V", "n²·d"),
    "linear": ("φ(Q)(φ(K)ᵀV) / (φ(Q)Σφ(K) + ε), φ = elu + 1", "n·d²/heads"),
    "nystrom": ("softmax(QK̃ᵀ) Z(softmax(Q̃K̃ᵀ)) (softmax(Q̃Kᵀ) V) + conv(V)", "n·m·d"),
    "lsh": ("softmax over sorted hash chunks of QQ̂ᵀ, combined over rounds", "r·n·c·d"),
    "aft-full": ("σ(Q) ⊙ Σ exp(K + w) V / Σ exp(K + w)", "n²·d"),
    "aft-simple": ("σ(Q) ⊙ Σ exp(K) V / Σ exp(K)", "n·d"),
    "aft-local": ("as aft-full, w = 0 outside a window s", "n·s·d"),
    "aft-conv": ("as aft-full, w from a filter of s taps per head", "n·s·d"),
}


@click.command("list")
@json_option
@debug_option
def command(as_json: bool, debug: bool) -> None:
    """List the attention variants with formula, cost and whether a causal form exists."""
    from effexport.cli import print_json
    from effexport.models.spec import ATTENTION_SPECS

    if as_json:
        variants = [
            {
                "name": name,
                "formula": SUMMARIES[name][0],
                "cost": f"O({SUMMARIES[name][1]})",
                "causal": spec.supports_causal,
                "defaults": spec().to_dict(),
            }
            for name, spec in ATTENTION_SPECS.items()
        ]
        print_json({"variants": variants})
        return
    from rich.table import Table

    table = Table("variant", "formula", "time per layer", "causal", box=None, pad_edge=False)
    for name, spec in ATTENTION_SPECS.items():
        formula, cost = SUMMARIES[name]
        table.add_row(name, formula, f"O({cost})", "yes" if spec.supports_causal else "no")
    stderr_console().print(table)
