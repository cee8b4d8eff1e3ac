"""Models from their sources to a `save_pretrained` folder, and from such a folder to torch.

Every source ends as one model.safetensors in float32 beside config.json and the tokenizer's files, so that
engine and trainer read the same bytes. Llama and Qwen3 only: what the local engine serves too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from megloom.compute.state.digests import file_digest
from megloom.compute.state.durable import sync
from megloom.compute.state.weights import MODEL_FILE
from megloom.compute.trainers.tokenizer import write_tokenizer
from megloom.compute.workload import ModelSource, PackagedGguf, PretrainedModel, RandomModel

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
COMPANIONS = (  # what goes along with the weights from one version to the next, where present
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def write_model(source: ModelSource, directory: Path, *, seed: int, cache_dir: Path | None) -> None:
    """Writes the model of `source` into `directory`. `seed` draws random weights; gguf needs `cache_dir`.

    Raises: ValueError for a source that does not fit; FileNotFoundError for one that is not there.
    """
    match source:
        case RandomModel():
            _write_random(source, directory, seed)
        case PretrainedModel():
            _write_pretrained(Path(source.path), directory)
        case PackagedGguf():
            if cache_dir is None:
                raise ValueError(f"model of package {source.package}: no cache folder to convert it in")
            copy_companions(converted := convert_gguf(source, cache_dir), directory)
            shutil.copyfile(converted / MODEL_FILE, directory / MODEL_FILE)


def load_model(directory: Path, device: torch.device) -> Any:
    """The causal language model of a folder, in float32 on `device`, without dropout.

    Raises: ValueError for an architecture that is not in `ARCHITECTURES`.
    """
    _, model_class = _classes(directory)
    transformers_logging.disable_progress_bar()
    model = model_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    return model.to(device).eval()


def enable_checkpointing(model: Any) -> None:
    """Recomputes activations in the backward pass instead of keeping them; the gradient stays the same.

    Transformers does so in training mode only, so the model's one kind of dropout is switched off.
    """
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    model.activation_checkpointing_enable()
    model.train()


def copy_companions(source: Path, target: Path) -> None:
    """Copies all but the weights: configuration, tokenizer, chat template."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def save_weights(model: Any, path: Path) -> None:
    """Writes the parameters by name, tied ones once, as `from_pretrained` expects them."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.named_parameters()}
    save_file(tensors, path, metadata={"format": "pt"})


def convert_gguf(source: PackagedGguf, cache_dir: Path) -> Path:
    """The folder under `cache_dir` with the converted model; made on first use, keyed by the file's digest.

    Conversion takes a minute and needs the packages `gguf` and `accelerate`.
    """
    file = _packaged_file(source)
    target = cache_dir / f"gguf-{file_digest(file)[:32]}"
    if target.is_dir():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer  # heavy, and only this source needs it

    transformers_logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The weights are plain floats by now, but save_pretrained would still refuse: "quantized with gguf".
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    staging = cache_dir / f".{target.name}.{os.getpid()}.tmp"
    staging.mkdir(parents=True)
    try:
        model.save_pretrained(staging)
        AutoTokenizer.from_pretrained(**where).save_pretrained(staging)
        for path in (*staging.iterdir(), staging):
            sync(path)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _write_random(source: RandomModel, directory: Path, seed: int) -> None:
    config_class, model_class = ARCHITECTURES[source.architecture]
    known = {*config_class().to_dict(), "rope_theta"}
    for key in source.config:
        if key not in known or key == "vocab_size":
            raise ValueError(f"model config key {key!r} may not be set for {source.architecture}")
    tokenizer = write_tokenizer(source.tokenizer, directory)
    config = config_class(
        **source.config,
        vocab_size=tokenizer.get_vocab_size(),
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(source.tokenizer.stop),
    )
    config.architectures = [model_class.__name__]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    config.save_pretrained(directory)
    save_weights(model, directory / MODEL_FILE)


def _write_pretrained(source: Path, directory: Path) -> None:
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"no config.json in {source}: expected a save_pretrained folder")
    _classes(source)
    copy_companions(source, directory)
    if _is_float32(source / MODEL_FILE):
        shutil.copyfile(source / MODEL_FILE, directory / MODEL_FILE)
    else:  # sharded, or another precision
        save_weights(load_model(source, torch.device("cpu")), directory / MODEL_FILE)


def _is_float32(path: Path) -> bool:
    if not path.is_file():
        return False
    with safe_open(path, framework="pt") as file:
        return all(file.get_slice(name).get_dtype() == "F32" for name in file.keys())  # noqa: SIM118


def _classes(directory: Path) -> tuple[Any, Any]:
    kind = json.loads((directory / "config.json").read_text()).get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"{directory}: model_type {kind!r}, expected one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[kind]


def _packaged_file(source: PackagedGguf) -> Path:
    spec = importlib.util.find_spec(source.package)  # found, not imported: only its files are wanted
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"package {source.package!r} is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = sorted(folder.rglob(source.pattern))
    if len(found) != 1:
        raise ValueError(f"package {source.package}: {len(found)} files match {source.pattern!r}, expected 1")
    return found[0]
