"""Make a tiny Hugging Face model with a chat template, and conversations to fine-tune it on.

    python tools/make_tiny_chat_model.py outputs/tiny_chat
    isp train configs/chat.yaml --nproc 4

`FOLDER/model` is a Qwen3 with random weights, saved by `save_pretrained`, with a tokenizer that is
trained here and a ChatML template that marks the assistant's tokens. `FOLDER/chat.jsonl` has
questions about Python's standard library; the answers are first lines of docstrings and of
definitions. `FOLDER/pairs.jsonl` has the first question of each conversation, with its answer as
chosen and the same answer in capitals as rejected. Nothing is downloaded, and the same version of
Python writes the same files.
"""

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from isp.config.data import PYTHON_STDLIB
from isp.data.documents import find_files

VOCAB_SIZE = 1024
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def main() -> None:
    """Write the model and the conversations into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("outputs/tiny_chat"), help="folder to write"
    )
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    talks = list(conversations())
    lines = [json.dumps({"messages": messages}) + "\n" for messages in talks]
    (folder / "chat.jsonl").write_text("".join(lines))
    pairs = [
        {"prompt": [ask], "chosen": [answer], "rejected": [{**answer, "content": shouted}]}
        for ask, answer, *_ in talks
        if (shouted := answer["content"].upper()) != answer["content"]
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tokenizer = train_tokenizer(talks)
    tokenizer.save_pretrained(folder / "model")
    model = random_model(tokenizer)
    model.save_pretrained(folder / "model")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{folder}/model: {parameters:,} parameters; {folder}/chat.jsonl: {len(talks):,} lines")


def conversations() -> Iterator[list[dict[str, str]]]:
    """Yield a conversation of two questions about each public function and class of the library."""
    for path in find_files(PYTHON_STDLIB):
        module = path.parent.name if path.stem == "__init__" else path.stem
        for node in ast.parse(path.read_bytes()).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            docstring = (ast.get_docstring(node) or "").strip()
            if not docstring or node.name.startswith("_") or module.startswith("_"):
                continue
            kind = "function" if isinstance(node, ast.FunctionDef) else "class"
            yield [
                {"role": "user", "content": f"What is {node.name} in {module}?"},
                {"role": "assistant", "content": docstring.splitlines()[0]},
                {"role": "user", "content": "How does its definition begin?"},
                {"role": "assistant", "content": f"{_header(node)}  # a {kind}"},
            ]


def _header(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the first line of a definition, such as `def name(arguments)`."""
    if isinstance(node, ast.FunctionDef):
        return f"def {node.name}({ast.unparse(node.args)})"
    bases = ", ".join(map(ast.unparse, node.bases))
    return f"class {node.name}({bases})" if bases else f"class {node.name}"


def train_tokenizer(talks: list[list[dict[str, str]]]) -> Any:
    """Train a byte-level BPE tokenizer of `VOCAB_SIZE` tokens, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (message["content"] for messages in talks for message in messages)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )


def random_model(tokenizer: Any) -> Any:
    """Make a Qwen3 of 4 layers with random weights, the same in each call."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    main()
