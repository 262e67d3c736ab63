"""A recording holds as long as all settings that it has are what they were; rates on the card are read there."""

import torch
from torch import nn

from sbpflow.nn.graph.run.card_rates import CardRates


def test_a_rate_of_the_host_that_is_written_to_is_another() -> None:
    rate = torch.tensor(0.1)
    (group,) = (optimizer := torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=rate)).param_groups
    rates = CardRates([optimizer], torch.device("cpu"))
    assert rates.same()
    group["lr"] = torch.tensor(0.1)
    assert rates.same()
    group["lr"].fill_(0.5)
    assert not rates.same()
