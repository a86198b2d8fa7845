"""Convolutions with what follows them as one call: in graphs of torch.compile, and in the modules of eager models."""
