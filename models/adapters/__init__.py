"""Other people's attention layers → ours, with their weights. One package = one file; the table is in `table.py`."""
