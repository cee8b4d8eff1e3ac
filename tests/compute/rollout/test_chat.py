"""Chat rendering without transformers gives what transformers gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megloom.compute.rollout.chat import Chat, ChatError
from megloom.compute.trainers.tokenizer import write_tokenizer
from megloom.compute.workload import Tokenizer
from megloom.pipelines.systems.arithmetic_model import TOKENIZER
from megloom.pipelines.systems.arithmetic_team import AGENTS

CHATML = Tokenizer(
    special=("<|im_start|>", "<|im_end|>", "<unk>"),
    words=(*"abcdefghijklmnopqrstuvwxyz", "\n", " ", "."),
    pattern=r"[\s\S]",
    chat_template=(
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
        "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    stop="<|im_end|>",
    unknown="<unk>",
)


def chat(spec: Tokenizer, directory: Path) -> Chat:
    write_tokenizer(spec, directory)
    return Chat(directory)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "add a and b."}],
        [{"role": "system", "content": "be brief."}, {"role": "user", "content": "go\n"}],
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": "Z"},
        ],
    ],
)
def test_ids_equal_those_of_auto_tokenizer(tmp_path: Path, messages: list[dict[str, str]]) -> None:
    ours = chat(CHATML, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(ours.encode(messages)) == list(theirs)


def test_a_text_is_one_user_message_and_answers_end_with_the_stop_word(tmp_path: Path) -> None:
    ours = chat(TOKENIZER, tmp_path)
    prompt = AGENTS["planner"].prompt("7 - 5 - 9")
    assert ours.encode(prompt) == ours.encode([{"role": "user", "content": prompt}])
    answer = ours.encode_answer("7 - 5 then - 9")
    assert answer[-1] == ours.stop_ids[0] and ours.decode(answer) == "7 - 5 then - 9"


def test_a_lone_surrogate_is_rendered_as_the_replacement_character(tmp_path: Path) -> None:
    ours = chat(CHATML, tmp_path)
    assert ours.encode("a\ud800b") == ours.encode("a\ufffdb")


def test_a_stop_list_of_the_generation_config_is_honoured(tmp_path: Path) -> None:
    write_tokenizer(CHATML, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert Chat(tmp_path).stop_ids == (1, 7)


def test_messages_without_role_or_content_are_refused_with_their_position(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="message 1: expected a mapping with role and content"):
        chat(CHATML, tmp_path).encode([{"role": "user", "content": "a"}, {"role": "user"}])


def test_a_folder_without_a_template_or_a_stop_word_is_refused(tmp_path: Path) -> None:
    write_tokenizer(CHATML, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    with pytest.raises(ChatError, match="no chat template"):
        Chat(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    with pytest.raises(ChatError, match="no eos_token"):
        Chat(tmp_path)
