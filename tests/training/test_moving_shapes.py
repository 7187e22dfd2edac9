"""The built-in data set: reproducible, with classes that can be learnt."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from brim.errors import RequestError
from brim.training.moving_shapes import DIRECTIONS, SHAPES, MovingShapes, shape_class_names


def test_items_are_reproducible_and_distinct() -> None:
    shapes = MovingShapes(8, classes=4, frames=4, size=24)
    assert torch.equal(shapes.prepare(3), shapes.prepare(3))
    assert not torch.equal(shapes.prepare(3), shapes.prepare(7))  # the same class, another clip
    assert shapes.prepare(0).shape == (3, 4, 24, 24)
    assert MovingShapes(8, classes=8, frames=None, size=24).prepare(0).shape == (3, 24, 24)


def test_directions_differ_in_motion_but_not_in_position() -> None:
    """The centre of a shape over many clips: the same in the middle frame, different in its movement."""
    shapes = MovingShapes(200, classes=4, frames=5, size=32, noise=0.0)
    rows = torch.arange(32.0)[:, None].expand(32, 32)
    columns = rows.T
    middles: dict[int, list[torch.Tensor]] = {}
    moves: dict[int, list[torch.Tensor]] = {}
    for item in range(200):
        clip = shapes.prepare(item).sum(dim=0)  # [frames, size, size]
        bright = (clip > (clip.max() + clip.min()) / 2).float()
        total = bright.sum(dim=(1, 2))
        centres = torch.stack([(bright * rows).sum((1, 2)), (bright * columns).sum((1, 2))], dim=1) / total[:, None]
        middles.setdefault(item % 4, []).append(centres[2])
        moves.setdefault(item % 4, []).append(centres[-1] - centres[0])
    for number, direction in enumerate(DIRECTIONS.values()):
        moved = torch.stack(moves[number])
        along = moved @ torch.tensor(direction)
        assert (along > 4).all()  # every clip moves in its direction
        middle = torch.stack(middles[number]).mean(dim=0)
        assert (middle - 15.5).abs().max() < 2.5  # and its middle frame is centred for all directions


def test_class_names_and_the_largest_number_of_classes() -> None:
    assert shape_class_names(5, video=True)[:5] == (
        "square left", "square right", "square up", "square down", "disc left",
    )  # fmt: skip
    assert shape_class_names(len(SHAPES), video=False) == tuple(SHAPES)
    with pytest.raises(RequestError, match="2 to 8 classes"):
        shape_class_names(9, video=False)


def test_a_small_net_learns_the_classes_of_pictures() -> None:
    torch.manual_seed(0)
    shapes = MovingShapes(256, classes=4, frames=None, size=24)
    inputs = torch.stack([shapes.prepare(item) for item in range(256)])
    net = nn.Sequential(
        nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), nn.ReLU(), nn.AdaptiveMaxPool2d(1),
        nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), shapes.labels).backward()  # type: ignore[arg-type]
        optimizer.step()
    fresh = MovingShapes(128, classes=4, frames=None, size=24, seed=9)
    unseen = torch.stack([fresh.prepare(item) for item in range(128)])
    assert (net(unseen).argmax(dim=1) == fresh.labels).float().mean() > 0.6  # by chance: a quarter
