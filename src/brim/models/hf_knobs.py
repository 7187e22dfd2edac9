"""The knobs of transformers' models, one `HfKnob` each in `TABLE`.

An `HfKnob` declares which models have the knob, its default and range, and what a value does: some become options of
every call of the processor, some change the processor and the model once, after loading. Loads nothing and does not
import transformers: models, processors and configurations are read by attribute.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from brim.errors import RequestError
from brim.settings.caller import pair
from brim.workloads.knobs import Knob, check_knobs

if TYPE_CHECKING:
    from brim.models.hf_models import Kind

__all__ = [
    "NOT_OF_IMAGES",
    "TABLE",
    "ChosenKnobs",
    "HfKnob",
    "KnobParts",
    "apply_knobs",
    "can_change_to",
    "choose_knobs",
    "effective_option",
    "list_knobs",
]  # fmt: skip

_EXPERTS_CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")
_EXPERTS_IN_ALL = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_SHAPED_BY_EXPERTS = ("jetmoe",)  # its attention heads are experts, too
_NEW_TOKENS = 256
_LARGEST_EDGE = 4096  # Idefics3 scales every image down to it


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnobParts:
    """The parts of a model that knobs read and change; only vision-language models have a processor."""

    config: Any
    kind: Kind
    positions: int | None = None
    processor: Any = None
    module: Any = None

    @property
    def images(self) -> Any:
        """The image processor."""
        return getattr(self.processor, "image_processor", None)

    @property
    def text_config(self) -> Any:
        """The configuration of the text decoder."""
        return self.config.get_text_config(decoder=True)


@dataclasses.dataclass(frozen=True)
class Range:
    """The default of a knob and its range."""

    default: int
    minimum: int
    maximum: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfKnob:
    """One knob. `of` names the image processors that have it; without, `read` decides by the configuration."""

    name: str
    help: str
    read: Callable[[KnobParts], Range | None]
    of: tuple[str, ...] = ()
    options: Callable[[int], dict[str, Any]] | None = None  # of every call of the processor
    apply: Callable[[KnobParts, int], None] | None = None  # after loading
    again: bool = False  # whether it can be changed again later, up or down

    def knob(self, parts: KnobParts) -> Knob | None:
        """The knob as this model has it, or None."""
        if self.of and not _class_names(parts.images) & set(self.of):
            return None
        found = self.read(parts)
        if found is None:
            return None
        return Knob(name=self.name, default=found.default, help=self.help, minimum=found.minimum, maximum=found.maximum)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenKnobs:
    """The values of the knobs that were asked for, and the options of every call of the processor that follow."""

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    processor_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def list_knobs(parts: KnobParts) -> tuple[Knob, ...]:
    """The knobs of a model, in the table's order."""
    return tuple(knob for entry in TABLE if (knob := entry.knob(parts)) is not None)


def choose_knobs(asked: Mapping[str, Any], parts: KnobParts, *, owner: str) -> ChosenKnobs:
    """The knobs that were asked for, checked. An option of the image processor itself is passed on unchanged."""
    known = list_knobs(parts)
    own = _image_options(parts.images) - {knob.name for knob in known}
    plain = {name: _plain_value(value) for name, value in asked.items() if name in own}
    named = {name: value for name, value in asked.items() if name not in own}
    checked = check_knobs(named, known, owner=owner)
    values = {name: checked[name] for name in named}
    options: dict[str, Any] = {}
    for entry in TABLE:
        if entry.options is not None and entry.name in values:
            options |= entry.options(values[entry.name])
    return ChosenKnobs(values=values, processor_options={**plain, **options})


def apply_knobs(values: Mapping[str, Any], parts: KnobParts) -> None:
    """Apply the values to processor and model."""
    for entry in TABLE:
        if entry.apply is not None and entry.name in values:
            entry.apply(parts, values[entry.name])


