"""FLUX.1 dev and schnell: shift, guidance as an input, packed places."""

import pytest
import torch

from flowrl.visual.policy import Example

TEN_STEPS = {  # published shifts of ten steps: mu 0.5 at 256 tokens, 1.15 at 4096
    64: [1, 0.936863, 0.868332, 0.793687, 0.712071, 0.622459, 0.523616, 0.414038, 0.291875, 0.154828, 0],
    256: [1, 0.966014, 0.926647, 0.880513, 0.825702, 0.759511, 0.677987, 0.575103, 0.4412, 0.259758, 0],
}


def called(policy, spied, guidance, rows=2):
    """The calls of the network for one velocity of `rows` rows."""
    policy.guidance = guidance
    calls, ids = spied(policy.pipe.transformer), policy.encode([Example("a red circle")] * rows)
    with torch.no_grad():
        policy.velocity(torch.zeros(rows, *policy.shape), torch.linspace(0.5, 0.75, rows), ids)
    return calls


@pytest.mark.parametrize("size", TEN_STEPS)
def test_the_shift_of_dev_grows_with_the_patches(policy_of, size):
    """C31: the shift of the configuration, 3, plays no part beside the dynamic one."""
    sigmas = policy_of("flux-dev", size=size).sigmas(10)
    assert sigmas.dtype == torch.float32 and sigmas.tolist() == pytest.approx(TEN_STEPS[size], abs=1e-6)


def test_schnell_walks_evenly(policy_of):
    assert policy_of("flux-schnell").sigmas(4).tolist() == [1, 0.75, 0.5, 0.25, 0]


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_dev_reads_guidance_in_one_row_per_state(policy_of, spied, guidance):
    (call,) = called(policy_of("flux-dev"), spied, guidance)
    assert call.guidance.tolist() == [guidance] * 2 and call.timestep.tolist() == [0.5, 0.75]
    assert call.hidden_states.shape == (2, 16, 16)


@pytest.mark.parametrize(("guidance", "rows"), [(1.0, 2), (4.0, 4)])
def test_schnell_is_guided_by_a_pair_of_rows(policy_of, spied, guidance, rows):
    (call,) = called(policy_of("flux-schnell"), spied, guidance)
    assert call.guidance is None and len(call.hidden_states) == rows


def test_places_are_unbatched(policy_of, spied):
    """A batched `txt_ids` is deprecated; the text stands at 0, the patch in row 2 and column 1 at (0, 2, 1)."""
    (call,) = called(policy_of("flux-dev", size=(16, 8)), spied, 1.0)
    assert call.txt_ids.shape == (8, 3) and not call.txt_ids.any()
    assert call.img_ids.shape == (8, 3) and call.img_ids[5].tolist() == [0, 2, 1]


def test_adapters_sit_on_both_kinds_of_blocks(policy_of):
    names = {name.partition(".lora_A.")[0] for name, _ in policy_of("flux-dev").trainable() if ".lora_A." in name}
    assert sum(name.startswith("transformer_blocks.0.") for name in names) == 12
    assert sum(name.startswith("single_transformer_blocks.0.attn.") for name in names) == 3


def test_a_size_between_patches_is_refused_with_its_neighbours(policy_of):
    with pytest.raises(ValueError, match=r"model\.size = 18: accepted are multiples of 4, such as 16 or 20\."):
        policy_of("flux-dev", size=18)


def test_more_tokens_than_the_pipeline_takes_are_refused(policy_of):
    with pytest.raises(ValueError, match=r"model\.max_sequence_length = 513: FluxPipeline accepts up to 512\."):
        policy_of("flux-dev", max_sequence_length=513)


def test_a_grid_that_is_the_pipelines_own_is_refused(policy_of):
    with pytest.raises(ValueError, match=r"model\.grid = 'linear': FluxPipeline accepts pipeline"):
        policy_of("flux-dev", grid="linear")


def test_prompts_longer_than_t5_reads_are_counted(policy_of):
    """Eight tokens with the last one, </s>; that CLIP cuts after 12 letters is no loss."""
    prompts = ["a red circle", "two blue squares on the left of", "two blue squares on the left of a green cross"]
    (line,) = policy_of("flux-dev").warnings([Example(p) for p in prompts])
    assert line.startswith("1 of 3 prompts exceed the tokenizer's 8 tokens")
