"""The steps of an export: the model's source, the launches of each layer, and both as one text."""
