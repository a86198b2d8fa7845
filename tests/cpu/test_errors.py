"""Bad inputs, one by one: what PyTorch refuses is refused with the same exception type, and with the facts."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import haloconv


class Bad(NamedTuple):
    """A refused call: the arguments of conv2d, and what the sentence must say (regular expression)."""

    name: str
    says: str
    args: tuple
    options: dict[str, Any] = {}  # noqa: RUF012


def x(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape or (2, 4, 8, 9), **options)


def w(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape or (6, 4, 3, 3), **options)


BAD = (
    # shapes
    Bad("input_5d", r"3D.*4D.*\[1, 2, 4, 8, 9\]", (x(1, 2, 4, 8, 9), w())),
    Bad("input_2d", r"3D.*4D.*\[8, 9\]", (x(8, 9), w())),
    Bad("input_1d", r"3D.*4D.*\[9\]", (x(9), w())),
    Bad("input_0d", r"3D.*4D.*\[\]", (torch.tensor(1.0), w())),
    Bad("weight_3d", r"weight", (x(), w(6, 4, 3))),
    Bad("weight_5d", r"weight", (x(), w(6, 4, 3, 3, 3))),
    Bad("weight_0d", r"weight", (x(), torch.tensor(1.0))),
    Bad("weight_1d", r"weight", (x(), torch.zeros(3))),
    Bad("channels", r"\[6, 4, 3, 3\].*\[2, 5, 8, 9\].*4 channels.*5 channels", (x(2, 5, 8, 9), w())),
    Bad("channels_unbatched", r"4 channels.*5 channels", (x(5, 8, 9), w())),
    Bad("bias_too_long", r"bias.*6 elements.*\[7\]", (x(), w(), torch.zeros(7))),
    Bad("bias_too_short", r"bias.*6 elements.*\[1\]", (x(), w(), torch.zeros(1))),
    Bad("bias_2d", r"bias.*6 elements.*\[6, 1\]", (x(), w(), torch.zeros(6, 1))),
    Bad("filter_taller", r"\(2 x 9\).*\(3 x 3\)", (x(2, 4, 2, 9), w())),
    Bad("filter_wider", r"\(8 x 2\).*\(3 x 3\)", (x(2, 4, 8, 2), w())),
    Bad("filter_larger_than_padded", r"\(4 x 11\).*\(5 x 5\)", (x(2, 4, 2, 9), w(6, 4, 5, 5)), {"padding": 1}),
    Bad("dilated_filter_larger", r"\(8 x 9\).*\(9 x 9\)", (x(), w()), {"dilation": 4}),
    Bad("empty_height", r"\[2, 4, 0, 9\]", (x(2, 4, 0, 9), w()), {"padding": 2}),
    Bad("no_filters", r"\[0, 4, 3, 3\]", (x(), w(0, 4, 3, 3))),
    Bad("empty_batch_filter_taller", r"\(2 x 9\).*\(3 x 3\)", (x(0, 4, 2, 9), w())),
    Bad("empty_batch_channels", r"4 channels.*5 channels", (x(0, 5, 8, 9), w())),
    Bad("empty_filter", r"\[6, 4, 0, 3\]", (x(), w(6, 4, 0, 3))),
    # parameters
    Bad("stride_0", r"non-positive stride", (x(), w()), {"stride": 0}),
    Bad("stride_negative", r"non-positive stride", (x(), w()), {"stride": (1, -1)}),
    Bad("dilation_0", r"dilation", (x(), w()), {"dilation": 0}),
    Bad("dilation_negative", r"dilation should be greater than zero", (x(), w()), {"dilation": (-1, 1)}),
    Bad("padding_negative", r"negative padding", (x(), w()), {"padding": -1}),
    Bad("padding_negative_pair", r"negative padding", (x(), w()), {"padding": (1, -1)}),
    Bad("groups_0", r"non-positive groups", (x(), w()), {"groups": 0}),
    Bad("groups_negative", r"non-positive groups", (x(), w()), {"groups": -2}),
    Bad("groups_not_dividing_filters", r"divisible by 4.*\[6, 1, 3, 3\]", (x(), w(6, 1, 3, 3)), {"groups": 4}),
    Bad("groups_more_than_filters", r"groups=8.*at least 8", (x(2, 8, 8, 9), w(6, 1, 3, 3)), {"groups": 8}),
    Bad("groups_not_dividing_channels", r"6 channels.*4 channels", (x(), w(6, 2, 3, 3)), {"groups": 3}),
    Bad("stride_three_values", r"stride=\[1, 1, 1\]", (x(), w()), {"stride": (1, 1, 1)}),
    Bad("stride_no_values", r"stride", (x(), w()), {"stride": ()}),
    Bad("padding_three_values", r"padding", (x(), w()), {"padding": (1, 1, 1)}),
    Bad("dilation_three_values", r"dilation", (x(), w()), {"dilation": (1, 1, 1)}),
    Bad("same_with_stride", r"same.*strided", (x(), w()), {"padding": "same", "stride": 2}),
    Bad("padding_unknown_word", r"(?i)invalid padding.*full", (x(), w()), {"padding": "full"}),
    # types
    Bad("stride_float", r"stride", (x(), w()), {"stride": 1.5}),
    Bad("stride_float_in_tuple", r"stride", (x(), w()), {"stride": (1, 1.5)}),
    Bad("stride_word", r"stride", (x(), w()), {"stride": "2"}),
    Bad("stride_bool", r"stride", (x(), w()), {"stride": True}),
    Bad("groups_bool", r"groups", (x(), w()), {"groups": True}),
    Bad("padding_float", r"padding", (x(), w()), {"padding": 0.5}),
    Bad("padding_none", r"padding", (x(), w()), {"padding": None}),
    Bad("dilation_none", r"dilation", (x(), w()), {"dilation": None}),
    Bad("groups_float", r"groups", (x(), w()), {"groups": 1.0}),
    Bad("groups_tuple", r"groups", (x(), w()), {"groups": (1, 1)}),
    Bad("input_list", r"input", ([[1.0]], w())),
    Bad("input_none", r"input", (None, w())),
    Bad("weight_none", r"weight", (x(), None)),
    Bad("bias_number", r"bias", (x(), w(), 1.0)),
    Bad("missing_weight", r"weight", (x(),)),
    Bad("unknown_keyword", r"strides", (x(), w()), {"strides": 2}),
    # dtypes and devices
    Bad("weight_dtype", r"(?i)float.*double|double.*float", (x(), w(dtype=torch.float64))),
    Bad("weight_half", r"(?i)float.*half|half.*float", (x(), w(dtype=torch.float16))),
    Bad("bias_dtype", r"(?i)bias", (x(), w(), torch.zeros(6, dtype=torch.float64))),
    Bad("integer_input", r"(?i)long.*float|int64.*float", (x(dtype=torch.int64), w())),
)  # fmt: skip


def by_name(bad: Bad) -> str:
    return bad.name


def torchs_error(bad: Bad) -> Exception:
    with pytest.raises(Exception) as caught:
        torch.nn.functional.conv2d(*bad.args, **bad.options)
    return caught.value


@pytest.mark.parametrize("bad", BAD, ids=by_name)
@pytest.mark.parametrize("family", ["auto", "direct"])
def test_conv2d_refuses_as_torch_does(bad: Bad, family: str) -> None:
    theirs = torchs_error(bad)
    with pytest.raises(type(theirs), match=f"(?s){bad.says}") as caught:
        haloconv.conv2d(*bad.args, **bad.options, family=family)
    assert type(caught.value) is type(theirs)


def test_every_refusal_is_listed_once() -> None:
    assert len({bad.name for bad in BAD}) == len(BAD)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"precision": "fast"}, ValueError, r"precision.*fast"),
        ({"precision": 32}, ValueError, r"precision.*32"),
        ({"family": "cudnn"}, ValueError, r"family.*cudnn"),
        ({"family": None}, ValueError, r"family.*None"),
        ({"padding": (1, 2, 3, -1)}, RuntimeError, r"negative padding"),
        ({"padding": (1, 2, 3, 0.5)}, TypeError, r"padding"),
        ({"padding": (1, 2, 3, 4, 5)}, RuntimeError, r"padding"),
    ],
)
def test_our_own_arguments(options: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        haloconv.conv2d(x(), w(), None, **options)
    if "padding" not in options:
        with pytest.raises(error, match=says):
            haloconv.Conv2d(4, 6, 3, **options)


def test_extras_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        haloconv.conv2d(x(), w(), None, 1, 0, 1, 1, "ieee")
    with pytest.raises(TypeError):
        haloconv.Conv2d(4, 6, 3, 1, 0, 1, 1, True, "zeros", None, None, "ieee")


def test_strict_raises_with_the_reason_where_our_family_cannot_run() -> None:
    """A CPU tensor cannot go through a CUDA family; strict says so, otherwise PyTorch computes it."""
    with pytest.raises(RuntimeError, match=r"(?i)cpu"):
        haloconv.conv2d(x(), w(), None, family="direct", strict=True)


CONSTRUCTORS = (
    ("channels_not_divisible", (5, 6, 3), {"groups": 2}, r"in_channels"),
    ("filters_not_divisible", (4, 5, 3), {"groups": 2}, r"out_channels"),
    ("groups_0", (4, 6, 3), {"groups": 0}, r"groups"),
    ("groups_negative", (4, 6, 3), {"groups": -1}, r"groups"),
    ("padding_word", (4, 6, 3), {"padding": "full"}, r"(?i)padding.*full"),
    ("same_with_stride", (4, 6, 3), {"padding": "same", "stride": 2}, r"same"),
    ("padding_mode", (4, 6, 3), {"padding_mode": "mirror"}, r"padding_mode"),
    ("no_filter", (4, 6), {}, r"kernel_size"),
    ("unknown_keyword", (4, 6, 3), {"strides": 2}, r"strides"),
)


@pytest.mark.parametrize(("name", "args", "options", "says"), CONSTRUCTORS, ids=[c[0] for c in CONSTRUCTORS])
def test_constructor_refuses_as_torch_does(name: str, args: tuple, options: dict, says: str) -> None:
    with pytest.raises(Exception) as theirs:
        torch.nn.Conv2d(*args, **options)
    with pytest.raises(theirs.type, match=says) as ours:
        haloconv.Conv2d(*args, **options)
    assert ours.type is theirs.type


FORWARDS = (
    ("channels", {}, x(2, 5, 8, 9), r"4 channels.*5 channels"),
    ("dimensions", {}, x(8, 9), r"3D.*4D"),
    ("filter_too_large", {}, x(2, 4, 2, 9), r"(?i)kernel size"),
    ("dtype", {}, x(dtype=torch.float64), r"(?i)double.*float|float64.*float32"),
    ("reflect_too_wide", {"padding": 3, "padding_mode": "reflect"}, x(2, 4, 3, 9), r"(?i)padding"),
    ("circular_too_wide", {"padding": 4, "padding_mode": "circular"}, x(2, 4, 3, 9), r"(?i)padding"),
)


@pytest.mark.parametrize(("name", "options", "image", "says"), FORWARDS, ids=[f[0] for f in FORWARDS])
def test_module_refuses_as_torch_does(name: str, options: dict, image: torch.Tensor, says: str) -> None:
    with pytest.raises(Exception) as theirs:
        torch.nn.Conv2d(4, 6, 3, **options)(image)
    with pytest.raises(theirs.type, match=f"(?s){says}") as ours:
        haloconv.Conv2d(4, 6, 3, **options)(image)
    assert ours.type is theirs.type


@pytest.mark.parametrize("bad", [b for b in BAD if b.name.startswith(("channels", "filter_", "input_5d", "bias_too"))],
                         ids=by_name)  # fmt: skip
def test_sentence_keeps_torchs_own_facts(bad: Bad) -> None:
    """Every number that PyTorch's sentence names stands in ours."""
    with pytest.raises(RuntimeError) as ours:
        haloconv.conv2d(*bad.args, **bad.options)
    numbers = {word for word in str(torchs_error(bad)).replace(",", " ").replace("[", " ").replace("]", " ")
               .replace("(", " ").replace(")", " ").replace("=", " ").split() if word.isdigit()}  # fmt: skip
    missing = {number for number in numbers if number not in str(ours.value)}
    assert not missing, f"torch: {torchs_error(bad)}\nours: {ours.value}"
