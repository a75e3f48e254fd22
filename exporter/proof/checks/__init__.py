"""The checks of the parity report: independent functions with one result type."""
