"""The gradients of chains of known layers, written out for a stack of models on a CPU."""
