"""The transformer forward pass (Qwen3 and Llama) over the slots of a key-value cache.

One path serves decoding (one new token per row), fresh prompts and prompts with a cached prefix. Queries of
the heads that share a key-value head are laid out as rows of one attention problem, so grouped-query
attention needs no expanded cache. Torch operators are few and large, since for small models the cost of
calling them dominates.
Shapes: B rows, S new tokens per row (right-padded), H query and K key-value heads, G = H/K, D head dim,
T cached positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megloom.compute.engines.checkpoint import ModelConfig
from megloom.compute.engines.rope import interleave_heads, inverse_frequencies, rotate, rotations
from megloom.compute.engines.slots import SlotCache


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One block; projections that read the same input are stacked."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    head_norm: torch.Tensor | None  # [H + K, D]: the query norm per query head, then the key norm
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """All parameters in the layout that the forward pass reads."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Where the new tokens of a forward pass go.

    `slots` `[B]` are consecutive from `first_slot`. `positions` `[B, S]`. `mask` is added to the attention
    scores: `[B · K, 1, T]` if S is 1, else `[B, 1, S · G, T]`. `last` `[B]` is the flat index of each row's
    last real token.
    """

    slots: torch.Tensor
    first_slot: int
    positions: torch.Tensor
    mask: torch.Tensor
    last: torch.Tensor


def pack_weights(tensors: dict[str, torch.Tensor], config: ModelConfig) -> Weights:
    """Returns checkpoint tensors, keyed by Hugging Face name, in the layout of the forward pass."""
    dim = config.head_dim

    def layer(index: int) -> LayerWeights:
        def get(name: str) -> torch.Tensor:
            return tensors[f"model.layers.{index}.{name}.weight"]

        query, key = (interleave_heads(get(f"self_attn.{x}_proj"), dim) for x in "qk")
        head_norm = None
        if config.normalises_heads:
            query_norm, key_norm = (interleave_heads(get(f"self_attn.{x}_norm"), dim) for x in "qk")
            counts = (config.num_heads, config.num_kv_heads)
            head_norm = torch.cat(
                [norm.expand(count, dim) for norm, count in zip((query_norm, key_norm), counts, strict=True)]
            )
        return LayerWeights(
            attention_norm=get("input_layernorm"),
            qkv=torch.cat([query, key, get("self_attn.v_proj")]),
            head_norm=head_norm,
            output=get("self_attn.o_proj").t(),
            mlp_norm=get("post_attention_layernorm"),
            gate_up=torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]),
            down=get("mlp.down_proj").t(),
        )

    embedding = tensors["model.embed_tokens.weight"]
    return Weights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=tensors["model.norm.weight"],
        head=embedding if config.tied_head else tensors["lm_head.weight"],
    )


class SlotModel:
    """The forward pass; `weights` may be replaced between two calls by others of the same config."""

    def __init__(self, config: ModelConfig, weights: Weights, *, device: torch.device) -> None:
        self.config = config
        self.weights = weights
        self._device = device
        # a host tensor in the weights' dtype: a Python number would be converted anew by every operator
        self._eps = torch.tensor(config.rms_norm_eps, dtype=weights.embedding.dtype)
        self._frequencies = inverse_frequencies(config)
        self._cis = rotations(self._frequencies, 0).to(device)

    def rows(self, first_slot: int, starts: list[int], lengths: list[int], num_positions: int) -> Rows:
        """Returns the layout for rows whose new tokens take positions `start .. start + length - 1`.

        Rows are right-padded to the longest; padding is written behind a row's end, where later tokens
        overwrite it before any query may see it. `num_positions` is T, at least every start + S.
        """
        width = max(lengths)
        start = torch.tensor(starts, device=self._device)
        if width == 1:
            return self.decode_rows(start, num_positions, first_slot)
        slots = torch.arange(first_slot, first_slot + len(starts), device=self._device)
        positions = start[:, None] + torch.arange(width, device=self._device)
        group = self.config.num_heads // self.config.num_kv_heads
        query_positions = positions.repeat_interleave(group, dim=1)
        last_column = torch.tensor(lengths, device=self._device) - 1
        return Rows(
            slots=slots,
            first_slot=first_slot,
            positions=positions,
            mask=self._mask(query_positions[:, None, :, None], num_positions),
            last=last_column + (slots - first_slot) * width,
        )

    def decode_rows(self, positions: torch.Tensor, num_positions: int, first_slot: int = 0) -> Rows:
        """Returns the layout for rows of one new token each, at `positions` `[B]`."""
        row_indices = torch.arange(len(positions), device=self._device)
        per_head = positions[:, None].expand(-1, self.config.num_kv_heads).reshape(-1)
        return Rows(
            slots=row_indices + first_slot if first_slot else row_indices,
            first_slot=first_slot,
            positions=positions[:, None],
            mask=self._mask(per_head[:, None, None], num_positions),
            last=row_indices,
        )

    def _mask(self, query_positions: torch.Tensor, num_positions: int) -> torch.Tensor:
        """Returns 0 where a query may look and -inf elsewhere, with T as the last dimension."""
        hidden = torch.arange(num_positions, device=self._device) > query_positions
        zero = torch.zeros((), device=self._device, dtype=self.weights.embedding.dtype)
        return torch.where(hidden, float("-inf"), zero)

    def _rotations(self, positions: torch.Tensor, num_positions: int) -> torch.Tensor:
        if self._cis.shape[0] < num_positions:
            self._cis = rotations(self._frequencies, num_positions * 2).to(self._device)
        return self._cis[positions.flatten()].unsqueeze(1)

    @torch.inference_mode()
    def forward(self, cache: SlotCache, ids: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Writes the new tokens' keys and values, returns the logits `[B, V]` after each row's last one.

        `ids` `[B, S]`; the cache already holds every earlier position of each row.
        """
        eps = self._eps
        num_positions = rows.mask.shape[-1]
        cis = self._rotations(rows.positions, num_positions)
        span = slice(rows.first_slot, rows.first_slot + ids.shape[0])
        hidden = F.embedding(ids.flatten(), self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            qkv = F.linear(_rms_norm(hidden, layer.attention_norm, eps), layer.qkv)
            keys, values = cache.keys[index], cache.values[index]
            queries = self._write_heads(qkv, layer, cis, keys, values, rows)
            mixed = _attend(
                queries, keys[span, :, :num_positions], values[span, :, :num_positions], rows.mask
            )
            hidden = torch.addmm(hidden, self._merge_heads(mixed, ids.shape[1]), layer.output)
            gate_up = F.linear(_rms_norm(hidden, layer.mlp_norm, eps), layer.gate_up)
            gate, up = gate_up.chunk(2, dim=-1)
            hidden = torch.addmm(hidden, F.silu(gate).mul_(up), layer.down)
        final = _rms_norm(hidden[rows.last], self.weights.final_norm, eps)
        return F.linear(final, self.weights.head).float()

    def _write_heads(
        self,
        qkv: torch.Tensor,
        layer: LayerWeights,
        cis: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        """Writes keys and values of the new tokens, returns their queries `[B, K, S · G, D]`."""
        config = self.config
        num_rows, width = rows.positions.shape
        num_heads, num_kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
        heads = qkv.view(num_rows * width, num_heads + 2 * num_kv, dim)
        turning = heads[:, : num_heads + num_kv]
        if layer.head_norm is not None:
            turning = _rms_norm(turning, layer.head_norm, self._eps)
        turned = rotate(turning, cis).view(num_rows, width, num_heads + num_kv, dim)
        where = (rows.slots[:, None], slice(None), rows.positions)
        keys[where] = turned[:, :, num_heads:]
        values[where] = heads[:, num_heads + num_kv :].view(num_rows, width, num_kv, dim)
        queries = turned[:, :, :num_heads]
        if width == 1:
            return queries.view(num_rows, num_kv, -1, dim)
        grouped = queries.view(num_rows, width, num_kv, -1, dim).transpose(1, 2)
        return grouped.reshape(num_rows, num_kv, -1, dim)

    def _merge_heads(self, mixed: torch.Tensor, width: int) -> torch.Tensor:
        """Returns attention output `[B, K, S · G, D]` as `[B · S, H · D]`."""
        num_rows = mixed.shape[0]
        features = self.config.num_heads * self.config.head_dim
        if width == 1:
            return mixed.reshape(num_rows, features)
        grouped = mixed.unflatten(2, (width, -1)).transpose(1, 2)
        return grouped.reshape(num_rows * width, features)


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Returns the attention output, shaped as `queries` `[B, K, S · G, D]`; keys, values `[B, K, T, D]`.

    For one new token per row, plain batched products over views of the cache are up to three times as fast
    on a CPU as the fused kernel, which works pair by pair of row and head.
    """
    if mask.dim() == 4:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    scale = queries.shape[-1] ** -0.5
    scores = torch.baddbmm(mask, queries.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), alpha=scale)
    mixed = torch.bmm(torch.softmax(scores, dim=-1), values.flatten(0, 1))
    return mixed.view(queries.shape)


def _rms_norm(features: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Returns `features / sqrt(mean(features²) + eps) · weight` over the last dimension.

    On a CPU `F.rms_norm` is a dozen operators; this is five.
    """
    if features.is_cuda:
        return F.rms_norm(features, features.shape[-1:], None, float(eps)) * weight
    norm = torch.linalg.vector_norm(features, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, norm, norm, value=1 / features.shape[-1]).rsqrt_()
    return (features * scale).mul_(weight)
