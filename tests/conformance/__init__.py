"""Conformance of the emulator: short kernels, one per primitive, that run on a GPU and on the emulator alike."""
