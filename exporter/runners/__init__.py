"""What runs a model: one folder per runtime, and what all of them share."""
