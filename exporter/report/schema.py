"""The published JSON Schema of report.json, generated from the types of `model`."""

from __future__ import annotations

import json

import msgspec

from effexport.report.model import REPORT_VERSION, ReportFile, SpecFields


def schema_text() -> str:
    """The schema as JSON text, as report.schema.json holds it."""
    _, types = msgspec.json.schema_components((ReportFile, SpecFields), ref_template="#/$defs/{name}")
    report = types.pop(ReportFile.__name__)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:effexport:report:{REPORT_VERSION}",
        "title": f"effexport report, version {REPORT_VERSION}",
    }
    return json.dumps({**head, **(report | head), "$defs": types}, indent=2, ensure_ascii=False) + "\n"
