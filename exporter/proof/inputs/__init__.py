"""Inputs of the proof: random, padded, adversarial, text."""
