"""Logprobs, entropies and values equal those of the model's whole logits table, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megloom.compute.trainers.critic import make_value_head
from megloom.compute.trainers.heads import read_out
from megloom.compute.trainers.model import load_model, write_model
from megloom.compute.trainers.passes import collate, cut

from .builders import model, row

CPU = torch.device("cpu")
ROWS = [row(seed, num_sampled=2 + seed, temperature=t) for seed, t in enumerate((1.0, 0.7, 1.5))]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    write_model(model(), folder, seed=3, cache_dir=None)
    return load_model(folder, CPU)


def table(network: Any, one: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of a row's trainable tokens: log-distributions, hidden states, ids."""
    ids = torch.tensor(one.token_ids[None].astype(np.int64))
    where = torch.from_numpy(np.flatnonzero(one.loss_mask))
    with torch.no_grad():
        output = network(input_ids=ids, output_hidden_states=True)
    logits = output.logits[0, where - 1].double() / one.temperature
    return torch.log_softmax(logits, -1), output.hidden_states[-1][0, where - 1], ids[0, where]


@pytest.mark.parametrize("packing", [False, True])
def test_readouts_equal_the_whole_table(network: Any, packing: bool) -> None:
    value_head = make_value_head(network, CPU)
    torch.nn.init.normal_(value_head.weight)
    torch.nn.init.normal_(value_head.bias)
    expected = {one.sample_id: table(network, one) for one in ROWS}
    seen = 0
    for part in cut(ROWS, 1000, packing=packing):
        batch = collate(part, CPU)
        with torch.no_grad():
            readout = read_out(network, batch, value_head=value_head, with_entropy=True)
        assert readout.entropies_N is not None and readout.values_N is not None
        for number, sample_id in enumerate(batch.sample_ids):
            mine = batch.rows_N == number
            logs, hidden, ids = expected[sample_id]
            entropies = -(logs.exp() * logs).sum(-1)
            logprobs = logs.gather(1, ids[:, None])[:, 0]
            values = value_head(hidden).detach().squeeze(-1)
            assert readout.logprobs_N[mine].tolist() == pytest.approx(logprobs.tolist(), abs=1e-5)
            assert readout.entropies_N[mine].tolist() == pytest.approx(entropies.tolist(), abs=1e-5)
            assert readout.values_N[mine].tolist() == pytest.approx(values.tolist(), abs=1e-5)
            seen += int(mine.sum())
    assert seen == sum(int(one.loss_mask.sum()) for one in ROWS)


def test_what_was_not_asked_for_is_not_measured(network: Any) -> None:
    readout = read_out(network, collate(ROWS, CPU))
    assert readout.entropies_N is None and readout.values_N is None


def test_the_entropy_of_a_certain_token_is_zero_and_its_gradient_finite(network: Any) -> None:
    one = row(1, temperature=1e-3)  # all probabilities but one are zero in float32
    readout = read_out(network, collate([one], CPU), with_entropy=True)
    assert readout.entropies_N is not None
    assert readout.entropies_N.abs().max() < 1e-3
    readout.entropies_N.sum().backward()
    gradients = [value.grad for value in network.parameters() if value.grad is not None]
    assert gradients and all(bool(value.isfinite().all()) for value in gradients)
    network.zero_grad(set_to_none=True)
