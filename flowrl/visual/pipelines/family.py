"""What one class of pipelines does in its own way; `PipelinePolicy` does the rest, alike for all."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar

import diffusers
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, SchedulerMixin
from torch import Tensor, nn

from flowrl.visual.pipelines import grids
from samplers import schedules

Text = Mapping[str, Tensor]  # one text as the network reads it, without a batch dimension


class Family(ABC):
    """A subclass per family of models: its constants, `shape`, `encode`, `velocity`, `decode`; the rest has defaults.

    It holds the pipeline and what was asked of it, and no state: whatever it returns follows from its arguments.

    pipe:                loaded pipeline of the class PIPELINE
    size:                pixels, one number or (height, width); by default the pipeline's own
    frames:              of a video; by default FRAMES
    max_sequence_length: as in pipe(max_sequence_length=...); by default TOKENS
    guidance_2:          scale of the second of two experts, where the first is guided; by default the same
    """

    PIPELINE: ClassVar[str]  # class of diffusers
    NETWORKS: ClassVar[tuple[str, ...]] = ("transformer",)  # components that are trained; absent ones are left out
    TARGETS: ClassVar[tuple[str, ...]]  # of LoRA: module names by their end
    BLOCKS: ClassVar[tuple[str, ...]]  # class names of what is gathered at a time where weights are sharded
    TOKENS: ClassVar[int | None] = None  # None: the class takes no max_sequence_length
    FRAMES: ClassVar[int | None] = None  # None: the class draws pictures
    GRIDS: ClassVar[tuple[str, ...]] = ("pipeline", "linear")  # the first by default
    CONDITIONED: ClassVar[bool] = False  # on pictures that each example brings
    GUIDED: bool = True  # False: guidance above 1 is refused
    MASKED: ClassVar[bool] = False  # whether attention gets a mask where texts differ in length
    LEFT_OUT: ClassVar[tuple[str, ...]] = ()  # components that are not loaded

    def __init__(
        self,
        pipe: DiffusionPipeline,
        size: int | Sequence[int] | None = None,
        frames: int | None = None,
        max_sequence_length: int | None = None,
        guidance_2: float | None = None,
    ):
        if frames is not None and self.FRAMES is None:
            raise ValueError(f"model.frames = {frames} has no effect: {self.PIPELINE} draws pictures.")
        if max_sequence_length is not None and self.TOKENS is None:
            raise ValueError(
                f"model.max_sequence_length = {max_sequence_length} has no effect: {self.PIPELINE} has a fixed one."
            )
        self.pipe, self.guidance_2 = pipe, guidance_2
        if guidance_2 is not None and not self.two_scales():
            raise ValueError(f"model.guidance_2 = {guidance_2:g} has no effect: this {self.PIPELINE} has one expert.")
        self.sharded = False  # where it is, every call runs all networks, as other processes may need their weights
        self.frames = 1 if self.FRAMES is None else frames or self.FRAMES
        self.max_sequence_length = self.TOKENS if max_sequence_length is None else max_sequence_length
        most = self.longest()
        if most is not None and (self.max_sequence_length or 0) > most:
            raise ValueError(
                f"model.max_sequence_length = {self.max_sequence_length}: {self.PIPELINE} accepts up to {most}."
            )
        self.height, self.width = [size] * 2 if isinstance(size, int) else size or self.default_size()
        self.check_size()

    @classmethod
    def pipeline(cls) -> type[DiffusionPipeline]:
        """The class PIPELINE."""
        return getattr(diffusers, cls.PIPELINE)

    @classmethod
    def unread(cls, network: nn.Module) -> Sequence[str]:
        """Modules whose output the network drops: no gradient reaches them, so they are not trained."""
        return ()

    # Pixels and latents

    def default_size(self) -> tuple[int, int]:
        """(height, width) in pixels of pipe(prompt)."""
        side = self.pipe.default_sample_size * self.pipe.vae_scale_factor
        return side, side

    def multiple(self) -> int:
        """Pixels that height and width are multiples of."""
        return self.pipe.vae_scale_factor * 2

    def largest(self) -> int | None:
        """Pixels of the longest side that the network can draw."""
        return None

    def check_size(self) -> None:
        """ValueError with the nearest sizes where the network cannot draw this one."""
        unit, most = self.multiple(), self.largest()
        for pixels in (self.height, self.width):
            if pixels % unit or pixels > (most or pixels):
                near = [n for n in (pixels // unit * unit, -(-pixels // unit) * unit) if 0 < n <= (most or n)]
                up_to = f" up to {most}" if most else ""
                raise ValueError(
                    f"model.size = {pixels}: accepted are multiples of {unit}{up_to}, such as "
                    f"{' or '.join(str(n) for n in dict.fromkeys(near or [most or unit]))}."
                )

    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Latents of one sample: (C, h, w), of a video (C, f, h, w)."""

    # Texts

    def longest(self) -> int | None:
        """max_sequence_length above which the pipeline refuses, or its network has no places left."""
        return None

    @abstractmethod
    def encode(self, text: str, pictures: Sequence[object], device: torch.device) -> Text:
        """One text, and the PIL pictures that condition it, as the network reads it; without gradient."""

    @abstractmethod
    def blank(self) -> Text:
        """A text of full length, empty tensors on the meta device: what `flowrl plan` measures memory with."""

    def encode_negative(self, text: str, pictures: Sequence[object], device: torch.device) -> Text:
        """What guidance leads away from, where the class encodes it in another way than a prompt."""
        return self.encode(text, pictures, device)

    def readers(self) -> Sequence[tuple[object, int]]:
        """(tokenizer, tokens after which it cuts) of the encoders whose cut loses something."""
        return [(self.pipe.tokenizer, self.max_sequence_length or self.pipe.tokenizer.model_max_length)]

    def bucket(self, text: Text) -> Hashable:
        """Texts of different buckets never share a call: sizes that no mask evens out."""
        return None

    # The flow

    def sigmas(self, steps: int, grid: str) -> Tensor:
        """[steps + 1] fp32 on the CPU: "pipeline" as pipe(num_inference_steps=steps) walks it, "linear" as pipe(sigmas=
        linspace(1, 1/steps, steps)).
        """
        return grids.walked(self.pipe.scheduler, steps, linear=grid == "linear")

    def walk(self, steps: int, grid: str | float | None) -> Tensor:
        """The levels that `model.grid` names: one of GRIDS, by default the first, or even steps of a shift."""
        accepted = [*self.GRIDS, *(["a shift"] if float(self.sigmas(2, self.GRIDS[0])[0]) == 1 else [])]
        if isinstance(grid, float) and "a shift" in accepted:
            return schedules.shifted(schedules.linear(steps), shift=grid)
        if grid is not None and grid not in self.GRIDS:
            raise ValueError(f"model.grid = {grid!r}: {self.PIPELINE} accepts {', '.join(accepted)}.")
        return self.sigmas(steps, self.GRIDS[0] if grid is None else grid)

    @abstractmethod
    def velocity(self, latents: Tensor, sigma: Tensor, texts: Sequence[Text], guidance: Tensor | None) -> Tensor:
        """d latents / d sigma = noise - data [B, *shape] of latents [B, *shape], in their dtype, at sigma [B] in fp32.

        guidance: [B], where the network has an input for it
        """

    def one_step(self, steps: int) -> SchedulerMixin:
        """The scheduler that a rollout equals: the pipeline's own, or Euler along its levels if it keeps a history."""
        own = self.pipe.scheduler
        euler = isinstance(own, FlowMatchEulerDiscreteScheduler)
        return own if euler else grids.Levels(self.sigmas(steps, self.GRIDS[0]))

    def embeds_guidance(self) -> bool:
        """Whether guidance is an input of the network: one row per state instead of two."""
        return False

    def two_scales(self) -> bool:
        """Whether `guidance_2` has an effect."""
        return False

    def scale(self, guidance: float, sigma: Tensor) -> float | Tensor:
        """That of rows at sigma [B], one for all or [B, 1, ...]; `guidance` above 1."""
        return guidance

    def guide(self, negative: Tensor, positive: Tensor, scale: float | Tensor) -> Tensor:
        """Classifier-free guidance by what `scale` returned."""
        return negative + scale * (positive - negative)

    # Pictures

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """[N, 3, H, W], of a video [N, 3, F, H, W], in -1..1 as the autoencoder leaves it."""

    @abstractmethod
    def draw(
        self, prompts: Sequence[str], noise: Tensor, steps: int, guidance: float, pictures: Sequence[Sequence[object]]
    ) -> Tensor:
        """What plain diffusers draws from noise [N, *shape]: [N, 3, H, W], of a video [N, F, 3, H, W], in 0..1.

        The yardstick of `flowrl check`: one call of the pipeline, whose scheduler is that of `one_step` then. Texts are
        guided away from "".
        """


def stacked(texts: Sequence[Text], name: str) -> Tensor:
    """[B, ...]: one entry of every text; those of fewer tokens get zeros after them."""
    rows = [text[name] for text in texts]
    longest = max(len(row) for row in rows) if rows[0].ndim else 0
    if all(row.shape == rows[0].shape for row in rows):
        return torch.stack(rows)
    return torch.nn.utils.rnn.pad_sequence([row[:longest] for row in rows], batch_first=True)
