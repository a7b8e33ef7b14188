"""Update rules of optimizers: what a step does to a piece of a parameter, and which states it keeps."""
