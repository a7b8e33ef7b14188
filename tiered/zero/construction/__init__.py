"""Build a model whose parameters do not fit in memory."""
