"""Compare the loss masks of conversations with those of TRL's training templates.

    pip install --no-deps --target /tmp/trl trl==1.16.0
    python tools/check_masks_with_trl.py /tmp/trl [--digests]

For a model's chat template, TRL has a variant whose generation blocks mark the trained tokens.
Seven conversations are rendered by the model's template, with ISP's masks, and by TRL's variant,
and tokenized by a byte-level tokenizer with the special tokens of the template. Prints, for each
template that differs anywhere and for all together, the number of conversations with the same mask,
with another mask, with another text, and refused by one side. `--digests` also prints the digest by
which `isp/data/chat.py` recognizes each template.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from isp.data.chat import ChatTemplate, Example
from isp.data.tokenizer import load_tokenizer

SPECIAL = re.compile(
    r"<[|\uff5c][^<>|\uff5c'\"{}]{1,40}[|\uff5c]>|<(?:start|end)_of_turn>|</?s>|\[/?INST\]|<turn\|>"
    r"|<\|turn>|<(?:END|START)_OF_TURN_TOKEN>|<end_of_utterance>|\[gMASK\]|<sop>"
)
ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|return|>", "<end_of_turn>", "<|end|>")
NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"name": "add", "description": "adds", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": ADD}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


def turns(*contents: str, **last: Any) -> list[dict[str, Any]]:
    """Return messages of user and assistant in turn; `last` are further keys of the last one."""
    roles = ("user", "assistant")
    talk = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return [*talk[:-1], {**talk[-1], **last}]


THOUGHT = turns("2*3?", "6", reasoning_content="two threes")
CONVERSATIONS = {
    "single": turns("Hi there", "Hello, you."),
    "several": turns("One?", "1", "Two?", "2", "Three?", "It is 3."),
    "system": [{"role": "system", "content": "Be brief."}, *turns("Hi", "Yo.")],
    "thinking": THOUGHT,
    "thinking twice": [*THOUGHT, *turns("and 1+1?", "2", reasoning_content="easy")],
    "tools": [
        *turns("add 1 2", "", tool_calls=[CALL]),
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ],
    "ends with the user": turns("Hi", "Yo", "and?"),
}


def write_tokenizer(folder: Path, template: str) -> None:
    """Write a byte-level tokenizer with `template` and its special tokens into `folder`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = sorted({*SPECIAL.findall(template), "<bos>", "<eos>"})
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = next((name for name in ENDS if name in names), "<eos>")
    config = {"bos_token": "<bos>", "eos_token": end, "chat_template": template}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | config))


def compare(own: Path, marked: Path, folder: Path) -> Counter[str]:
    """Compare the loss masks of all conversations, and count the outcomes.

    The file `own` has a model's chat template, which ISP masks. `marked` has TRL's variant of it,
    whose generation blocks mark the trained tokens. A tokenizer is written into `folder`.
    """
    write_tokenizer(folder, own.read_text())
    tokenizer = load_tokenizer(str(folder))
    ours, theirs = ChatTemplate(tokenizer), ChatTemplate(tokenizer, str(marked))
    found: Counter[str] = Counter()
    for name, talk in CONVERSATIONS.items():
        tools = TOOLS if name == "tools" else None
        results: list[Example] = []
        for template, who in ((theirs, "TRL"), (ours, "isp")):
            try:
                results.append(template.example(talk, name, tools=tools))
            except ValueError:
                found[f"refused by {who}"] += 1
                break
        else:
            expected, example = results
            same = example.tokens.tolist() == expected.tokens.tolist()
            same_labels = example.labels.tolist() == expected.labels.tolist()
            outcome = "same mask" if same_labels else "other mask"
            found[outcome if same else "other text"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trl", type=Path, help="folder into which pip installed trl")
    parser.add_argument("--digests", action="store_true", help="print the digest of each template")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    for marked in sorted((options.trl / "trl/chat_templates").glob("*_training.jinja")):
        own = marked.with_name(marked.name.replace("_training", ""))
        if options.digests:
            digest = hashlib.sha256(own.read_text().strip().encode()).hexdigest()[:8]
            print(digest, own.stem)
        with tempfile.TemporaryDirectory() as folder:
            found = compare(own, marked, Path(folder))
        total += found
        if found.keys() != {"same mask"}:
            print(f"{own.stem}: {dict(found)}")
    print(f"all: {dict(total)}")


if __name__ == "__main__":
    main()
