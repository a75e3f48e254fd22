"""A plot with the texts around it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A plot as SVG text, with its heading and a caption that says what to see in it."""

    title: str
    caption: str
    svg: str