def can_change_to(before: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether a model with the knobs `before` can be changed to these, parsed or not, without loading it again."""
    changed = {name for name in {*before, *values} if str(before.get(name)) != str(values.get(name))}
    turned = {entry.name: entry for entry in TABLE if entry.apply is not None}
    return all(turned[name].again and name in values for name in changed if name in turned)


def effective_option(processor: Any, name: str) -> Any:
    """The default of an option in a call of the processor: its class's default, else the image processor's."""
    defaults = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", {}).get("images_kwargs", {})
    return defaults[name] if name in defaults else getattr(processor.image_processor, name, None)


def _class_names(images: Any) -> set[str]:
    """`GotOcr2ImageProcessor` also for its variants `…Pil` and `…Fast`."""
    return {kind.__name__.removesuffix("Pil").removesuffix("Fast") for kind in type(images).__mro__}


def _image_options(images: Any) -> set[str]:
    accepted = getattr(getattr(images, "valid_kwargs", None), "__annotations__", {})
    return set(accepted) - {"return_tensors"}


def _plain_value(text: Any) -> Any:
    """`3`, `0.5` and `true` of the command line as number or bool; any other text unchanged."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


# ------------------------------------------------------------------------------------------ images


def _read_max_patches(parts: KnobParts) -> Range:
    """Without cropping there is one patch: the whole image."""
    cropped = effective_option(parts.processor, "crop_to_patches")
    return Range(effective_option(parts.processor, "max_patches") if cropped else 1, 1)


def _tile_side(images: Any) -> int:
    """The side of LLaVA-NeXT's tiles in pixels, chosen as the image processor chooses it."""
    crop, size = images.crop_size, images.size
    return int((crop and crop["height"]) or size.get("height") or size["shortest_edge"])


def _tiles(resolution: Sequence[int], side: int) -> int:
    height, width = resolution
    return math.ceil(height / side) * math.ceil(width / side)


def _read_max_tiles(parts: KnobParts) -> Range:
    side = _tile_side(parts.images)
    counts = [_tiles(resolution, side) for resolution in parts.images.image_grid_pinpoints]
    return Range(max(counts), min(counts), max(counts))


def _apply_max_tiles(parts: KnobParts, most: int) -> None:
    """The processor counts tokens by the grids of its image processor, the model by those of its configuration."""
    side = _tile_side(parts.images)
    grids = [list(one) for one in parts.images.image_grid_pinpoints if _tiles(one, side) <= most]
    parts.images.image_grid_pinpoints = grids
    for config in _configs(parts):
        if hasattr(config, "image_grid_pinpoints"):
            config.image_grid_pinpoints = grids


def _apply_max_pixels(parts: KnobParts, most: int) -> None:
    """In the image processor's `size`: as an option of a call it is deprecated, and token counts ignore it."""
    size = parts.images.size
    parts.images.size = type(size)(**{**dict(size), "longest_edge": most})


def _read_pan_and_scan(parts: KnobParts) -> Range:
    on = effective_option(parts.processor, "do_pan_and_scan")
    return Range(effective_option(parts.processor, "pan_and_scan_max_num_crops") if on else 0, 0)


def _pan_and_scan_options(most: int) -> dict[str, Any]:
    return {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": most} if most else {"do_pan_and_scan": False}


def _apply_max_image_tiles(parts: KnobParts, most: int) -> None:
    """Mllama has a learned embedding for every shape of the grid and place in it: those that remain are kept."""
    parts.images.max_image_tiles = most
    vision = parts.module.config.vision_config
    old, tiles = [tuple(shape) for shape in vision.supported_aspect_ratios], vision.max_num_tiles
    # In the image processor's order, from which the shapes' ids come; id 0 is for no image.
    shapes = [(a, b) for a in range(1, most + 1) for b in range(1, most + 1) if a * b <= most]
    rows = [0, *(old.index(shape) + 1 for shape in shapes)]
    for module in parts.module.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Embedding) and hasattr(module, "max_aspect_ratio_id"):
                setattr(module, name, _kept_tiles(child, rows, tiles, most))
        if hasattr(module, "max_num_tiles"):
            module.max_num_tiles = most
        if hasattr(module, "max_aspect_ratio_id"):
            module.max_aspect_ratio_id = len(shapes)
    vision.supported_aspect_ratios = [list(shape) for shape in shapes]
    vision.max_num_tiles = most


def _kept_tiles(embedding: nn.Embedding, rows: list[int], tiles: int, most: int) -> nn.Embedding:
    weight = embedding.weight.detach()
    kept = weight.view(weight.shape[0], tiles, -1)[rows, :most]  # [shapes, tiles, features]
    smaller: nn.Embedding = nn.Embedding.from_pretrained(kept.reshape(len(rows), -1), freeze=False)
    return smaller


# ------------------------------------------------------------------------------------------ any model


def _read_new_tokens(parts: KnobParts) -> Range | None:
    if parts.kind not in ("causal", "seq2seq", "vision_language"):
        return None
    return Range(_NEW_TOKENS, 1, parts.positions)


def _count(config: Any, names: tuple[str, ...]) -> tuple[str, int] | None:
    """The first of these attributes that is a number."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return name, value
    return None


def _read_experts(parts: KnobParts) -> Range | None:
    config = parts.text_config
    chosen, experts = _count(config, _EXPERTS_CHOSEN), _count(config, _EXPERTS_IN_ALL)
    if chosen is None or experts is None or config.model_type in _SHAPED_BY_EXPERTS:
        return None
    return Range(chosen[1], 1, experts[1]) if 1 <= chosen[1] <= experts[1] and experts[1] > 1 else None


def _apply_experts(parts: KnobParts, number: int) -> None:
    """Routers copy the number when they are built: both places must change."""
    found = _count(parts.text_config, _EXPERTS_CHOSEN)
    assert found is not None
    attribute, before = found
    if number == before:
        return
    routers = 0
    for module in parts.module.modules():
        for name in {"top_k", *_EXPERTS_CHOSEN} & vars(module).keys():
            if vars(module)[name] == before:
                setattr(module, name, number)
                routers += 1
    for config in _configs(parts):
        if getattr(config, attribute, None) == before:
            setattr(config, attribute, number)
    if not routers:
        raise RequestError(
            f"{pair('knob', 'experts_per_token', number)}: {type(parts.module).__name__} has no routers to change; "
            "leave it out"
        )


def _read_layers(parts: KnobParts) -> Range | None:
    if parts.kind not in ("causal", "vision_language"):
        return None
    found = _count(parts.text_config, ("num_hidden_layers",))
    return None if found is None or found[1] < 1 else Range(found[1], 1, found[1])


def _apply_layers(parts: KnobParts, number: int) -> None:
    """Keep the first layers; remove the rest, with its weights and its entries in the configuration."""
    before = parts.text_config.num_hidden_layers
    if number == before:
        return
    decoder = parts.module.get_decoder()
    stacks = [(owner, name, stack) for owner, name, stack in _module_lists(decoder) if len(stack) == before]
    if not stacks:
        raise RequestError(
            f"{pair('knob', 'layers', number)}: {type(parts.module).__name__} has no list of {before} layers to cut; "
            "leave it out"
        )
    for owner, name, stack in stacks:
        setattr(owner, name, stack[:number])
    text_config = parts.module.config.get_text_config(decoder=True)
    for config in (text_config,) if decoder.config is text_config else (text_config, decoder.config):
        for name, value in list(vars(config).items()):
            if "layer" in name and isinstance(value, list) and len(value) == before:
                setattr(config, name, value[:number])
        config.num_hidden_layers = number


def _module_lists(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    """Every list of modules that is not inside another one."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield module, name, child
        else:
            yield from _module_lists(child)


def _configs(parts: KnobParts) -> list[Any]:
    """Every configuration that the model's modules refer to, and the text configurations inside them."""
    held = [parts.config, *(vars(module)["config"] for module in parts.module.modules() if "config" in vars(module))]
    found = {id(config): config for config in held}
    for config in list(found.values()):
        text = config.get_text_config(decoder=True)
        found[id(text)] = text
    return list(found.values())


# ------------------------------------------------------------------------------------------ the table

TABLE: tuple[HfKnob, ...] = (
    HfKnob(
        name="max_crops",
        help="most crops of an image, beside the whole",
        of=("Molmo2ImageProcessor",),
        read=lambda parts: Range(effective_option(parts.processor, "max_crops"), 1),
        options=lambda value: {"max_crops": value},
    ),
    HfKnob(
        name="max_patches",
        help="most patches that an image is cut into",
        of=("GotOcr2ImageProcessor",),  # InternVL's, too
        read=_read_max_patches,
        options=lambda value: {"max_patches": value, "crop_to_patches": True},
    ),
    HfKnob(
        name="max_tiles",
        help="grids of at most so many tiles",
        of=("LlavaNextImageProcessor",),
        read=_read_max_tiles,
        apply=_apply_max_tiles,
    ),
    HfKnob(
        name="longest_edge",
        help="pixels of an image's longer side",
        of=("Idefics3ImageProcessor", "SmolVLMImageProcessor"),
        read=lambda parts: Range(parts.images.size["longest_edge"], 1, _LARGEST_EDGE),
        options=lambda value: {"size": {"longest_edge": value}},
    ),
    HfKnob(
        name="max_pixels",
        help="most pixels of an image",
        of=("Qwen2VLImageProcessor",),  # also of Qwen2.5-VL and Qwen3-VL
        read=lambda parts: Range(parts.images.size["longest_edge"], parts.images.size["shortest_edge"]),
        apply=_apply_max_pixels,
        again=True,
    ),
    HfKnob(
        name="pan_and_scan_max_num_crops",
        help="most crops of a long image; 0 turns pan and scan off",
        of=("Gemma3ImageProcessor",),
        read=_read_pan_and_scan,
        options=_pan_and_scan_options,
    ),
    HfKnob(
        name="max_image_tiles",
        help="most tiles of an image",
        of=("MllamaImageProcessor",),
        read=lambda parts: Range(parts.images.max_image_tiles, 1, parts.config.vision_config.max_num_tiles),
        apply=_apply_max_image_tiles,
    ),
    HfKnob(
        name="max_new_tokens",
        help="most tokens of an answer (vqa: 16)",
        read=_read_new_tokens,
    ),
    HfKnob(
        name="experts_per_token",
        help="experts that each token is sent to",
        read=_read_experts,
        apply=_apply_experts,
        again=True,
    ),
    HfKnob(
        name="layers",
        help="decoder layers that run, from the first",
        read=_read_layers,
        apply=_apply_layers,
    ),
)

NOT_OF_IMAGES = frozenset(entry.name for entry in TABLE if not entry.of)  # knobs that do not change a model's input
