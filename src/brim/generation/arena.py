"""Keys and values of sequences of any length, end to end in one tensor per layer, and attention over them.

A sequence owns a region of slots, as long as its prompt and its longest answer: a short one does not hold the room of
a long one, and a region that is given back serves the next. A forward takes the new tokens of many sequences packed
into one row, without padding: whole prompts, parts of prompts and single tokens alike. Flash attention reads each
sequence's keys in place, by where its region starts and how many slots are used. A prefix that all sequences share is
stored once; attention over it is computed for all new tokens together and merged by its log-sum-exp.
Prompts may also be read as padded rows, by the model's own attention: then keys and values are only stored here.

The only file of this layer that calls torch's flash attention, and beside `cache.py` the only one that imports
transformers' caches.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

__all__ = [
    "Arena",
    "KeyPart",
    "KeySource",
    "PackedTokens",
    "Regions",
    "TokenGroups",
    "flash_works_on",
    "head_on",
    "packed_attention",
    "region_slots",
]

PACKED = "brim_packed"
ALIGNMENT = 16  # slots of a region are a multiple of this


def region_slots(length: int) -> int:
    """The slots of a region for so many tokens."""
    return -(-length // ALIGNMENT) * ALIGNMENT


class Regions:
    """Which slots are free: first fit, neighbours merged. Slot 0 is nobody's: rows without a sequence write there."""

    def __init__(self, slots: int) -> None:
        self.slots = max(slots, ALIGNMENT)
        self._free: list[tuple[int, int]] = []  # start and end, in order
        self._taken: dict[int, int] = {}  # start: end
        if slots > ALIGNMENT:
            self._free.append((ALIGNMENT, slots))

    @property
    def free_slots(self) -> int:
        """Slots in no region."""
        return sum(end - start for start, end in self._free)

    def take(self, length: int) -> int | None:
        """The start of a region of that many slots; None if there is none."""
        need = region_slots(length)
        for place, (start, end) in enumerate(self._free):
            if end - start >= need:
                if end - start == need:
                    del self._free[place]
                else:
                    self._free[place] = (start + need, end)
                self._taken[start] = start + need
                return start
        return None

    def grow(self, slots: int) -> None:
        """So many slots in all; what is taken stays."""
        start, self.slots = self.slots, slots
        self._release(start, slots)

    def give_back(self, start: int) -> None:
        """The region is free again."""
        self._release(start, self._taken.pop(start))

    def _release(self, start: int, end: int) -> None:
        place = bisect.bisect_left(self._free, (start, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place > 0 and self._free[place - 1][1] == start:
            start = self._free[place - 1][0]
            place -= 1
            del self._free[place]
        self._free.insert(place, (start, end))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenGroups:
    """Of which sequence each new token is, and where that sequence's keys are."""

    query_starts: torch.Tensor  # [sequences + 1], int32: the first new token of each sequence, and their number
    region_starts: torch.Tensor  # [sequences + 1], int32; the last one is not read
    used: torch.Tensor  # [sequences], int32: slots in use, the new tokens included
    max_new: int  # the most new tokens of one sequence
    max_used: int  # the most slots that one may use

    @classmethod
    def one(cls, tokens: int, *, start: int, used: int, device: torch.device) -> TokenGroups:
        """All tokens over the same keys."""
        numbers = torch.arange(4, dtype=torch.int32, device=device)  # made on the device: nothing waits for a copy
        return cls(
            query_starts=numbers[:2] * tokens, region_starts=numbers[:2] * 0 + start, used=numbers[:1] + used,
            max_new=tokens, max_used=used,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedTokens(TokenGroups):
    """The new tokens of one forward, and where their keys and values go."""

    slots: torch.Tensor  # [tokens], where keys and values are stored
    prefix: int = 0  # slots of the shared prefix, which precede every sequence's own
    kept: torch.Tensor | None = None  # [tokens]: which tokens of padded rows are stored, by their places row after row


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyPart:
    """Keys and values, [slots, kv_heads, head_dim], that the new tokens from `first` on attend to."""

    keys: torch.Tensor
    values: torch.Tensor
    tokens: TokenGroups
    causal: bool
    first: int = 0


class KeySource(Protocol):
    """What packed tokens attend to in a forward."""

    def parts(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sequence[KeyPart]:
        """Of one attention layer: `query` is [tokens, heads, head_dim], `key` and `value` are as the layer has them."""


@functools.cache
def _layer_class() -> type[Any]:
    from transformers.cache_utils import CacheLayerMixin

    class ArenaLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
        """One layer's keys and values, [slots, heads, head_dim]."""

        is_sliding = False
        is_compileable = False

        def __init__(self, arena: Arena) -> None:
            super().__init__()
            self.arena = arena

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
            values = key_states if value_states is None else value_states
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys = key_states.new_zeros(self.arena.slots, key_states.shape[1], key_states.shape[3])
            self.values = values.new_zeros(self.arena.slots, values.shape[1], values.shape[3])
            self.is_initialized = True

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            del args, kwargs
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            tokens = self.arena.tokens
            assert tokens is not None, "the arena is used outside of `packed` and `storing`"
            self.keys.index_copy_(0, tokens.slots, _by_token(key_states, tokens.kept))
            self.values.index_copy_(0, tokens.slots, _by_token(value_states, tokens.kept))
            return (self.keys, self.values) if tokens.kept is None else (key_states, value_states)

        def get_mask_sizes(self, query: Any) -> tuple[int, int]:
            return (query if isinstance(query, int) else query.shape[0]), 0

        def get_seq_length(self, *args: Any) -> int:
            del args
            return 0

        def get_max_length(self) -> int:
            return self.arena.slots

        get_max_cache_shape = get_max_length  # its name before transformers 5

    return ArenaLayer


class Arena:
    """A transformers `Cache` of so many slots per layer, allocated at the first forward."""

    def __init__(self, layers: int, slots: int) -> None:
        from transformers.cache_utils import Cache

        self.slots = slots
        self.tokens: PackedTokens | None = None  # of the forward under way
        self._over_prefix: TokenGroups | None = None
        layer_class = _layer_class()
        self.cache = Cache(layers=[layer_class(self) for _ in range(layers)])

    def tensors(self) -> list[torch.Tensor]:
        """Keys and values, as far as they are allocated."""
        held = [layer for layer in self.cache.layers if layer.is_initialized]
        return [one for layer in held for one in (layer.keys, layer.values)]

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values in one slot of all layers; 0 before the first forward."""
        return sum(one.nbytes for one in self.tensors()) // self.slots

    def grow(self, slots: int) -> None:
        """So many slots in all, layer by layer, so that no more than one of them exists twice."""
        self.slots, held = slots, self.slots
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.keys, layer.values = _longer(layer.keys, slots, held), _longer(layer.values, slots, held)

    def release(self) -> None:
        """Free keys and values."""
        for layer in self.cache.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False

    @contextlib.contextmanager
    def packed(self, config: Any, tokens: PackedTokens) -> Iterator[None]:
        """While inside, a forward of the model with this configuration takes packed tokens."""
        if tokens.prefix:
            count, device = tokens.slots.shape[0], tokens.slots.device
            self._over_prefix = TokenGroups.one(count, start=ALIGNMENT, used=tokens.prefix, device=device)
        with self.storing(tokens), packed_attention(config, self):
            yield

    @contextlib.contextmanager
    def storing(self, tokens: PackedTokens) -> Iterator[None]:
        """While inside, a forward stores keys and values; with `kept` it takes padded rows, and attends by itself."""
        self.tokens = tokens
        try:
            yield
        finally:
            self.tokens = self._over_prefix = None

    def parts(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[KeyPart]:
        """A sequence's own region, and the prefix that all share."""
        del layer, query
        assert self.tokens is not None
        found = [KeyPart(keys=key, values=value, tokens=self.tokens, causal=True)]
        if self._over_prefix is not None:
            found.append(KeyPart(keys=key, values=value, tokens=self._over_prefix, causal=False))
        return found


def _by_token(states: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """[rows, heads, length, head_dim] as [tokens, heads, head_dim], of one row or those that are kept."""
    by_token = states.transpose(1, 2)
    return by_token[0] if kept is None else by_token.flatten(0, 1).index_select(0, kept)


def _longer(tensor: torch.Tensor, slots: int, held: int) -> torch.Tensor:
    grown = tensor.new_zeros(slots, *tensor.shape[1:])
    grown[:held] = tensor
    return grown


_SOURCES: list[KeySource] = []  # the one in use last


@contextlib.contextmanager
def packed_attention(config: Any, source: KeySource) -> Iterator[None]:
    """While inside, the layers of the model with this configuration attend to what the source names."""
    _register()
    before = config._attn_implementation
    config._attn_implementation = PACKED
    _SOURCES.append(source)
    try:
        yield
    finally:
        _SOURCES.pop()
        config._attn_implementation = before


@functools.cache
def _register() -> None:
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(PACKED, _attend)


@contextlib.contextmanager
def head_on(model: Any, tokens: torch.Tensor) -> Iterator[None]:
    """Run the model's head on these tokens of all rows only: logits of all need more memory than the rest."""
    calls: list[None] = []

    def pick(_: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        calls.append(None)
        return (arguments[0].flatten(0, 1)[tokens].unsqueeze(0), *arguments[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()
    if not calls:  # it reads the weights of the head by itself: these are logits of other tokens
        raise ValueError(f"{type(model).__name__} does not call the module that it names as its output embeddings")


def flash_works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash attention serves these tensors."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8 and torch.backends.cuda.is_flash_attention_available()


def _attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Attention of packed tokens, [1, heads, tokens, head_dim], over the parts that the source in use names."""
    del attention_mask
    for option in ("position_bias", "softcap", "s_aux"):  # a window is wider than any sequence, or there is no pool
        if kwargs.get(option) is not None:
            raise ValueError(f"packed attention has no {option}")
    packed = query[0].transpose(0, 1)  # [tokens, heads, head_dim]
    parts = _SOURCES[-1].parts(module, packed, key, value)
    return _attend_in_parts(packed, parts, scale=kwargs.get("scaling")).unsqueeze(0), None


def _attend_in_parts(query: torch.Tensor, parts: Sequence[KeyPart], *, scale: float | None) -> torch.Tensor:
    """Attention over several sets of keys as one, merged by their log-sum-exps; the first has keys for every token."""
    attend = _flash if query.is_cuda else _plain
    output, lse = attend(query, parts[0], scale=scale)
    for number, part in enumerate(parts[1:], start=2):
        own, own_lse = output[part.first :], lse[:, part.first :]
        before, before_lse = attend(query[part.first :], part, scale=scale)
        merged = _merged(before, before_lse, own, own_lse)
        output = torch.cat([output[: part.first], merged]) if part.first else merged
        if number < len(parts):
            both = torch.logaddexp(before_lse.float(), own_lse.float())
            lse = torch.cat([lse[:, : part.first], both], dim=1) if part.first else both
    return output


def _flash(query: torch.Tensor, part: KeyPart, *, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, [tokens, heads, head_dim], and log-sum-exp, [heads, tokens]."""
    tokens = part.tokens
    output, lse = torch.ops.aten._flash_attention_forward(
        query, part.keys, part.values, tokens.query_starts, tokens.region_starts, tokens.max_new, tokens.max_used,
        0.0, part.causal, False, scale=scale, seqused_k=tokens.used,
    )[:2]  # fmt: skip
    return output, lse


def _plain(query: torch.Tensor, part: KeyPart, *, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, sequence by sequence in plain operations."""
    key, value, tokens, causal = part.keys, part.values, part.tokens, part.causal
    outputs, sums = [], []
    groups = query.shape[1] // key.shape[1]
    starts = tokens.query_starts.tolist()
    for row, (start, used) in enumerate(zip(tokens.region_starts.tolist(), tokens.used.tolist(), strict=False)):
        own = query[starts[row] : starts[row + 1]].transpose(0, 1)  # [heads, new, head_dim]
        keys = key[start : start + used].transpose(0, 1).repeat_interleave(groups, dim=0)
        values = value[start : start + used].transpose(0, 1).repeat_interleave(groups, dim=0)
        scores = own @ keys.transpose(1, 2) * (own.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            new = own.shape[1]
            last = torch.arange(used - new, used, device=own.device).unsqueeze(1)
            scores = scores.masked_fill(torch.arange(used, device=own.device) > last, -torch.inf)
        outputs.append((scores.float().softmax(dim=-1).to(values.dtype) @ values).transpose(0, 1))
        sums.append(scores.float().logsumexp(dim=-1))
    return torch.cat(outputs), torch.cat(sums, dim=1)


def _merged(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> torch.Tensor:
    """Attention over two sets of keys as one."""
    weight = torch.sigmoid(first_lse.float() - second_lse.float()).transpose(0, 1).unsqueeze(-1)  # [tokens, heads, 1]
    return torch.lerp(second.float(), first.float(), weight).to(second.dtype)
