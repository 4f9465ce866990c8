"""Qwen-Image-Edit-Plus: as Qwen-Image, with latents of 1/4 of a side and a processor of pictures."""

from diffusers import QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

from tiny_pipelines import Tiny, seeded
from tiny_pipelines.qwen_image import parts
from tiny_pipelines.texts_qwen import processor, qwen_vl, tokenizer

# 1024 x 1024 and 384 x 384 pixels are constants of the module, whatever the networks are
plus.VAE_IMAGE_SIZE = plus.CONDITION_IMAGE_SIZE = 64 * 64


def pipeline(**changes):
    words = tokenizer()
    return QwenImageEditPlusPipeline(
        **parts(2, **changes), text_encoder=qwen_vl(words), tokenizer=words, processor=processor(words)
    )


def variant(**changes):
    return Tiny(seeded(lambda: pipeline(**changes)), sizes=((32, 32), (24, 16)), conditioned=True)


VARIANTS = {  # 2511 modulates the tokens of the pictures as those of time 0
    "qwen-image-edit-2509": variant(),
    "qwen-image-edit-2511": variant(zero_cond_t=True),
}
