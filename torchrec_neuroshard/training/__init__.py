"""Pre-training and evaluation of cost models on measured records."""
