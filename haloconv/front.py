"""What the layers beside Conv2d share: what they ask for, posed once, and their calls as 2-D convolutions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from haloconv.arguments import Settings, settings_of
from haloconv.choose.choice import Choice
from haloconv.layer import Layer
from haloconv.plan import problem_of, result_layout
from haloconv.problem import ConvSpec, Problem

Tensor = torch.Tensor

_is_compiling = torch.compiler.is_compiling


class Images(NamedTuple):
    """A forward pass as a 2-D convolution on views: of ``first`` by ``w``.

    That of a transposed one is the gradient with respect to an input of ``x_shape`` (N, C, H, W), of which ``first`` is
    the output's; else ``x_shape`` is None.
    """

    first: Tensor
    w: Tensor
    spec: ConvSpec
    x_shape: tuple[int, int, int, int] | None = None

    def problem(self, dtype: torch.dtype, bias: bool) -> Problem:
        """The forward pass in this dtype."""
        w_shape, layout = tuple(self.w.shape), result_layout(self.first, self.w)
        if self.x_shape is not None:
            return problem_of("dgrad", self.x_shape, w_shape, self.spec, dtype, layout)
        problem = problem_of("fprop", tuple(self.first.shape), w_shape, self.spec, dtype, layout)
        return replace(problem, bias=bias)


class Front(Layer):
    """What the layers beside Conv2d share: what their attributes ask for is posed once."""

    def _settings(self) -> Settings:
        return settings_of(self.precision, self.family, self.strict)

    def _asked(self) -> Any:
        """What the attributes ask for, kept until one of them is assigned; None if it is nothing of ours."""
        asked = self.__dict__.get("_spec")
        if asked is None:
            asked = self._posed()
            if not _is_compiling():
                self.__dict__["_spec"] = asked
        return asked

    def _posed(self) -> Any:
        raise NotImplementedError

    def _zeros(self) -> Any:
        """The padding that is left when another mode's was made."""
        return self.padding if self.padding_mode == "zeros" else 0

    def images_of(self, x: Tensor, device: torch.device) -> Images | Choice:
        """A forward pass of a batch as a 2-D convolution on views; or, where it is none, what runs it.

        ``x`` is padded already, unless by zeros, and lies on ``device`` or stands for a tensor there.
        """
        raise NotImplementedError

    def posed(self, x: Tensor) -> Images | Choice:
        """``images_of`` an input of the layer, batched or not."""
        x = self._padded(x if x.dim() == self.weight.dim() else x.unsqueeze(0))
        return self.images_of(x, x.device)

    def _padded(self, x: Tensor) -> Tensor:
        """The copy that PyTorch makes for another padding than by zeros; else x itself."""
        if self.padding_mode == "zeros":
            return x
        return torch.nn.functional.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)

    def _problem_of(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Problem | Choice:
        images = self.images_of(torch.empty_strided(shape, strides, device="meta"), device)
        return images if isinstance(images, Choice) else images.problem(dtype, self.bias is not None)
