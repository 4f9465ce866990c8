"""Pictures from one form to another, each conversion written once.

An image is `Float[Tensor, "3 H W"]`, RGB in [0, 1]; images are `[N, 3, H, W]`, videos `[N, F, 3, H, W]`.  A uint8
picture is `[N, H, W, 3]` in 0..255.  A value further than 1e-3 outside [0, 1], or NaN, is a ValueError wherever it
comes in.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw
from torch import Tensor

TOLERANCE = 1e-3  # how far outside [0, 1] a decoder may round
FRAMES_PER_SECOND = 16  # of the videos that are written; Wan 2.1's
FORMS = "a list of PIL images, uint8 [N, H, W, 3] or float [N, 3, H, W] in [0, 1]"


def check_images(images: Tensor) -> None:
    """Raise ValueError unless `images` is float [N, 3, H, W], N >= 1, in [0, 1] and without NaN."""
    _check(images, "image", 4, "[N, 3, H, W]")


def check_videos(videos: Tensor) -> None:
    """Raise ValueError unless `videos` is float [N, F, 3, H, W], N >= 1, in [0, 1] and without NaN."""
    _check(videos, "video", 5, "[N, F, 3, H, W]")


def _check(x, one, dimensions, form):
    if x.ndim != dimensions or x.shape[-3] != 3 or x.numel() == 0 or not x.is_floating_point():
        raise ValueError(f"{one}s: {x.dtype} {list(x.shape)}; expected float {form} in [0, 1], N >= 1")
    broken = (~x.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if broken:
        raise ValueError(f"{one}s: NaN or infinity in {one} {_some(broken)} of {len(x)}")
    low, high = (float(limit) for limit in torch.aminmax(x))
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        hint = ""
        if low >= -1 - TOLERANCE and high <= 1 + TOLERANCE:
            hint = f"; these look like [-1, 1]: give {one}s / 2 + 0.5"
        elif low >= -TOLERANCE and high > 2:
            hint = f"; these look like 0..255: give {one}s / 255"
        raise ValueError(f"{one}s: values from {low:.4g} to {high:.4g}; expected [0, 1]{hint}")


def _some(indices: list[int]) -> str:
    return ", ".join(map(str, indices[:5])) + (f" and {len(indices) - 5} more" if len(indices) > 5 else "")


def as_images(media: object) -> Float[Tensor, "N 3 H W"]:
    """Images from what people hold: a list of PIL images, uint8 [N, H, W, 3] or float [N, 3, H, W]."""
    if isinstance(media, list | tuple) and media and all(isinstance(picture, Image.Image) for picture in media):
        return from_pil(media)
    if isinstance(media, np.ndarray) and media.dtype == np.uint8:
        media = torch.from_numpy(media)
    if not isinstance(media, Tensor):
        kind = f"{media.dtype} array" if isinstance(media, np.ndarray) else type(media).__name__
        raise ValueError(f"images: given {kind}; accepted: {FORMS}")
    if media.dtype != torch.uint8:
        check_images(media)
        return media
    if media.ndim != 4 or media.shape[-1] != 3 or media.numel() == 0:
        raise ValueError(f"images: uint8 {list(media.shape)}; expected uint8 [N, H, W, 3], N >= 1")
    return from_uint8(media)


def check_file(path: Path) -> None:
    """Raise ValueError unless this is a whole picture."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r}: no such file.")
    try:
        with Image.open(path) as picture:
            picture.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is no picture that can be read ({' '.join(str(error).split())}).") from None


