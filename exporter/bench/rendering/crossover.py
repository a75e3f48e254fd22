"""The lengths at which the curve of a candidate crosses that of a baseline, by interpolation between measured lengths.

Time against length is close to a straight line when both axes are logarithmic, so the logarithm of the ratio of two
curves is interpolated linearly in the logarithm of the length. For two power laws this is exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["always", "never", "from", "up to", "several", "not compared", "disturbed"]


@dataclass(frozen=True)
class Crossover:
    """outcome: where the candidate is faster. crossings: in tokens, in order of length.

    shortest and longest: between which measured lengths this holds; 0 when there are none that both have.
    """

    outcome: Outcome
    crossings: tuple[float, ...]
    shortest: int
    longest: int

    def __str__(self) -> str:
        """The end of a sentence that begins with "linear on ort is …"."""
        about = [f"{_rounded(length):,}" for length in self.crossings]
        measured = f"{self.shortest:,} to {self.longest:,}" if self.shortest < self.longest else f"{self.shortest:,}"
        if self.outcome == "always":
            return f"faster at every measured length ({measured})"
        if self.outcome == "never":
            return f"faster at none of the measured lengths ({measured})"
        if self.outcome == "from":
            return f"faster from about {about[0]} tokens on"
        if self.outcome == "up to":
            return f"faster up to about {about[0]} tokens"
        if self.outcome == "several":
            return f"faster on some stretches: the curves cross at about {', '.join(about)} tokens"
        if self.outcome == "disturbed":
            return "not compared: other programs disturbed the timings"
        return "not compared: no length was measured of both"


DISTURBED = Crossover("disturbed", (), 0, 0)


def crossover(candidate: Mapping[int, float], baseline: Mapping[int, float]) -> Crossover:
    """Compare two curves, each time by length, at the lengths that both have. Equal times do not count as faster."""
    lengths = sorted(candidate.keys() & baseline)
    ratios = [(length, math.log(candidate[length] / baseline[length])) for length in lengths]
    if not ratios:
        return Crossover("not compared", (), 0, 0)
    crossings = []
    for (start, before), (end, after) in itertools.pairwise(ratios):
        if (before < 0) != (after < 0):
            share = before / (before - after)
            crossings.append(start * (end / start) ** share)
    outcome: Outcome = "several"
    if len(crossings) < 2:
        begins_faster = ratios[0][1] < 0
        outcome = ("up to" if begins_faster else "from") if crossings else ("always" if begins_faster else "never")
    return Crossover(outcome, tuple(crossings), ratios[0][0], ratios[-1][0])


def _rounded(length: float) -> int:
    """An interpolated length to three digits, which is precise enough; a measured length in full."""
    whole = round(length)
    return whole if math.isclose(length, whole, rel_tol=1e-9) else round(float(f"{length:.3g}"))
