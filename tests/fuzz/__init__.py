"""Random problems for every family that takes them, with exact integers and with random values: ``make fuzz``.

``draw`` says what is checked, as one line that replays it; ``operands`` makes the tensors; ``check`` runs and judges;
``shrink`` makes a failure small. ``front_draw`` and ``front_check`` are the same for calls of the functions beside
conv2d, with all gradients. The seed is that of the commit unless one is given, so that each commit draws anew.
"""
