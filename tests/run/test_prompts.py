"""Prompt files: what is read, what is counted and what is refused."""

import json

import pytest
import torch

from flowrl.run import prompts
from flowrl.visual.policy import Example
from rewards import media


@pytest.fixture
def file(tmp_path):
    """Write a prompt file and return its path."""

    def write(content, name="prompts.txt"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def read(path):
    return prompts.read(path, "data.train")


def fault(path):
    with pytest.raises(ValueError, match=r"^data\.train = ") as caught:
        read(path)
    assert path.name in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_text_file_holds_one_prompt_per_line(file):
    examples, warnings = read(file("a red cube\n  a blue ball \r\nlast"))
    assert examples == [Example("a red cube"), Example("a blue ball"), Example("last")] and not warnings


def test_a_jsonl_file_holds_metadata_beside_or_below_the_prompt(file):
    rows = [{"prompt": "a", "negative_prompt": "b", "tag": "t"}, {"prompt": "c", "metadata": {"tag": "u", "n": [1]}}]
    examples, _ = read(file("\n".join(map(json.dumps, rows)), "p.jsonl"))
    assert examples == [Example("a", "b", {"tag": "t"}), Example("c", "", {"tag": "u", "n": [1]})]
    assert prompts.column_names(examples) == ["tag", "n"]
    assert prompts.columns(examples, ["tag", "n"]) == {"tag": ["t", "u"], "n": [None, [1]]}


def test_blank_lines_are_left_out_and_counted(file):
    examples, warnings = read(file("a\n\n   \nb\n"))
    assert [e.prompt for e in examples] == ["a", "b"] and len(warnings) == 1 and "2 blank lines" in warnings[0]


def test_an_empty_prompt_is_kept_and_counted(file):
    """C75: allowed, with a warning."""
    examples, warnings = read(file('{"prompt": ""}\n{"prompt": "   "}\n{"prompt": "a"}', "p.jsonl"))
    assert len(examples) == 3 and len(warnings) == 1 and "2 prompts are empty" in warnings[0]


def test_emoji_are_kept_and_counted(file):
    """C75, C76."""
    examples, warnings = read(file("a \U0001f98a\nplain\n\U0001f98a \U0001f98a"))
    assert examples[0].prompt == "a \U0001f98a" and len(warnings) == 1 and "2 prompts hold emoji" in warnings[0]


@pytest.mark.parametrize("inside", ["\u2028", "\x85", "\x0b", "\x1c"])
def test_only_a_newline_ends_a_line(file, inside):
    """Unicode has other line breaks, which a JSON text may hold as they are."""
    text = json.dumps({"prompt": f"one{inside}prompt"}, ensure_ascii=False)
    if inside < " ":
        text = f"one{inside}prompt"
    examples, warnings = read(file(text + "\nb" * (inside < " "), "p.txt" if inside < " " else "p.jsonl"))
    assert examples[0].prompt == f"one{inside}prompt" and not warnings


def test_a_byte_order_mark_is_not_part_of_the_first_prompt(file):
    assert read(file(b"\xef\xbb\xbfa red cube"))[0] == [Example("a red cube")]


def test_a_missing_file_is_named(tmp_path):
    assert "no such file" in fault(tmp_path / "absent.txt")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_a_prompt_is_refused(file, content):
    assert "holds no prompt" in fault(file(content))


def test_text_that_is_not_utf8_is_refused_with_its_place(file):
    assert "not UTF-8" in (message := fault(file(b"caf\xe9"))) and "byte 3" in message


def test_another_ending_is_refused(file):
    assert ".txt or .jsonl" in fault(file("a", "prompts.csv"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", '"prompt"'),
        ('{"text": "a"}', '"prompt"'),
        ('{"prompt": 3}', '"prompt"'),
        ('{"prompt": "a", "negative_prompt": null}', '"negative_prompt"'),
        ('{"prompt": "a", "metadata": null}', '"metadata"'),
        ('{"prompt": "a", "metadata": [1]}', '"metadata"'),
    ],
)
def test_a_line_that_is_no_example_is_named_by_its_number(file, line, said):
    message = fault(file(f'{{"prompt": "a"}}\n\n{line}\n', "p.jsonl"))
    assert "line 3" in message and said in message


def test_tags_pick_their_prompts_and_an_unknown_one_is_refused():
    examples = [Example("a", metadata={"tag": "x"}), Example("b", metadata={"tag": "y"}), Example("c")]
    assert prompts.with_tags(examples, ["y"], "data.tags") == examples[1:2]
    with pytest.raises(ValueError, match=r"data\.tags: no prompt has the tag 'z'\. Tags of the file: x, y\."):
        prompts.with_tags(examples, ["x", "z"], "data.tags")


def test_pictures_to_edit_are_files_beside_the_prompt_file(file, tmp_path):
    for name in ("one.png", "two.png"):
        media.save_png(torch.rand(3, 4, 4), tmp_path / name)
    lines = [
        '{"prompt": "a", "image": "one.png"}',
        '{"prompt": "b", "image": ["one.png", "two.png"]}',
        '{"prompt": "c"}',
    ]
    examples, _ = prompts.read(file("\n".join(lines), "p.jsonl"), "data.train")
    one, two = (str(tmp_path / name) for name in ("one.png", "two.png"))
    assert [e.pictures for e in examples] == [(one,), (one, two), ()]
    assert examples[0].metadata == {"image": "one.png"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('"absent.png"', "absent.png': no such file"),
        ("3", '"image" has to be the name of a file'),
        ('"half.png"', "half.png' is no picture that can be read"),
        ('["one.png", "text.png"]', "text.png' is no picture that can be read"),
    ],
)
def test_a_picture_that_cannot_be_read_is_named_with_its_line(file, tmp_path, given, said):
    media.save_png(torch.rand(3, 64, 64), tmp_path / "one.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "one.png").read_bytes()[:3000])
    (tmp_path / "text.png").write_text("no picture")
    message = fault(file(f'{{"prompt": "a"}}\n{{"prompt": "b", "image": {given}}}', "p.jsonl"))
    assert "line 2" in message and said in message
