"""Text from causal models with a state of constant size: sampling, and many sessions decoded step by step."""
