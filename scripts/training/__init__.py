"""Parts of scripts/train_proof.py: text, tasks, a training loop, and what is compared after it."""
