"""Encoded texts: each once per run in host memory, and once for all runs where a folder is given."""

import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    near:   entered once around all texts that a call encodes
    """

    def __init__(
        self,
        encode: Callable[[Key], Text],
        folder: Path | None = None,
        near: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self._encode, self._folder, self._near = encode, folder, near
        self._texts: dict[Key, Text] = {}

    def items(self):
        """(key, text) of those in memory."""
        return self._texts.items()

    def get(self, keys: Sequence[Key]) -> list[Text]:
        """The texts of keys, encoded where they are new; beyond CACHE_BYTES only these stay in memory."""
        if sum(x.nbytes for text in self._texts.values() for x in text.values()) > CACHE_BYTES:
            wanted = set(keys)
            self._texts = {key: text for key, text in self._texts.items() if key in wanted}
        files = {key: self._file(key) for key in dict.fromkeys(keys) if key not in self._texts}
        stored = {key for key, file in files.items() if file is not None and file.is_file()}
        self._texts |= {key: load_file(files[key]) for key in stored}
        if files.keys() - stored:
            with self._near():
                for key in (key for key in files if key not in stored):
                    self._texts[key] = {name: x.cpu().contiguous() for name, x in self._encode(key).items()}
                    self._store(self._texts[key], files[key])
        return [self._texts[key] for key in keys]

    def _file(self, key):
        return None if self._folder is None else self._folder / f"{_name(key)}.safetensors"

    def _store(self, text, file):
        if file is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            written = file.with_suffix(f".{uuid.uuid4().hex}.part")  # complete or absent, whoever writes beside us
            save_file(text, written)
            written.replace(file)


def _name(key):
    text, pictures, negative = key
    digests = [hashlib.sha256(Path(picture).read_bytes()).hexdigest() for picture in pictures]
    return hashlib.sha256(json.dumps([text, digests, negative]).encode()).hexdigest()