def stills(pictures: Float[Tensor, "N *F 3 H W"]) -> Float[Tensor, "N 3 H W"]:
    """Images as they are; of videos the frame in the middle, to show one beside others."""
    return pictures[:, pictures.shape[1] // 2] if pictures.ndim == 5 else pictures


def quantise(images: Float[Tensor, "N *F 3 H W"]) -> Float[Tensor, "N *F 3 H W"]:
    """New fp32 images or videos on the 256 levels that a PNG can hold."""
    return _levels(images) / 255


def _levels(images: Tensor) -> Tensor:
    return (images.detach().float().clamp(0, 1) * 255).round()


def to_uint8(images: Float[Tensor, "N 3 H W"]) -> UInt8[np.ndarray, "N H W 3"]:
    check_images(images)
    return _levels(images).to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()


def from_uint8(pictures: UInt8[np.ndarray, "N H W 3"] | UInt8[Tensor, "N H W 3"]) -> Float[Tensor, "N 3 H W"]:
    return torch.as_tensor(pictures).permute(0, 3, 1, 2).contiguous().float() / 255


def to_pil(images: Float[Tensor, "3 H W"] | Float[Tensor, "N 3 H W"]) -> Image.Image | list[Image.Image]:
    """One PIL image for `[3, H, W]`, a list for `[N, 3, H, W]`."""
    if images.ndim == 3:
        return Image.fromarray(to_uint8(images[None])[0])
    return [Image.fromarray(picture) for picture in to_uint8(images)]


def from_pil(pictures: Sequence[Image.Image]) -> Float[Tensor, "N 3 H W"]:
    """Images of one size without transparency; other modes become RGB."""
    sizes = sorted({picture.size for picture in pictures})
    if len(sizes) != 1:
        raise ValueError(f"images: pictures of sizes {sizes}; expected at least one picture, all of one size")
    if any(picture.has_transparency_data for picture in pictures):
        raise ValueError("images: a picture has transparency; put it on a background and convert it to RGB first")
    return from_uint8(np.stack([np.array(picture.convert("RGB")) for picture in pictures]))


def jpeg_bytes(image: Float[Tensor, "3 H W"], quality: int) -> bytes:
    """The file as PIL writes it, with 4:2:0 chroma."""
    to_pil(image).save(buffer := BytesIO(), format="JPEG", quality=quality)
    return buffer.getvalue()


def png_bytes(image: Float[Tensor, "3 H W"], most: int) -> bytes:
    """The file, shrunk where a side has more than `most` pixels."""
    picture = to_pil(image)
    picture.thumbnail((most, most))
    picture.save(buffer := BytesIO(), format="PNG")
    return buffer.getvalue()


def picture_grid(images: Float[Tensor, "N 3 H W"], columns: int, scale: int = 1, gap: int = 2) -> Image.Image:
    """Rows of `columns` images on white, each pixel drawn `scale` times both ways, `gap` pixels apart."""
    if columns < 1 or scale < 1 or gap < 0:
        raise ValueError(f"picture_grid: columns={columns}, scale={scale}, gap={gap}; expected >= 1, >= 1, >= 0")
    width, height = images.shape[3] * scale, images.shape[2] * scale
    rows = -(-len(images) // columns)
    grid = Image.new("RGB", (columns * (width + gap) - gap, rows * (height + gap) - gap), "white")
    for i, picture in enumerate(to_pil(images)):
        corner = (i % columns * (width + gap), i // columns * (height + gap))
        grid.paste(picture.resize((width, height), Image.Resampling.NEAREST), corner)
    return grid


def save_png(image: Float[Tensor, "3 H W"] | Image.Image, path: str | Path) -> None:
    (image if isinstance(image, Image.Image) else to_pil(image)).save(path, format="PNG")


def save_moving(frames: Sequence[Image.Image], path: str | Path) -> None:
    """An animated PNG, which any browser plays again and again; one frame is a picture."""
    first, *rest = frames
    if not rest:
        return save_png(first, path)
    first.save(path, format="PNG", save_all=True, append_images=rest, duration=1000 / FRAMES_PER_SECOND, loop=0)


def before_after(before: str | Path, after: str | Path, path: str | Path) -> None:
    """Put two pictures side by side under the words "before" and "after"."""
    pictures = [Image.open(file).convert("RGB") for file in (before, after)]
    gap, band = 24, 20
    width = sum(p.width for p in pictures) + gap
    sheet = Image.new("RGB", (width, max(p.height for p in pictures) + band), "white")
    for picture, word, x in zip(pictures, ("before", "after"), (0, pictures[0].width + gap), strict=True):
        sheet.paste(picture, (x, band))
        ImageDraw.Draw(sheet).text((x + 2, 4), word, fill="black")
    save_png(sheet, path)
