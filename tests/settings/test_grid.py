"""Grids to experiments: pairing, order, counts, filters, seeds, ids."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.settings.grid import Exclusion, Expansion, GridSpec, Inclusion, experiment_id, try_expand
from brim.settings.grid_pairing import GridGroup
from brim.settings.nested_keys import flatten
from brim.settings.problems import raise_errors

MODELS = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b", "mvit_v2_s", "swin3d_b", "swin3d_s", "swin3d_t")
SIZES = (128, 64, 128, 32, 16, 16, 16, 16, 16)
SEED = {"model.type": MODELS, "hp.batch_size": SIZES, "hp.learning_rate": (0.001,), "optimizer.name": ("adam",)}

KEYS = st.sampled_from(
    ["hp.learning_rate", "hp.epochs", "optimizer.name", "optimizer.params.weight_decay", "hp.frames"]
)
AXES = st.dictionaries(KEYS, st.lists(st.integers(1, 99), min_size=1, max_size=4, unique=True).map(tuple), max_size=4)
WORDS = st.lists(st.sampled_from(MODELS), min_size=1, max_size=6, unique=True).map(tuple)
NUMBERS = st.lists(st.integers(1, 512), min_size=1, max_size=6, unique=True).map(tuple)


def spec(axes: dict[str, tuple[Any, ...]], **options: Any) -> GridSpec:
    return GridSpec(groups=(GridGroup(axes=axes),), **options)


def expand(grid: GridSpec, **limits: int) -> Expansion:
    expansion, problems = try_expand(grid, **limits)
    raise_errors(problems)
    assert expansion is not None
    return expansion


def pairs(expansion: Any) -> list[tuple[Any, Any]]:
    return [(one.settings["model"]["type"], one.settings["hp"]["batch_size"]) for one in expansion]


def test_the_seeds_nine_models_are_paired_with_their_batch_sizes() -> None:
    expansion = expand(spec(SEED))
    assert pairs(expansion) == list(zip(MODELS, SIZES, strict=True))
    assert expansion.pairing.mode == "zip"
    assert expansion.pairing.keys == (("model.type", "hp.batch_size"),)
    assert "9 models and 9 batch sizes" in expansion.pairing.reason
    assert "counts are equal (pairing: auto)" in expansion.pairing.reason
    assert (expansion.total, expansion.product, expansion.problems) == (9, 81, ())
    assert expansion.experiments[0].settings == {
        "model": {"type": "r3d_18"},
        "hp": {"batch_size": 128, "learning_rate": 0.001},
        "optimizer": {"name": "adam"},
    }


def test_a_single_batch_size_goes_to_every_model() -> None:
    expansion = expand(spec({**SEED, "hp.batch_size": (128,)}))
    assert pairs(expansion) == [(model, 128) for model in MODELS]
    assert expansion.pairing.mode == "product"
    assert "all 9 models get the one batch size, 128" in expansion.pairing.reason


def test_an_automatic_batch_size_is_planned_for_every_model() -> None:
    expansion = expand(spec({**SEED, "hp.batch_size": ("auto",)}))
    assert pairs(expansion) == [(model, "auto") for model in MODELS]
    assert "a batch size is planned for each of the 9 models" in expansion.pairing.reason


def test_two_models_and_three_batch_sizes_are_crossed_with_a_warning() -> None:
    expansion = expand(spec({"model.type": ("r3d_18", "mc3_18"), "hp.batch_size": (64, 128, 256)}))
    assert pairs(expansion) == list(itertools.product(("r3d_18", "mc3_18"), (64, 128, 256)))
    assert [(problem.severity, problem.key) for problem in expansion.problems] == [("warning", "hp.batch_size")]
    assert "2 models and 3 batch sizes" in expansion.problems[0].message
    assert "counts differ" in expansion.pairing.reason


def test_the_first_three_come_in_order() -> None:
    expansion = expand(spec(SEED), max_experiments=3)
    assert pairs(expansion) == [("r3d_18", 128), ("mc3_18", 64), ("r2plus1d_18", 128)]
    assert expansion.total == 9


def test_pairing_can_be_asked_for_and_refused() -> None:
    two = {"model.type": ("a", "b"), "hp.batch_size": (1, 2)}
    assert pairs(expand(spec(two, pairing="zip"))) == [("a", 1), ("b", 2)]
    crossed = expand(spec(two, pairing="product"))
    assert pairs(crossed) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert crossed.problems == ()
    assert "because pairing is product" in crossed.pairing.reason
    with pytest.raises(RequestError, match="pairing is zip, and there are 2 models and 3 batch sizes"):
        expand(spec({**two, "hp.batch_size": (1, 2, 3)}, pairing="zip"))


def test_named_groups_pair_any_keys_and_take_over_from_the_rule() -> None:
    axes = {"hp.learning_rate": (1, 2), "model.type": ("a", "b"), "hp.frames": (8, 16), "hp.batch_size": (4, 5)}
    expansion = expand(spec(axes, zipped=(("model.type", "hp.frames"),)))
    assert [(one.varied["model.type"], one.varied["hp.frames"]) for one in expansion][::4] == [("a", 8), ("b", 16)]
    assert len(expansion) == 8  # batch sizes are crossed: the group has the model and does not name them
    assert expansion.pairing.reason == (
        "model.type and hp.frames go together (2 of each), as zip says. "
        "hp.batch_size is crossed with them, because zip does not name it."
    )
    with pytest.raises(RequestError, match=r"hp\.batch_size: pairing is zip, and zip names model\.type without it"):
        expand(spec(axes, zipped=(("model.type", "hp.frames"),), pairing="zip"))
    three = expand(spec(axes, zipped=(("model.type", "hp.batch_size", "hp.frames"),)))
    assert len(three) == 4
    assert {(one.varied["model.type"], one.varied["hp.batch_size"], one.varied["hp.frames"]) for one in three} == {
        ("a", 4, 8),
        ("b", 5, 16),
    }


def test_named_groups_leave_the_rule_to_the_other_keys() -> None:
    axes = {"model.type": ("a", "b"), "hp.batch_size": (4, 5), "hp.frames": (8, 16), "hp.size": (112, 224)}
    expansion = expand(spec(axes, zipped=(("hp.frames", "hp.size"),)))
    assert len(expansion) == 4
    assert expansion.pairing.keys == (("hp.frames", "hp.size"), ("model.type", "hp.batch_size"))


def test_a_paired_group_needs_equal_lengths_or_a_single_value() -> None:
    axes = {"model.type": ("a", "b"), "hp.frames": (8, 16, 32), "hp.size": (112,)}
    with pytest.raises(RequestError, match=r"different length \(model.type has 2, hp.frames has 3\)"):
        expand(spec(axes, zipped=(("model.type", "hp.frames"),)))
    assert len(expand(spec(axes, zipped=(("model.type", "hp.size"),)))) == 6


def test_the_model_changes_slowest_wherever_it_stands_in_the_file() -> None:
    expansion = expand(spec({"hp.learning_rate": (1, 2), "hp.batch_size": (8,), "model.type": ("a", "b")}))
    assert [(one.varied["model.type"], one.varied["hp.learning_rate"]) for one in expansion] == [
        ("a", 1), ("a", 2), ("b", 1), ("b", 2),
    ]  # fmt: skip


def test_models_are_filtered_after_pairing() -> None:
    expansion = expand(spec(SEED, models=("s3d", "mc3_18")))
    assert pairs(expansion) == [("mc3_18", 64), ("s3d", 32)]
    assert expansion.product == 18


def test_a_model_to_train_that_the_grid_does_not_have_is_warned_of() -> None:
    expansion = expand(spec(SEED, models=("s3d", "r3d")))
    assert [problem.message for problem in expansion.problems] == ["r3d: not in the grid"]
    with pytest.raises(RequestError, match="no experiment is left"):
        expand(spec(SEED, models=("r3d",)))


def test_exclusions_drop_what_matches_every_key_and_say_when_nothing_does() -> None:
    exclude = (
        Exclusion(values={"model.type": ("s3d", "r3d_18"), "hp.batch_size": (32,)}),
        Exclusion(values={"hp.batch_size": (16,)}),
        Exclusion(values={"hp.batch_size": (7,)}, line=4),
        Exclusion(values={"hp.epochs": (True,)}),
    )
    expansion = expand(spec({**SEED, "hp.epochs": (1,)}, exclude=exclude))
    assert pairs(expansion) == [("r3d_18", 128), ("mc3_18", 64), ("r2plus1d_18", 128)]
    assert [(problem.line, problem.message) for problem in expansion.problems] == [
        (4, "{hp.batch_size: 7} matches no experiment"),
        (None, "{hp.epochs: True} matches no experiment"),
    ]


def test_inclusions_are_added_over_the_shared_settings_and_not_excluded() -> None:
    include = (Inclusion(settings={"model.type": "s3d", "hp.batch_size": 8}), Inclusion(settings={"model.type": "x"}))
    expansion = expand(
        spec(
            {"model.type": ("s3d",), "hp.batch_size": (32,)},
            shared={"hp.epochs": 3},
            include=include,
            exclude=(Exclusion(values={"hp.batch_size": (8,)}),),
            models=("s3d",),
        )
    )
    assert [one.settings for one in expansion] == [
        {"hp": {"epochs": 3, "batch_size": 32}, "model": {"type": "s3d"}},
        {"hp": {"epochs": 3, "batch_size": 8}, "model": {"type": "s3d"}},
    ]


def test_an_experiment_that_comes_twice_is_run_once() -> None:
    include = (Inclusion(settings={"hp.batch_size": 8, "model.type": "s3d"}),)
    expansion = expand(spec({"model.type": ("s3d",), "hp.batch_size": (8,)}, include=include))
    assert len(expansion) == 1
    assert "1 experiment comes twice and is run once" in expansion.problems[0].message


def test_a_value_that_is_twice_in_a_crossed_list_is_taken_once() -> None:
    expansion = expand(spec({"model.type": ("a", "b"), "hp.batch_size": (8, 8, 16)}))
    assert pairs(expansion) == [("a", 8), ("a", 16), ("b", 8), ("b", 16)]
    assert [problem.message for problem in expansion.problems] == [
        "2 models and 3 batch sizes cannot be paired, so every model gets every batch size",
        "8 is there more than once and is taken once",
    ]
    assert expand(spec({"hp.epochs": (1, 1.0, True)})).total == 3  # one number, another, and a truth value


def test_seeds_multiply_and_change_fastest() -> None:
    axes = {"model.type": ("a", "b"), "hp.batch_size": (1, 2)}
    expansion = expand(spec(axes, seeds=(0, 7), include=(Inclusion(settings={"model.type": "c", "hp.seed": 3}),)))
    assert [(one.settings["model"]["type"], one.settings["hp"]["seed"]) for one in expansion] == [
        ("a", 0), ("a", 7), ("b", 0), ("b", 7), ("c", 3),
    ]  # fmt: skip


def test_lists_of_sections_set_several_keys_at_once() -> None:
    optimizers = ({"name": "adam"}, {"name": "sgd", "params.momentum": 0.9})
    expansion = expand(spec({"model.type": ("a",), "optimizer": optimizers}, shared={"optimizer.params.eps": 1}))
    assert [one.settings["optimizer"] for one in expansion] == [
        {"params": {"eps": 1}, "name": "adam"},
        {"params": {"eps": 1, "momentum": 0.9}, "name": "sgd"},
    ]


def test_named_groups_of_lists_pair_each_for_itself() -> None:
    groups = (
        GridGroup(name="light", axes={"model.type": ("a", "b"), "hp.batch_size": (64,)}),
        GridGroup(name="heavy", axes={"model.type": ("c", "d"), "hp.batch_size": (8, 4)}),
    )
    expansion = expand(GridSpec(groups=groups))
    assert pairs(expansion) == [("a", 64), ("b", 64), ("c", 8), ("d", 4)]
    assert [one.group for one in expansion] == ["light", "light", "heavy", "heavy"]
    assert [choice.mode for choice in expansion.pairings] == ["product", "zip"]
    assert expansion.pairing.mode == "zip"
    assert expansion.pairing.reason.startswith("light: Nothing to pair")


def test_a_named_group_of_keys_holds_for_every_group_that_has_them() -> None:
    groups = (
        GridGroup(name="one", axes={"model.type": ("a", "b"), "hp.frames": (8, 16)}),
        GridGroup(name="two", axes={"model.type": ("c", "d")}),
    )
    expansion = expand(GridSpec(groups=groups, zipped=(("model.type", "hp.frames"),)))
    assert [one.varied for one in expansion] == [
        {"model.type": "a", "hp.frames": 8},
        {"model.type": "b", "hp.frames": 16},
        {"model.type": "c"},
        {"model.type": "d"},
    ]


def test_no_lists_are_one_experiment() -> None:
    assert [one.settings for one in expand(spec({}, shared={"model.type": "a"}))] == [{"model": {"type": "a"}}]


def test_a_grid_of_a_million_is_refused_with_its_count_unless_asked_for() -> None:
    hundred = tuple(range(1, 101))
    million = spec({"hp.epochs": hundred, "hp.frames": hundred, "hp.size": hundred})
    with pytest.raises(RequestError, match=r"makes 1,000,000 experiments, more than 100,000.*max_experiments="):
        expand(million)
    few = expand(million, max_experiments=2)
    assert [one.settings["hp"] for one in few] == [
        {"epochs": 1, "frames": 1, "size": 1},
        {"epochs": 1, "frames": 1, "size": 2},
    ]
    assert few.total is None
    with pytest.raises(RequestError, match="makes 10,000 experiments, more than 9,999"):
        expand(spec({"hp.epochs": hundred, "hp.frames": hundred}), most=9_999)


def test_a_filter_that_drops_nearly_everything_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.settings.grid._MOST_COMBINATIONS", 1000)
    many = {"model.type": tuple(f"m{n}" for n in range(100)), "hp.epochs": tuple(range(100)), "hp.size": (1, 2)}
    expansion, problems = try_expand(spec(many, models=("other",)), max_experiments=1, most=1000)
    assert expansion is None
    assert "of the first 1,000 combinations only 0 are left" in problems[0].message


@given(WORDS, NUMBERS, AXES)
def test_a_paired_expansion_has_as_many_as_models_in_order_and_each_once(
    models: tuple[str, ...], sizes: tuple[int, ...], others: dict[str, tuple[int, ...]]
) -> None:
    count = min(len(models), len(sizes))
    models, sizes = models[:count], sizes[:count]
    expansion = expand(spec({**others, "model.type": models, "hp.batch_size": sizes}, pairing="zip"))
    rest = math.prod(len(values) for values in others.values())
    assert len(expansion) == count * rest
    assert pairs(expansion)[::rest] == list(zip(models, sizes, strict=True))
    assert set(pairs(expansion)) == set(zip(models, sizes, strict=True))
    assert len({one.id for one in expansion}) == len(expansion)
    assert len({str(one.settings) for one in expansion}) == len(expansion)


@given(WORDS, NUMBERS, AXES)
def test_a_product_has_every_combination_once_in_order(
    models: tuple[str, ...], sizes: tuple[int, ...], others: dict[str, tuple[int, ...]]
) -> None:
    axes = {"model.type": models, "hp.batch_size": sizes, **others}
    expansion = expand(spec(axes, pairing="product"))
    assert len(expansion) == expansion.product == math.prod(len(values) for values in axes.values())
    assert [tuple(one.varied[key] for key in axes) for one in expansion] == list(itertools.product(*axes.values()))


@given(AXES, st.integers(1, 20))
def test_the_first_few_are_a_beginning_of_all(axes: dict[str, tuple[int, ...]], count: int) -> None:
    whole = expand(spec(axes))
    lazily = expand(spec(axes), max_experiments=count, most=1)
    assert [one.id for one in lazily] == [one.id for one in whole][:count]
    assert [one.id for one in expand(spec(axes), max_experiments=count)] == [one.id for one in whole][:count]


@settings(max_examples=50)
@given(AXES, st.dictionaries(KEYS, st.integers(), max_size=3), st.randoms())
def test_ids_do_not_depend_on_the_order_of_keys_or_on_other_experiments(
    axes: dict[str, tuple[int, ...]], shared: dict[str, int], draw: Any
) -> None:
    whole = {one.id: one.settings for one in expand(spec(axes, shared=shared))}
    shuffled = draw.sample(list(axes.items()), len(axes))
    reordered = dict(draw.sample(list(shared.items()), len(shared)))
    assert {one.id: one.settings for one in expand(spec(dict(shuffled), shared=reordered))} == whole
    fewer = {key: values[:1] for key, values in axes.items()}
    assert all(whole[one.id] == one.settings for one in expand(spec(fewer, shared=shared)))


@given(AXES, st.integers(2, 9))
def test_another_shared_setting_makes_other_experiments(axes: dict[str, tuple[int, ...]], value: int) -> None:
    one = {each.id for each in expand(spec(axes, shared={"training.eval_every": 1}))}
    other = {each.id for each in expand(spec(axes, shared={"training.eval_every": value}))}
    assert not one & other


def test_ids_are_readable_safe_and_distinct() -> None:
    assert experiment_id({"model.type": "r3d_18", "hp.batch_size": 128, "hp.learning_rate": 1e-3}).startswith(
        "r3d_18-b128-lr0.001-"
    )
    assert experiment_id({"model.type": "hf:org/My Model", "hp.batch_size": "auto"}).startswith("My_Model-auto-")
    assert experiment_id({"model.type": "py:a/b.py:make", "hp.seed": 3}).startswith("make-s3-")
    assert experiment_id({}).startswith("run-")
    for model in ("../../etc", "a" * 500, "名前", "C:\\x\\", "::", "."):
        name = experiment_id({"model.type": model})
        assert "/" not in name
        assert "\\" not in name
        assert not name.startswith((".", "-"))
        assert len(name) < 64
    values = [1, 1.0, True, "1", None, [1], [[1]], {}]
    assert len({experiment_id({"model.params.x": value}) for value in values}) == len(values)


def test_naming_seed_0_makes_no_other_experiment() -> None:
    plain = {"model.type": "a"}
    assert experiment_id(plain) == experiment_id({**plain, "hp.seed": 0})
    assert experiment_id(plain) != experiment_id({**plain, "hp.seed": 1})
    once = expand(spec({"model.type": ("a", "b")}))
    thrice = expand(spec({"model.type": ("a", "b")}, seeds=(0, 1, 2)))
    assert {one.id for one in once} <= {one.id for one in thrice}


def test_an_id_never_changes() -> None:
    # Sweeps that were begun with an earlier version must be found again.
    flat = {"model.type": "r3d_18", "hp.batch_size": 128, "hp.learning_rate": 0.001, "optimizer.name": "adam"}
    assert experiment_id(flat) == "r3d_18-b128-lr0.001-f3327cdffd5b"


def test_json_holds_what_a_preview_needs() -> None:
    data = expand(spec(SEED), max_experiments=1).to_json()
    assert data["pairing"]["mode"] == "zip"
    assert data["warnings"] == []
    assert (data["total"], data["product"]) == (9, 81)
    assert list(data["experiments"][0]) == ["id", "group", "settings"]


def test_experiments_share_no_values() -> None:
    one, other = expand(spec({"model.type": ("a", "b")}, shared={"optimizer.params.betas": [0.9, 0.99]}))
    one.settings["optimizer"]["params"]["betas"].append(1)
    assert other.settings["optimizer"]["params"]["betas"] == [0.9, 0.99]
    assert flatten(other.settings) == other.flat
