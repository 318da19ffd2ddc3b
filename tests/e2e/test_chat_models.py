"""A model that learns from conversations answers them, here and in transformers, and stops where its template does."""

from pathlib import Path

import pytest
import transformers

import megatfm
from tests.support.finetuning_tasks import ANSWERS, CHATML, conversations, save_chat_llama, write_lines
from tests.support.forked_commands import run_command

CONFIG = """
name = "chat"
task = { form = "chat", train = "chats.jsonl", validation = "chats.jsonl", epochs = 30 }
data = { sequence_length = 16 }
optimizer = { name = "adamw", lr = 1e-2 }
train = { global_batch = 4, micro_batch = 4, precision = "fp32" }
log = { sinks = [] }
"""


@pytest.mark.parametrize("own_template", [True, False], ids=["the tokenizer's template", "a file"])
def test_answers_end_where_the_template_ends_them(
    own_template: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save_chat_llama(tmp_path / "start", CHATML if own_template else None)
    write_lines(tmp_path / "chats.jsonl", conversations())
    (tmp_path / "chat.toml").write_text(CONFIG)
    (tmp_path / "own.jinja").write_text(CHATML)
    words = [] if own_template else ["task.chat_template=own.jinja"]
    assert run_command("finetune", "chat.toml", "--from", "start", "--export", "exported", *words) == 0

    options = ("--temperature", "0", "--max-tokens", "9")
    capfd.readouterr()
    assert run_command("generate", "runs/chat", "--chat", "--prompt", "oslo", *options) == 0
    prompt_line, answer = capfd.readouterr().out.splitlines()
    assert (prompt_line, answer.strip()) == ("oslo", "old lamp")
    assert "an answer ends at <|im_end|>, the chat template's end of a turn" in caplog.text
    opened = megatfm.load(tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert model.generation_config.eos_token_id == [3, 5]
    for city, answer in ANSWERS.items():
        assert opened.generate(city, begin="chat", temperature=0, max_tokens=9).split() == answer.split()
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": city}], add_generation_prompt=True, return_tensors="pt"
        )
        ids = prompt["input_ids"]
        tokens = model.generate(**prompt, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.convert_ids_to_tokens(tokens.tolist()) == [*answer.split(), "<|im_end|>"]


def test_a_chat_with_a_model_without_a_template_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_chat_llama(tmp_path / "start", None)
    assert run_command("generate", str(tmp_path / "start"), "--chat", "--prompt", "oslo") == 2
    assert "the tokenizer has no chat template" in capfd.readouterr().err
    save_chat_llama(tmp_path / "other")
    assert run_command("generate", str(tmp_path / "other"), "--chat", "--prompt", "oslo <|im_end|>") == 2
    assert "the prompt spells the special token '<|im_end|>': take it out" in capfd.readouterr().err
    assert run_command("generate", str(tmp_path / "other"), "--chat", "--bos", "none", "--prompt", "oslo") == 2
    assert "leave --bos out" in capfd.readouterr().err
