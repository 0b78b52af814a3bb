"""Statistics of convolutions: from the input patches in general, without them where that is much faster on a CPU.

The patches repeat every input pixel once for each tap of the kernel. Their second moment depends on two taps only
through the shift from one to the other, apart from what the edges of the image cut off: 25 shifts in place of the 81
pairs of taps of a 3×3 kernel, and by symmetry half of them. Squares of per-example gradients need patches along one
axis only, because along the other a tap is a slice of memory; and none at all where a convolution whose groups are the
examples is faster. Whole patches are made where oneDNN multiplies them faster than MKL multiplies parts of them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from noisygrad.curvature.passes import MatrixPass, Pass
from noisygrad.curvature.windows import Axis, patches, two_axes
from noisygrad.families import kronecker, packed
from noisygrad.families.base import Statistics
from noisygrad.families.units import Unit
from noisygrad.kernels import squares, triangles
from noisygrad.kernels.products import column_sums, gram, has_onednn, use_onednn_at, with_border
from noisygrad.kernels.scratch import CACHE, memory_bound, scratch_buffer
from noisygrad.kernels.squared_products import (
    FEW_POSITIONS,
    add_squares_,
    chunk_size,
    sum_of_squared_products,
    sum_of_squares,
)

SMALL_PATCH = 64
"""Patches of at most this many numbers (of colour images, say) are made as a whole: products with parts are thin."""

MANY_POSITIONS, FEW_WEIGHTS = 128, 1 << 16
"""From this many positions on, and up to this many weights, squares are made by a convolution of many groups."""


class PatchedPass(MatrixPass):
    """A pass through a convolution of one group, whose patches are made of a few examples at a time."""

    def __init__(self, module: Any, images: Tensor, gradients: Tensor, constant: bool) -> None:
        self._module = module
        self._images = images
        self._gradients = gradients
        self.constant = constant
        self.grouped = False
        self._outputs = gradients.shape[2:]

    @staticmethod
    def applies(module: Any, images: Tensor, batch: int) -> bool:
        """Whether each image is an example, and there is one group; else the patches are a `MatrixPass`."""
        return module.groups == 1 and images.shape[0] == batch

    @cached_property
    def gradients(self) -> Tensor:  # type: ignore[override]
        return self._gradients.flatten(2).mT

    @classmethod
    def joined(cls, passes: Sequence[Any]) -> Pass:
        whole = [MatrixPass(one.activations, one.gradients, one.constant) for one in passes]
        return MatrixPass.joined(whole)

    @property
    def activations(self) -> Tensor:  # type: ignore[override]
        """The patches of all examples, `[B, positions, channels · kernel]`; rebuilt at each access."""
        return patches(self._module, self._images)

    def carried(self) -> dict[str, Tensor]:
        return {"inputs": self._images, "gradients": self._gradients}

    def input_moment(self) -> Tensor:
        count = self.gradients.shape[0] * self.gradients.shape[1]
        products, sums, done = None, None, 0
        roots = None if self.counted is None else self._position_weights(self.counted).sqrt()
        # A quarter as many patches as per-example gradients keep a GPU busy.
        for images, _ in self._parts(4 * self._patch_size * self.gradients.shape[1]):
            rows = patches(self._module, images).flatten(0, 1)
            root = None if roots is None else roots[done : done + len(images)].flatten()
            rows = rows if root is None else rows * root.unsqueeze(-1)
            products = gram(rows) if products is None else products.addmm_(rows.mT, rows)
            if self.constant:
                total = column_sums(rows) if root is None else root @ rows
                sums = total if sums is None else sums.add_(total)
            done += len(images)
            del rows  # before the next are made
        assert products is not None
        means = None if sums is None else sums.div_(count)
        return with_border(products.div_(count), means, means)

    def layout_squares(self, unit: Unit) -> list[Tensor]:
        """The sum over the batch of squared per-example gradients; a GPU kernel writes them in the unit's order."""
        if unit.slots[0].channels_last and (found := self._by_kernel(channels_last=True)) is not None:
            return [found]
        return super().layout_squares(unit)

    def _by_kernel(self, *, channels_last: bool = False) -> Tensor | None:
        axes = len(self._outputs)
        if axes > 2 or not squares.applies(self._gradients, math.prod(self._outputs)):
            return None
        images, window = two_axes(self._module, self._images)
        gradients = self._gradients if axes == 2 else self._gradients.unsqueeze(2)
        return squares.squared_products(gradients, images, window, self.constant, channels_last)

    def _squared_products(self) -> Tensor:
        positions, outputs = self.gradients.shape[1:]
        rows = positions * (positions + 1) // 2 if positions <= FEW_POSITIONS else max(positions, outputs)
        return self._sum_of_parts(MatrixPass._squared_products, self._patch_size * rows)

    def squares_in_basis(self, left: Tensor, right: Tensor) -> Tensor:
        positions, outputs = self.gradients.shape[1:]
        # Patches and what they are in the basis, or as many per-example gradients.
        numbers = 2 * (self._patch_size + self.constant) * max(positions, outputs)
        return self._sum_of_parts(lambda part: part.squares_in_basis(left, right), numbers)

    def _sum_of_parts(self, what: Callable[[MatrixPass], Tensor], numbers: int) -> Tensor:
        # A generator, so that the patches of a part are freed before the next are made.
        parts = self._parts(numbers)
        sums = (what(MatrixPass(patches(self._module, images), some, self.constant)) for images, some in parts)
        total = next(sums)
        for part in sums:
            total.add_(part)
        return total

    def _parts(self, numbers: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and gradients of as many examples as memory allows, where one example takes this many numbers."""
        size = chunk_size(self._images.device, numbers)
        return zip(self._images.split(size), self.gradients.split(size), strict=True)

    @property
    def _patch_size(self) -> int:
        return int(self._images.shape[1]) * math.prod(map(int, self._module.kernel_size))


class ConvolutionPass(PatchedPass):
    """A pass through a convolution of one or two axes with stride 1 on a CPU, without most of the patches."""

    @staticmethod
    def applies(module: Any, images: Tensor, batch: int) -> bool:
        """Whether this layer's geometry, device and batch allow it."""
        plain = len(module.kernel_size) <= 2 and all(step == 1 for step in module.stride)
        return plain and memory_bound(images) and PatchedPass.applies(module, images, batch)

    @cached_property
    def _geometry(self) -> tuple[Tensor, Axis, Axis]:
        """Images `[B, channels, height, width]`, their vertical and their horizontal axis."""
        images, window = two_axes(self._module, self._images)
        outputs = tuple(self._outputs) if len(self._outputs) == 2 else (1, *self._outputs)
        axes = zip(images.shape[2:], outputs, window.kernel, window.before, window.dilation, strict=True)
        vertical, horizontal = (Axis(*each) for each in axes)
        return images, vertical, horizontal

    def moments(self) -> Statistics:
        """A and S. A large A is stored as bands, so the whole one is made in memory that is used again."""
        size = self._patch_size + self.constant
        if size < triangles.LARGE or self.counted is not None:
            return super().moments()
        place = scratch_buffer(size * size, self._images.dtype).view(size, size)
        whole = kronecker.Statistics(self._write_input_moment_(place), self.output_moment())
        return packed.Statistics.of(whole)

    def input_moment(self) -> Tensor:
        """The mean of a aᵀ, shift by shift."""
        if self.counted is not None:
            return super().input_moment()
        size = self._patch_size + self.constant
        return self._write_input_moment_(self._images.new_empty(size, size))

    def _write_input_moment_(self, moment: Tensor) -> Tensor:
        images, vertical, horizontal = self._geometry
        batch, channels, height, width = images.shape
        rows, taps = self.gradients[..., 0].numel(), vertical.kernel * horizontal.kernel
        pixels = _pixels_first(images.flatten(2)).view(height, width * batch, channels)
        size = channels * taps
        moment.zero_()  # two taps may never be on the image at once
        blocks = moment[:size, :size].unflatten(0, (channels, taps)).unflatten(2, (channels, taps))
        columns = horizontal.pairs()
        for down, ranges in vertical.pairs().items():
            for right, spans in columns.items():
                if (down, right) < (0, 0):
                    continue  # the transpose of the opposite shift
                sums = _shifted_products(pixels, batch, (down, right), list(ranges), list(spans))
                for (y, x), block in sums.items():
                    block = block.div_(rows)  # noqa: PLW2901
                    mirrored = block.T.contiguous()
                    for (top, bottom), (left, other) in product(ranges[y], spans[x]):
                        first, second = top * horizontal.kernel + left, bottom * horizontal.kernel + other
                        blocks[:, first, :, second] = block
                        if first != second:
                            blocks[:, second, :, first] = mirrored
        if self.constant:
            moment[size, :size] = moment[:size, size] = self._means(pixels.view(height, width, batch, channels)) / rows
            moment[size, size] = 1.0
        return moment

    def _means(self, pixels: Tensor) -> Tensor:
        """The sum over examples and positions of the pixels under each tap, `[channels · kernel]`."""
        _, vertical, horizontal = self._geometry
        total, taps = pixels.sum(dim=2), product(range(vertical.kernel), range(horizontal.kernel))
        sums = [total[vertical.under(down), horizontal.under(right)].sum(dim=(0, 1)) for down, right in taps]
        return torch.stack(sums, dim=-1).flatten()

    def output_moment(self) -> Tensor:
        """The mean over examples of the sum over positions of g gᵀ; positions are in front, after one transpose."""
        return gram(_pixels_first(self.gradients.mT)) / self.gradients.shape[0]

    def square_sums(self) -> list[Tensor]:
        positions, outputs = self.gradients.shape[1:]
        if positions == 1:
            return super().square_sums()
        scale = self._largest_gradient()
        if positions <= FEW_POSITIONS:
            weight = self._squares_by_taps(scale)
        elif self._groups_are_fast():
            weight = self._squares_by_groups(scale)
        elif use_onednn_at(self._patch_size, positions, outputs, self._images, self._gradients):
            weight = self._squares_by_products(scale)
        elif self._patch_size <= SMALL_PATCH:
            # Thin products, smaller than the gradients, which are therefore not scaled or copied first.
            weight = torch.bmm(self.gradients.mT, self.activations).div_(scale).square_().sum(dim=0)
        else:
            weight = self._squares_by_rows(scale)
        bias = (self.gradients.sum(dim=-2) / scale).square().sum(dim=-2)
        return [piece * scale.square() for piece in self._pieces(weight, bias)]

    def squares_in_basis(self, left: Tensor, right: Tensor) -> Tensor:
        scale = self._largest_gradient()
        return super().squares_in_basis(left / scale, right).mul_(scale.square())

    def _largest_gradient(self) -> Tensor:
        """What to divide gradients by before they are squared, 0-dimensional.

        Squares of small ones would be denormal numbers: most CPUs are slow at those, and digits are lost.
        """
        least, most = self._gradients.aminmax()  # in their own order of memory: twenty times as fast
        largest = torch.maximum(-least, most)
        return torch.where(largest > 0, largest, 1.0)

    def _squares_by_taps(self, scale: Tensor) -> Tensor:
        """Each tap as a 1×1 convolution of the pixels under it: for few positions, of which a tap sees only some."""
        images, vertical, horizontal = self._geometry
        placed = (self.gradients / scale).mT.unflatten(-1, (vertical.outputs, horizontal.outputs))
        found = []
        for tap_y, tap_x in product(range(vertical.kernel), range(horizontal.kernel)):
            seen = images[..., vertical.under(tap_y), horizontal.under(tap_x)].flatten(2).mT
            at = placed[..., slice(*vertical.window(tap_y)), slice(*horizontal.window(tap_x))].flatten(2).mT
            found.append(sum_of_squared_products(at, seen))
        return torch.stack(found, dim=-1).flatten(1)

    def _groups_are_fast(self) -> bool:
        """oneDNN needs no patches; with few positions, or many weights, memory costs more than that saves."""
        _, positions, outputs = self.gradients.shape
        fits = positions >= MANY_POSITIONS and outputs * self._patch_size <= FEW_WEIGHTS
        return fits and has_onednn() and self.gradients.dtype == torch.float32

    def _squares_by_groups(self, scale: Tensor) -> Tensor:
        """A few examples at a time as the groups of one convolution: the gradients of its weights are per example."""
        images, vertical, horizontal = self._geometry
        channels, outputs = images.shape[1], self.gradients.shape[-1]
        shape = (channels, vertical.kernel, horizontal.kernel)
        ends = [(axis.before, axis.after) for axis in (vertical, horizontal)]
        if any(before != after for before, after in ends):
            (top, bottom), (left, right) = ends
            images, ends = F.pad(images, (left, right, top, bottom)), [(0, 0), (0, 0)]
        gradients = self._gradients.reshape(-1, outputs, vertical.outputs, horizontal.outputs)
        total = images.new_zeros(outputs, math.prod(shape))
        size = max(1, CACHE // max(total.numel(), images[0].numel(), gradients[0].numel()))
        for some, theirs in zip(images.split(size), gradients.split(size), strict=True):
            count = len(some)
            products = conv2d_weight(
                some.reshape(1, count * channels, *some.shape[2:]),
                (count * outputs, *shape),
                theirs.reshape(1, count * outputs, *theirs.shape[2:]),
                padding=[before for before, _ in ends],
                dilation=[vertical.dilation, horizontal.dilation],
                groups=count,
            )
            total.add_(sum_of_squares(products.view(count, *total.shape).div_(scale), 0))
        return total

    def _squares_by_products(self, scale: Tensor) -> Tensor:
        """From the patches of a few examples at a time, which oneDNN multiplies faster than MKL does parts of them."""
        total = self._images.new_zeros(self._patch_size, self.gradients.shape[-1])
        size = max(1, CACHE // (self.gradients.shape[1] * self._patch_size))
        for images, gradients in zip(self._images.split(size), self.gradients.split(size), strict=True):
            add_squares_(total, patches(self._module, images).mT, (gradients / scale).contiguous().mT)
        return total.mT

    def _squares_by_rows(self, scale: Tensor) -> Tensor:
        """Patches along the width, of a few examples at a time; along the height a tap is a slice of them.

        The rows above and below the image that a tap would multiply are left out, so only the sides are padded.
        """
        images, vertical, horizontal = self._geometry
        channels, width = images.shape[1], horizontal.outputs
        zeros = self._module.padding_mode == "zeros"
        sides = self._module._reversed_padding_repeated_twice[:2] if zeros else (0, 0)
        total = images.new_zeros(vertical.kernel, self.gradients.shape[-1], channels * horizontal.kernel)
        size = max(1, CACHE // (images[0].numel() * horizontal.kernel))
        for some, gradients in zip(images.split(size), self.gradients.split(size), strict=True):
            theirs = gradients / scale
            strips = F.pad(some, sides).unfold(-1, width, horizontal.dilation).transpose(2, 3)
            strips = strips.reshape(len(some), channels * horizontal.kernel, -1)  # [B, channels · taps, pixels]
            for tap, part in enumerate(total):
                start, stop = vertical.window(tap)
                below = vertical.dilation * tap - vertical.before
                seen = strips[..., (start + below) * width : (stop + below) * width].mT
                part.add_(sum_of_squared_products(theirs[:, start * width : stop * width], seen))
        by_channel: Tensor = total.unflatten(-1, (channels, -1))  # [tap, outputs, channels, tap]
        return by_channel.permute(1, 2, 0, 3).flatten(1)


def _pixels_first(features: Tensor) -> Tensor:
    """`[B, features, positions]` as `[positions · B, features]`: one transpose of a matrix, which is fast."""
    batch, count, positions = features.shape
    return features.reshape(batch * count, positions).T.reshape(positions * batch, count)


def _shifted_products(
    pixels: Tensor,
    batch: int,
    shift: tuple[int, int],
    ranges: Sequence[tuple[int, int]],
    spans: Sequence[tuple[int, int]],
) -> dict[tuple[tuple[int, int], tuple[int, int]], Tensor]:
    """Σ x[q] x[q + shift]ᵀ over the pixels q in each of the ranges of rows and each of the spans of columns.

    `pixels` are `[height, width · B, channels]`, so that a span of columns is a slice of memory. Spans that overlap
    are sums of the pieces between their ends, and rows are summed last, so nothing is multiplied twice.
    """
    down, right = shift
    height = pixels.shape[0]
    cuts = sorted({cut for span in spans for cut in span})
    top, bottom = pixels[: height - down], pixels[down:]
    pieces = [
        torch.bmm(top[:, start * batch : stop * batch].mT, bottom[:, (start + right) * batch : (stop + right) * batch])
        for start, stop in pairwise(cuts)
    ]
    sums = {}
    for rows in ranges:
        summed = [piece[slice(*rows)].sum(dim=0) for piece in pieces]
        for span in spans:
            inside = [piece for piece, start in zip(summed, cuts, strict=False) if span[0] <= start < span[1]]
            sums[rows, span] = inside[0].clone() if len(inside) == 1 else torch.stack(inside).sum(dim=0)
    return sums
