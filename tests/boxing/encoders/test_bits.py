"""Signs and their levels."""

import torch

from sbpflow.boxing.encoders.bits import SignEncoder


def test_with_rows_a_vector_is_one_row_of_two_levels() -> None:
    encoder, value = SignEncoder(rows=True), torch.tensor([1.0, -3.0, 2.0, -1.0, 0.0])
    payload = encoder.encode(value)
    assert payload[1].tolist() == [[1.0], [-2.0]]
    assert encoder.decode(payload, value).tolist() == [1.0, -2.0, 1.0, -2.0, 1.0]
    assert encoder.encode(value[:0])[1].tolist() == [[0.0], [0.0]]


def test_with_rows_each_row_of_a_matrix_has_its_own() -> None:
    encoder, value = SignEncoder(rows=True), torch.tensor([[1.0, 3.0], [-1.0, 5.0]])
    assert encoder.decode(encoder.encode(value), value).tolist() == [[2.0, 2.0], [-1.0, 5.0]]
