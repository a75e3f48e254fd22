"""`effexport list`."""

from __future__ import annotations

from effexport.base.option_fields import Options
from effexport.cli._console import result_console
from effexport.cli._verbs import verb


@verb("list")
def command(_: Options, as_json: bool) -> None:
    """List the attention variants with formula, cost and whether a causal form exists."""
    from effexport.cli.main import print_json
    from effexport.models.variants import ATTENTION_SPECS

    if as_json:
        variants = [
            {
                "name": name,
                "formula": spec.formula,
                "cost": f"O({spec.cost})",
                "causal": not spec.why_not_causal,
                "always_causal": bool(spec.why_always_causal),
                "defaults": spec().to_dict(),
            }
            for name, spec in ATTENTION_SPECS.items()
        ]
        print_json({"variants": variants})
        return
    from rich.table import Table

    table = Table("variant", "formula", "time per layer", "causal", box=None, pad_edge=False)
    for name, spec in ATTENTION_SPECS.items():
        causal = "no" if spec.why_not_causal else "always" if spec.why_always_causal else "yes"
        table.add_row(name, spec.formula, f"O({spec.cost})", causal)
    result_console().print(table)
