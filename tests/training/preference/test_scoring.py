from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from brim.metrics.ood_detection import auroc
from brim.training.preference.scoring import stacked_auroc

scores = st.lists(st.sampled_from([-2.0, 0.0, 0.25, 1.0]), min_size=2, max_size=20)


@given(scores, scores)
def test_auroc_of_a_stack_equals_the_metric_of_each_run(inner: list[float], outer: list[float]) -> None:
    stacked = stacked_auroc(torch.tensor([inner, inner[::-1]]), torch.tensor([outer, outer]))
    assert stacked == [auroc(inner, outer), auroc(inner, outer)]


def test_a_run_with_an_energy_that_is_no_number_has_no_auroc() -> None:
    inner = torch.tensor([[0.0, 1.0], [0.0, math.nan]])
    good, bad = stacked_auroc(inner, torch.ones(2, 3))
    assert good == 0.75
    assert math.isnan(bad)
