"""Passes over the graph that Inductor lowers, behind autograd."""
