"""Parts of scripts/train_proof.py: text, a training loop, and what is judged after it."""
