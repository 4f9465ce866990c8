"""flowrl/visual/pipelines/texts.py: each text is encoded once, in a run and on a disk."""

import pytest
import torch

from flowrl.visual.pipelines import texts
from flowrl.visual.pipelines.texts import Texts


@pytest.fixture
def encoder():
    """Counts what it is asked for; a text is its length, twice."""

    def encode(key):
        encode.asked.append(key)
        return {"tokens": torch.full((len(key[0]), 2), float(len(key[0]))), "mask": torch.ones(len(key[0])).bool()}

    encode.asked = []
    return encode


def key(text, *pictures, negative=False):
    return text, tuple(map(str, pictures)), negative


def test_a_text_is_encoded_once_however_often_and_in_whatever_company(encoder):
    kept, a, b = Texts(encoder), key("a"), key("bb")
    first = kept.get([a, b, a])
    assert encoder.asked == [a, b] and first[0] is first[2]
    assert kept.get([b])[0] is first[1] and encoder.asked == [a, b]


def test_what_a_folder_holds_is_not_encoded_again_and_is_the_same_bits(encoder, tmp_path):
    a = key("a picture of a, b and c \u2603 / \\")
    (fresh,) = Texts(encoder, tmp_path / "kept").get([a])
    (again,) = Texts(encoder, tmp_path / "kept").get([a])
    assert encoder.asked == [a] and fresh.keys() == again.keys()
    assert all(torch.equal(fresh[name], again[name]) and fresh[name].dtype == again[name].dtype for name in fresh)


def test_the_folder_tells_texts_pictures_and_negatives_apart(encoder, tmp_path):
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    one.write_bytes(b"1"), two.write_bytes(b"2")
    keys = [key("a"), key("a", negative=True), key("a", one), key("a", two), key("a", one, two), key("a", two, one)]
    Texts(encoder, tmp_path / "kept").get(keys)
    assert encoder.asked == keys and len(list((tmp_path / "kept").iterdir())) == len(keys)
    two.write_bytes(b"3")
    Texts(encoder, tmp_path / "kept").get(keys)
    assert encoder.asked[len(keys) :] == [k for k in keys if str(two) in k[1]], "of a picture the content counts"


def test_an_encoder_that_fails_leaves_no_file(tmp_path):
    def fail(key):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        Texts(fail, tmp_path).get([key("a")])
    assert not list(tmp_path.iterdir())


def test_memory_is_bounded_by_what_is_in_use(encoder, monkeypatch):
    monkeypatch.setattr(texts, "CACHE_BYTES", 100)
    kept, many = Texts(encoder), [key("x" * n) for n in range(1, 9)]
    kept.get(many)  # 9 bytes a letter: 324
    assert len(kept.items()) == 8
    kept.get(many[:2])
    assert [k for k, _ in kept.items()] == many[:2] and len(encoder.asked) == 8
    kept.get(many)
    assert len(encoder.asked) == 14
