"""Reads a Hugging Face `save_pretrained` folder: `config.json` and safetensors, without transformers.

Promises: a folder whose architecture, shapes or digest disagree raises `ValueError` before anything is
replaced; the returned tensors do not alias the file. Called at start and at every weight update.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megloom.compute.state.digests import file_digest
from megloom.compute.state.weights import MODEL_FILE

ARCHITECTURES = {"Qwen3ForCausalLM": True, "LlamaForCausalLM": False}
"""Architecture → whether queries and keys are normalised per head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """All of `config.json` that the forward pass depends on; two equal configs may exchange weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_position_embeddings: int
    tied_head: bool
    eos_token_ids: tuple[int, ...]

    @property
    def normalises_heads(self) -> bool:
        """Whether queries and keys pass an RMS norm per head."""
        return ARCHITECTURES[self.architecture]


def _parse_scaling(rope: Mapping[str, Any], path: Path) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{path}: rope_type {kind!r} is not supported, expected 'default' or 'llama3'")
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def _parse_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path}: architecture {architecture!r} is not supported, expected one of {[*ARCHITECTURES]}"
        )
    fixed = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False}
    for key, value in fixed.items():
        if raw.get(key, value) != value:
            raise ValueError(f"{path}: {key} = {raw[key]!r} is not supported, expected {value!r}")
    # transformers 5 writes rope_parameters; version 4 wrote rope_theta and rope_scaling
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    eos = raw.get("eos_token_id")
    num_heads = int(raw["num_attention_heads"])
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // num_heads),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
        rope_scaling=_parse_scaling(rope, path),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )


def read_config(model_path: str | Path) -> ModelConfig:
    """Returns the model's config.

    Raises: FileNotFoundError, ValueError for what the engine cannot run or a file that is not a config.
    """
    path = Path(model_path) / "config.json"
    raw = json.loads(path.read_text())
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected an object, got {type(raw).__name__}")
    try:
        return _parse_config(raw, path)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as a model config: {error!r}") from error


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and shape of every tensor of the checkpoint."""
    c = config
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    yield "model.norm.weight", (c.hidden_size,)
    if not c.tied_head:
        yield "lm_head.weight", (c.vocab_size, c.hidden_size)
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (c.hidden_size,)
        yield f"{prefix}.post_attention_layernorm.weight", (c.hidden_size,)
        yield f"{prefix}.self_attn.q_proj.weight", (c.num_heads * c.head_dim, c.hidden_size)
        yield f"{prefix}.self_attn.k_proj.weight", (c.num_kv_heads * c.head_dim, c.hidden_size)
        yield f"{prefix}.self_attn.v_proj.weight", (c.num_kv_heads * c.head_dim, c.hidden_size)
        yield f"{prefix}.self_attn.o_proj.weight", (c.hidden_size, c.num_heads * c.head_dim)
        yield f"{prefix}.mlp.gate_proj.weight", (c.intermediate_size, c.hidden_size)
        yield f"{prefix}.mlp.up_proj.weight", (c.intermediate_size, c.hidden_size)
        yield f"{prefix}.mlp.down_proj.weight", (c.hidden_size, c.intermediate_size)
        if c.normalises_heads:
            yield f"{prefix}.self_attn.q_norm.weight", (c.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (c.head_dim,)


def read_tensors(
    model_path: str | Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns the checkpoint's tensors by Hugging Face name, copied to the device.

    Raises: FileNotFoundError, ValueError if a tensor is missing or has another shape than `config` says.
    """
    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{model_path}: no .safetensors file")
    stored: dict[str, torch.Tensor] = {}
    for file in files:
        stored.update(load_file(file))
    tensors = {}
    for name, shape in expected_shapes(config):
        found = stored.get(name)
        if found is None or tuple(found.shape) != shape:
            got = "nothing" if found is None else tuple(found.shape)
            raise ValueError(f"{model_path}: tensor {name}: got {got}, expected shape {shape}")
        # load_file maps the file: without the copy a later write to it would change live weights
        tensors[name] = found.to(device=device, dtype=dtype, copy=True)
    return tensors


def _listed_digest(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except FileNotFoundError:
        return None
    digest = manifest.get("digest") if isinstance(manifest, dict) else None
    return digest if isinstance(digest, str) else None


def verify(model_path: str | Path, digest: str | None) -> None:
    """Checks the weights against `digest` and against `digest` in a `manifest.json` beside them, if given.

    A digest is that of `state.digests.file_digest`.

    Raises: ValueError on disagreement, FileNotFoundError if there is a digest but no file to check.
    """
    folder = Path(model_path)
    expected = {value for value in (digest, _listed_digest(folder)) if value is not None}
    if not expected:
        return
    actual = file_digest(folder / MODEL_FILE)
    if expected != {actual}:
        raise ValueError(f"{folder}: weights have digest {actual}, expected {sorted(expected)}")
