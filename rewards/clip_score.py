"""Cosine of the CLIP embeddings of image and prompt, -1..1 (real pairs: about 0.2 to 0.4).  CLIPScore, arXiv:2104.08718

Every tensor of the weights must fit the model.  An `open_clip_config.json` beside them sets mean, std and resizing
(else OpenAI's) and must agree on QuickGELU, which tensors do not tell: OpenAI's own weights need `...-quickgelu`.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from rewards.nearest import did_you_mean

ME = "reward 'clip_score'"
UNUSED = ("logit_scale", "logit_bias")  # a cosine has no temperature


def load(
    device: str | torch.device = "cpu",
    *,
    model: str = "ViT-B-32",
    weights: str | Path | None = None,
    batch_size: int = 32,
) -> Callable:
    """`weights` is an open_clip checkpoint of `model`: .safetensors, or a .pt that holds only tensors."""
    if weights is None or not Path(weights).is_file():
        raise ValueError(
            f"{ME}: weights is {weights!r}; give the path of an open_clip checkpoint of {model!r}, "
            "such as open_clip_model.safetensors (nothing is downloaded)"
        )
    if batch_size < 1:
        raise ValueError(f"{ME}: batch_size is {batch_size}; expected at least 1")
    clip, tokenize, preprocess = _load_model(model, Path(weights), device)

    @torch.no_grad()
    def score(images: Float[Tensor, "N 3 H W"], prompts: list[str]) -> Float[Tensor, " N"]:
        row = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}  # each distinct prompt once
        tokens = tokenize(prompts, list(row)).to(device)
        text = torch.cat([clip.encode_text(part, normalize=True) for part in tokens.split(batch_size)])
        parts = images.to(device).split(batch_size)
        image = torch.cat([clip.encode_image(preprocess(part), normalize=True) for part in parts])
        return (image * text[[row[prompt] for prompt in prompts]]).sum(dim=1).cpu()

    return score


def _load_model(name: str, path: Path, device: str | torch.device) -> tuple[torch.nn.Module, Callable, Callable]:
    import open_clip

    native = {m: c for m in open_clip.list_models() if _is_native(c := open_clip.get_model_config(m))}
    if name not in native:
        raise ValueError(
            f"{ME}: no such model {name!r}.{did_you_mean(name, native)} "
            f"Models with open_clip's own towers and tokenizer: {', '.join(native)}."
        )
    config, beside = native[name], path.parent / "open_clip_config.json"
    origin = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    ours, theirs = (bool(c.get("quick_gelu")) for c in (config, origin.get("model_cfg", config)))
    if ours != theirs:
        raise ValueError(f"{ME}: model {name!r} has quick_gelu={ours}, the weights {theirs} ({str(beside)!r})")
    clip = open_clip.CLIP(**config)
    _fill(clip, _state(path), f"{ME}: {str(path)!r} does not fit model {name!r}")
    defaults = {"mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD}
    preprocess = _preprocessing(config["vision_cfg"]["image_size"], defaults | origin.get("preprocess_cfg", {}))
    return clip.eval().requires_grad_(False).to(device), _tokenizer(open_clip.get_tokenizer(name)), preprocess


def _is_native(config: Mapping) -> bool:
    """Towers and tokenizer that open_clip itself carries: nothing that would come from a hub."""
    return not (
        any(key.startswith("hf_") for key in config["text_cfg"])
        or "timm_model_name" in config["vision_cfg"]
        or "custom_text" in config
        or "multimodal_cfg" in config
    )


def _state(path: Path) -> dict[str, Tensor]:
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # truncated, pickled code, a TorchScript archive, ...
        raise ValueError(
            f"{ME}: {str(path)!r} is not a readable file of tensors ({type(error).__name__}); "
            "give a state dict, best as .safetensors"
        ) from error
    state = state.get("state_dict", state)  # open_clip's training checkpoints hold more than weights
    return {key.removeprefix("module."): value for key, value in state.items()}


def _fill(clip: torch.nn.Module, state: Mapping[str, Tensor], fault: str) -> None:
    """Strict, and without the resizing of position tables that would hide another resolution or context length."""
    theirs, ours = ({k: list(v.shape) for k, v in s.items() if k not in UNUSED} for s in (state, clip.state_dict()))
    wrong = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    if wrong:
        shown = ", ".join(f"{k} ({theirs.get(k, 'absent')}, not {ours.get(k, 'absent')})" for k in wrong[:3])
        raise ValueError(f"{fault}: {len(wrong)} of {len(ours)} tensors differ, first {shown}")
    clip.load_state_dict({key: state[key] for key in ours}, strict=False)


def _preprocessing(size: int, numbers: Mapping) -> Callable[[Tensor], Tensor]:
    from torchvision.transforms import functional as F

    how, kind = numbers.get("resize_mode", "shortest"), numbers.get("interpolation", "bicubic")
    if how not in ("shortest", "squash") or kind != "bicubic":
        raise ValueError(f"{ME}: the weights ask for resizing {how!r}, {kind!r}; accepted: shortest, squash, bicubic")

    def preprocess(images: Tensor) -> Tensor:
        sides = images.shape[-2:]
        height, width = (size if how == "squash" else size * side // min(sides) for side in sides)
        for target in ([sides[0], width], [height, width]):  # as Pillow: one way, then the other, saturating twice
            images = F.resize(images, target, F.InterpolationMode.BICUBIC, antialias=True).clamp(0, 1)
        return F.normalize(F.center_crop(images, size), numbers["mean"], numbers["std"])

    return preprocess


def _tokenizer(tokenizer: Callable) -> Callable[[list[str], list[str]], Tensor]:
    """Tokens of the distinct prompts, cut at the context length; the first cut is a warning that counts."""
    length, warned = tokenizer.context_length, False

    def tokenize(prompts: list[str], distinct: list[str]) -> Tensor:
        nonlocal warned
        long = {prompt for prompt in distinct if len(tokenizer.encode(prompt)) + 2 > length}  # start and end
        if long and not warned:
            warned = True
            warnings.warn(
                f"{ME}: {sum(prompt in long for prompt in prompts)} of {len(prompts)} prompts exceed "
                f"{length} tokens; scored on the first {length}",
                stacklevel=3,
            )
        return tokenizer(distinct)

    return tokenize
