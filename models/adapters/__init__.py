"""Other people's attention layers → ours, with their weights. One package = one file, with an ADAPTER."""
