"""Tokens of the text in this repository: a vocabulary that is learned from it, and a file of numbers to train on.

    python examples/tokens.py                           # docs/**/*.md and README.md, to out/tokens.bin
    python examples/tokens.py -o out/mine.bin --vocabulary 4096 mine/*.txt
    torchrun --nproc-per-node 4 examples/tokens.py      # the first process writes, and the others have nothing to do

Beside tokens.bin lies tokens.json, which says their type and number, and names tokens.vocabulary.json: a byte-level BPE
of the package `tokenizers` (pip install "sbpflow[train]"), in which every text can be written and read back exactly.
"""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import sbpflow as flow

HERE = Path(__file__).resolve().parent
END = "<|end|>"  # behind each text


def texts() -> list[Path]:
    """The pages of this repository; where they are not, as in what pip installs, the examples themselves."""
    pages = [HERE.parent / "README.md", *sorted((HERE.parent / "docs").rglob("*.md"))]
    return pages if pages[0].exists() else [*sorted(HERE.rglob("*.py")), *sorted(HERE.rglob("*.plan"))]


def package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise flow.MissingError('tokens need the package tokenizers\n  pip install "sbpflow[train]"') from error
    return tokenizers


def learned(written: Iterable[str], size: int) -> Any:
    """A vocabulary of so many pieces of these texts, in which every byte has one."""
    of = package()
    made = of.Tokenizer(of.models.BPE())
    made.pre_tokenizer = of.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = of.decoders.ByteLevel()
    alphabet = of.pre_tokenizers.ByteLevel.alphabet()
    trainer = of.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(written, trainer)
    return made


def make(path: Path, paths: Iterable[Path], size: int) -> flow.data.TokenFile:
    """The file of tokens, with its vocabulary beside it."""
    written = [each.read_text(encoding="utf-8") for each in paths]
    vocabulary = learned(written, size)
    tokens = [token for text in written for token in [*vocabulary.encode(text).ids, vocabulary.token_to_id(END)]]
    path.parent.mkdir(parents=True, exist_ok=True)
    names = path.with_suffix(".vocabulary.json")
    vocabulary.save(str(names))
    facts = {"vocabulary": names.name, "size": vocabulary.get_vocab_size(), "letters": sum(map(len, written))}
    return flow.data.TokenFile.write(path, np.array(tokens), 64, **facts)


def vocabulary_of(data: flow.data.TokenFile) -> Any:
    """The vocabulary beside a file of tokens: `.encode(text).ids`, and `.decode(ids)`."""
    return package().Tokenizer.from_file(str(data.path.with_name(data.facts["vocabulary"])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="texts; those of this repository if none are given")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/tokens.bin"))
    parser.add_argument("--vocabulary", type=int, default=1024, help="pieces, at least 257")
    parser.add_argument("--check", action="store_true", help="also write all texts in tokens, and read them back")
    given = parser.parse_args()
    if os.environ.get("RANK", "0") == "0":
        paths = given.paths or texts()
        data = make(given.output, paths, given.vocabulary)
        facts = data.facts
        each = facts["letters"] / facts["tokens"]
        print(f"{facts['tokens']} tokens of {facts['letters']} letters, {each:.2f} each, in {given.output}")
        if given.check:
            names = vocabulary_of(data)
            assert all(names.decode(names.encode(text.read_text()).ids) == text.read_text() for text in paths)
            print("read back exactly")
