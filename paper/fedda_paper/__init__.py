"""The reproduction of the paper's experiments: every figure run, kept and judged (docs/reproduction.md)."""
