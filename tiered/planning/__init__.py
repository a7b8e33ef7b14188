"""A plan before the run: does a model fit, how many bytes does a step move, and how long does it take."""
