"""Encoded texts: each once per run in host memory, and once for all runs where a folder is given."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from flowrl.visual.pipelines.family import Text

CACHE_BYTES = 2**32  # in host memory; about 2,500 prompts of SD3 with 128 T5 tokens
Key = tuple[str, tuple[str, ...], bool]  # a text, the files of its pictures, whether it is negative


class Texts:
    """Encoded texts by key, on the CPU.

    encode: a key -> its text. One by one: in a batch, the last bits of an embedding depend on its neighbours, and so
            on the run's past
    folder: where they are kept for good; its name has to tell one encoder and its settings from another
    """

    def __init__(self, encode: Callable[[Key], Text], folder: Path | None = None):
        self._encode, self._folder = encode, folder
        self._texts: dict[Key, Text] = {}

    def items(self):
        """(key, text) of those in memory."""
        return self._texts.items()

    def get(self, keys: Sequence[Key]) -> list[Text]:
        """The texts of keys, encoded where they are new; beyond CACHE_BYTES only these stay in memory."""
        if sum(x.nbytes for text in self._texts.values() for x in text.values()) > CACHE_BYTES:
            self._texts = {key: text for key, text in self._texts.items() if key in set(keys)}
        for key in dict.fromkeys(keys):
            if key not in self._texts:
                self._texts[key] = self._read(key)
        return [self._texts[key] for key in keys]

    def _read(self, key):
        if self._folder is None:
            return {name: x.cpu() for name, x in self._encode(key).items()}
        file = self._folder / f"{_name(key)}.safetensors"
        if not file.is_file():
            self._folder.mkdir(parents=True, exist_ok=True)
            written = file.with_suffix(f".{id(self)}.part")  # complete or absent, whoever writes beside us
            save_file({name: x.cpu().contiguous() for name, x in self._encode(key).items()}, written)
            written.replace(file)
        return load_file(file)


def _name(key):
    text, pictures, negative = key
    digests = [hashlib.sha256(Path(picture).read_bytes()).hexdigest() for picture in pictures]
    return hashlib.sha256(json.dumps([text, digests, negative]).encode()).hexdigest()
