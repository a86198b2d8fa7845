"""What KernelBench's static checker forbids or warns of in a CUDA submission, written anew from its published rules.

Source: github.com/ScalingIntelligence/KernelBench, src/kernelbench/kernel_static_checker.py at commit 423217d (March
2026). Like it, this one looks at the text without what follows ``#`` or ``//`` on a line. Our files keep the rules that
are errors there and those that are warnings.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Rule(NamedTuple):
    """A pattern that must not occur, and what it is taken for."""

    name: str
    pattern: re.Pattern


_TORCH_LAYERS = (
    r"torch\.nn\.(?!(?:Module|parameter|Parameter|ParameterList|ParameterDict|ModuleList|ModuleDict|init)\b)"
)
_TORCH_MATH = (
    r"\btorch\.(?:mm|bmm|matmul|einsum|conv(?:_transpose)?[123]d|conv|linear|(?:adaptive_)?(?:avg|max)_pool[123]d|relu|"
    r"hardtanh|elu|selu|leaky_relu|gelu|softsign|softplus|softmax|log_softmax|tanh|sigmoid|hardsigmoid|silu|mish|"
    r"(?:batch|group|layer|instance|rms)_norm|normalize|cross_entropy|\w+_loss|kl_div|cosine_similarity|logsumexp|clamp|"
    r"dropout)(?=\s*\(|\s|$)"
)
RULES = tuple(
    Rule(name, re.compile(pattern))
    for name, pattern in (
        ("a fallback in an exception handler", r"\btry\s*:|\bexcept\s*:|\bexcept\s+\w+"),
        ("the word pass", r"\bpass\b"),
        ("a layer of torch.nn", _TORCH_LAYERS),
        ("PyTorch's own arithmetic", _TORCH_MATH),
        ("torch.nn.functional", r"\bnn\.functional\.|\bF\.(?:conv|linear|relu|gelu|softmax|\w+_norm|dropout|\w+_pool)"),
        ("streams", r"cuda\.Stream\s*\(|with\s+torch\.cuda\.stream|\.(?:wait|record)_stream\s*\("),
        ("threads", r"\bthreading\b|\bmultiprocessing\b|concurrent\.futures|(?:Thread|Process)PoolExecutor"),
        ("lazy tensors", r"_make_subclass|class\s+\w+.*\((?:torch\.)?Tensor\)|torch\.Tensor\.__new__"),
        ("a clock that is replaced", r"(?:cuda\.(?:Event(?:\.\w+)?|synchronize)|time\.(?:perf_counter|time))\s*=[^=]"),
        ("fewer bits than asked for", r"__float2half(?:_rn)?\s*\(|\(\s*__half\s*\)|<\s*(?:__half|half|half_t)\s*[>,]|"
                                      r"\.(?:half|float16)\s*\(|\.to\s*\(\s*(?:dtype\s*=\s*)?torch\.(?:float16|half)\b"),
    )
)  # fmt: skip
NEEDED = ("__global__", "load_inline")


def offences(code: str) -> list[str]:
    """What in a submission breaks a rule, with the text that does; empty if nothing does."""
    lines = [line.partition("#")[0].partition("//")[0] for line in code.splitlines()]
    text = "\n".join(lines)
    missing = [f"{word} is missing" for word in NEEDED if word not in text]
    return missing + [f"{rule.name}: {found[0]!r}" for rule in RULES if (found := rule.pattern.search(text))]
