"""The hint that ends an error about a name."""

from rewards.nearest import did_you_mean


def test_a_near_name_is_suggested_and_a_far_one_is_not():
    assert did_you_mean("jpg_size", ["jpeg_size", "ocr"]) == " Did you mean 'jpeg_size'?"
    assert did_you_mean("zzz", ["jpeg_size", "ocr"]) == ""
