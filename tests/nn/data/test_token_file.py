"""Tokens in a file: written and mapped, in stretches, of which any part can be had alone."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from sbpflow.nn.data import TokenFile
from sbpflow.placement.errors import FileError, SbpError


def test_samples_are_stretches_and_what_follows(tmp_path: Path) -> None:
    made = TokenFile.write(tmp_path / "a.bin", np.arange(23), 5, vocabulary=30)
    assert (len(made), made.facts["dtype"], made.facts["vocabulary"]) == (4, "uint16", 30)
    text, following = made[3]
    assert text.tolist() == [15, 16, 17, 18, 19]
    assert following.tolist() == [16, 17, 18, 19, 20]
    assert [x.tolist() for x in made.part(1, 2, 4)] == [[7, 8], [8, 9]]
    assert torch.equal(pickle.loads(pickle.dumps(made))[0][0], made[0][0])
    with pytest.raises(IndexError):
        made[4]


def test_shares_of_a_file_have_no_sample_in_common(tmp_path: Path) -> None:
    TokenFile.write(tmp_path / "a.bin", np.arange(100) + (1 << 16), 5)
    train, rest = (TokenFile(tmp_path / "a.bin", 5, share=share) for share in ((0.0, 0.8), (0.8, 1.0)))
    assert train.facts["dtype"] == "uint32"
    assert max(x.max() for x, _ in map(train.__getitem__, range(len(train)))) < rest[0][0].min()


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"examples/tokens.py makes them"):
        TokenFile(tmp_path / "none.bin", 5)
    made = TokenFile.write(tmp_path / "a.bin", np.arange(23), 5)
    with pytest.raises(SbpError, match="give it a length below 23"):
        TokenFile(made.path, 30)
    with pytest.raises(SbpError, match="share"):
        TokenFile(made.path, 5, share=(0.5, 0.2))
    with pytest.raises(SbpError, match="whole numbers"):
        TokenFile.write(tmp_path / "b.bin", np.array([1.5]), 1)
    made.path.write_bytes(b"12345")
    with pytest.raises(FileError, match=r"has 5 bytes, and a\.json says 23 tokens"):
        TokenFile(made.path, 5)
