"""What pictures look like, whatever they show: numbers that drift when a reward is exploited, none of them a reward.

Every function takes images [N, 3, H, W] in [0, 1] and returns a number for each; `measure` takes videos, too.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

LUMA = (0.299, 0.587, 0.114)  # of red, green and blue: Rec. 601, as JPEG weighs them
FAINT = 1e-6  # root mean square of a luminance that counts as constant, so that rounding has no spectrum


def luminance(images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N H W"]:
    """In fp64, 0..1."""
    return torch.einsum("nchw,c->nhw", images.double(), images.new_tensor(LUMA, dtype=torch.double))


def saturation(images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, " N"]:
    """Mean over pixels of the S of HSV, (max - min) / max, 0..1; black has none."""
    low, high = images.double().aminmax(dim=1)
    return ((high - low) / high.where(high > 0, 1.0)).mean((1, 2))


def contrast(images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, " N"]:
    """Standard deviation of the luminance over pixels, 0..0.5."""
    return luminance(images).flatten(1).std(1, correction=0)


def sharpness(images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, " N"]:
    """Variance over pixels of the Laplacian of the luminance; beyond the border the border goes on."""
    y = functional.pad(luminance(images)[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    around = y[:, 2:, 1:-1] + y[:, :-2, 1:-1] + y[:, 1:-1, 2:] + y[:, 1:-1, :-2]
    return (around - 4 * y[:, 1:-1, 1:-1]).flatten(1).var(1, correction=0)


def high_frequency(images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, " N"]:
    """Share, 0..1, of the spectral energy of the luminance, its mean apart, above half the Nyquist frequency.

    That is a wave of less than four pixels, whatever its direction.
    """
    y = luminance(images)
    energy = torch.fft.fft2(y - y.mean((1, 2), keepdim=True), norm="ortho").abs().square()
    rows, columns = (torch.fft.fftfreq(n, dtype=torch.double, device=y.device) for n in y.shape[1:])
    high = torch.hypot(rows[:, None], columns[None]) > 0.25  # Nyquist: half a wave per pixel
    whole = energy.sum((1, 2))
    return (energy * high).sum((1, 2)) / whole.clamp(min=y[0].numel() * FAINT**2)


STATISTICS: Mapping[str, Callable] = {
    function.__name__: function for function in (saturation, high_frequency, sharpness, contrast)
}


def measure(statistic: Callable, pictures: Float[Tensor, "N *F 3 H W"]) -> Float[Tensor, " N"]:
    """A statistic of each image, or of each video as the mean over its frames."""
    if pictures.ndim == 4:
        return statistic(pictures)
    return torch.stack([statistic(frames).mean() for frames in pictures])  # fp64 copies of one video at a time
