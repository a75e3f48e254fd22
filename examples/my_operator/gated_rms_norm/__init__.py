"""The operator `effexport::GatedRMSNorm`. This file loads no framework: effexport reads the row in every process."""

from effexport.plugins import Op

OP = Op("gated_rms_norm", "GatedRMSNorm", package=__name__)
