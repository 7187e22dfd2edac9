from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from brim.errors import RequestError
from brim.metrics.ood_detection import auroc
from brim.molecules.baselines import baseline, class_labels
from brim.molecules.data_sets import PARTS, FeatureSet, Part
from brim.molecules.heads import Classifier, ClassifierSettings, train_classifiers
from brim.settings.molecule_settings import BASELINES

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

SETTINGS = ClassifierSettings(hidden=(16,), epochs=12, batch_size=64, lr=1e-2)
CPU = torch.device("cpu")


def blobs(*, labels: bool = True, rows: int = 120) -> FeatureSet:
    """In: two tight blobs. Out: a third one, between and off them."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[4.0, 0, 0, 0], [0, 4.0, 0, 0]])
    features: dict[Part, torch.Tensor] = {}
    classes: dict[Part, list[int]] = {}
    for part in PARTS:
        count = rows if part.startswith("train") else rows // 2
        noise = 0.5 * torch.randn(count, 4, generator=generator)
        which = torch.arange(count) % 2
        features[part] = noise + (centres[which] if part.endswith("_in") else torch.tensor([2.0, 2.0, 3.0, 0.0]))
        classes[part] = which.tolist()
    ids = {part: [f"{part}-{row}" for row in range(len(features[part]))] for part in PARTS}
    return FeatureSet(name="blobs", encoder="features", features=features, ids=ids, labels=classes if labels else None)


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    (found,) = train_classifiers(blobs(), class_labels(blobs()), [3], SETTINGS, device=CPU)
    return found


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_finds_rows_that_lie_apart(name: str, classifier: Classifier) -> None:
    features = blobs()
    detector = baseline(name)
    detector.fit(features, classifier if detector.uses_classifier else None)
    inner, outer = (detector.scores(features.features[part]) for part in ("test_in", "test_out"))
    assert inner.shape == (60,)
    assert np.isfinite(inner).all()
    assert auroc(inner, outer) > 0.9


def test_classifiers_learn_the_labels_and_differ_by_seed() -> None:
    first, second = train_classifiers(blobs(), class_labels(blobs()), [0, 1], SETTINGS, device=CPU)
    assert min(first.accuracy, second.accuracy) > 0.95
    assert class_labels(blobs()).origin == "labels"
    assert not first.module.training
    rows = blobs().features["test_in"]
    assert not torch.equal(first.module(rows), second.module(rows))


def test_without_labels_the_classes_are_clusters_of_in_distribution_rows() -> None:
    (found,) = train_classifiers(blobs(labels=False), class_labels(blobs(labels=False)), [0], SETTINGS, device=CPU)
    assert class_labels(blobs(labels=False)).origin == "10 clusters"
    last = [part for part in found.module.modules() if isinstance(part, nn.Linear)][-1]
    assert last.out_features == 10


def test_labels_that_are_measurements_are_not_classes() -> None:
    features = blobs()
    values = {part: [0.1 * row for row in range(len(features.features[part]))] for part in PARTS}
    features = FeatureSet(
        name="x", encoder="features", features=features.features, ids=features.ids, labels=values
    )  # fmt: skip
    assert class_labels(features).origin == "10 clusters"


def test_msp_energy_and_odin_are_what_their_papers_say(classifier: Classifier) -> None:
    features = blobs()
    rows = features.features["test_out"]
    logits = classifier.module(rows).detach().double()

    def scores(name: str) -> np.ndarray:
        detector = baseline(name)
        detector.fit(features, classifier)
        return detector.scores(rows)

    np.testing.assert_allclose(scores("msp"), 1 - logits.softmax(-1).amax(-1).numpy())
    np.testing.assert_allclose(scores("energy"), -logits.exp().sum(-1).log().numpy())
    plain = 1 - (logits / 1000).softmax(-1).amax(-1).numpy()
    assert (scores("odin") <= plain + 1e-12).all()  # the step makes the classifier surer


def test_mc_dropout_is_repeatable_and_restores_classifier_and_generator(
    classifier: Classifier,
) -> None:
    detector = baseline("mc_dropout")
    detector.fit(blobs(), classifier)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rows = blobs().features["test_in"]
    first, second = detector.scores(rows), detector.scores(rows)
    assert np.array_equal(first, second)
    assert torch.equal(before, torch.get_rng_state())
    assert not any(part.training for part in classifier.module.modules())


def test_mahalanobis_is_the_distance_to_the_nearest_class() -> None:
    features = blobs(rows=4000)
    detector = baseline("mahalanobis")
    detector.fit(features, None)
    scores = detector.scores(torch.tensor([[4.0, 0, 0, 0], [0, 4.0, 0, 0], [4.0, 0, 1.0, 0]]))
    np.testing.assert_allclose(scores, [0, 0, 1 / 0.25], atol=0.3)  # one unit is two deviations


def test_knn_counts_no_more_neighbours_than_there_are() -> None:
    detector = baseline("knn")
    detector.fit(blobs(rows=8), None)
    assert detector.scores(blobs().features["test_in"]).shape == (60,)


def test_an_unknown_baseline_names_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"--baselines knm.*did you mean knn"):
        baseline("knm")
