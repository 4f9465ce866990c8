"""Qwen-Image-Edit-Plus: Qwen-Image-Edit-2509 and -2511.  arXiv:2508.02324"""

import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

from flowrl.visual.pipelines.family import stacked
from flowrl.visual.pipelines.qwen_image import QwenImage


class QwenImageEditPlus(QwenImage):
    """Qwen-Image that reads one or several pictures: small with the text, large as latents after those that it draws.

    Each keeps its ratio of sides; only rows whose pictures have the same sizes share a call. What is drawn has
    model.size, whatever the pictures have, where pipe(image) without a size follows the last of them.
    """

    PIPELINE = "QwenImageEditPlusPipeline"
    TOKENS = None  # pipe(max_sequence_length=...) changes nothing
    CONDITIONED = True

    def encode(self, text, pictures, device):
        processor, vae, seen, latents = self.pipe.image_processor, self.pipe.vae, [], {}
        for i, picture in enumerate(pictures):
            width, height = plus.calculate_dimensions(plus.CONDITION_IMAGE_SIZE, picture.width / picture.height)
            seen.append(processor.resize(picture, height, width))
            width, height = plus.calculate_dimensions(plus.VAE_IMAGE_SIZE, picture.width / picture.height)
            pixels = processor.preprocess(picture, height, width).unsqueeze(2).to(device, vae.dtype)
            latents[f"picture {i}"] = self.pipe._encode_vae_image(pixels, generator=None)[0, :, 0]
        tokens, _ = self.pipe.encode_prompt([text], image=seen, device=device)
        return {"tokens": tokens[0], "mask": tokens.new_ones(tokens.shape[1], dtype=torch.bool), **latents}

    def readers(self):
        return []  # nothing is cut

    def bucket(self, text):
        return tuple(text[name].shape for name in names(text))

    def beside(self, texts):
        return [stacked(texts, name) for name in names(texts[0])]

    def blank(self):
        """With one picture of a megapixel."""
        side = 1024 // self.pipe.vae_scale_factor
        return super().blank() | {"picture 0": torch.empty(self.shape()[0], side, side, device="meta")}

    def draw(self, prompts, noise, steps, guidance, pictures):
        """One by one: the pipeline takes no batch."""
        drawn = [
            self.pipe(
                image=seen, prompt=prompt, negative_prompt="", true_cfg_scale=guidance, num_inference_steps=steps,
                latents=self.packed(row[None]), height=self.height, width=self.width, output_type="pt",
            ).images
            for prompt, row, seen in zip(prompts, noise, pictures, strict=True)
        ]  # fmt: skip
        return torch.cat(drawn)


def names(text):
    """Entries of its pictures, in their order."""
    return [f"picture {i}" for i in range(len(text) - len(("tokens", "mask")))]
