"""Write passkey prompts and their answers as byte tokens, for configs/passkey/passkey.yaml.

Only what can be predicted from earlier text is trained: the key where the prompt repeats it, and
the answer.
"""

import argparse
import json
import random
from pathlib import Path

from isp.data.dataset import IGNORE_INDEX
from isp.data.tokenizer import ByteTokenizer
from isp.evaluation.passkey import Passkey, PasskeyPrompts

AGAIN = "Remember it. "
"""The text of a prompt that comes before the key's repetition."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="JSON lines file to write")
    parser.add_argument("--examples", type=int, default=30_000, help="number of lines")
    parser.add_argument("--longest", type=int, default=256, help="most tokens of an example")
    parser.add_argument("--digits", type=int, default=3, help="most digits of a key")
    args = parser.parse_args()
    rng, encode = random.Random(0), ByteTokenizer().encode
    prompts = [
        PasskeyPrompts(lambda text: encode(text).tolist(), digits=digits)
        for digits in range(1, args.digits + 1)
    ]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w") as file:
        for _ in range(args.examples):
            kind = rng.choice(prompts)
            # Many short and many long prompts: short ones are learned first and help with longer
            # ones, and the longest need the most examples.
            room = (args.longest - kind.shortest) * rng.random() ** rng.choice((0.4, 2))
            length = kind.shortest + int(room)
            passkey = kind.draw(rng, length=length, depth=rng.random())
            example = {"input_ids": encode(text(passkey)).tolist(), "labels": labels(passkey)}
            file.write(json.dumps(example) + "\n")


def text(passkey: Passkey) -> str:
    """Return the prompt with its answer."""
    return passkey.prompt + passkey.answer


def labels(passkey: Passkey) -> list[int]:
    """Return a label for each byte of the text.

    It is the byte itself in the second occurrence of the key and in the answer, else IGNORE_INDEX.
    """
    found = [IGNORE_INDEX] * len(text(passkey))
    again = passkey.prompt.index(AGAIN) + len(AGAIN)
    for begin, end in (
        (again, again + len(passkey.key)),
        (len(passkey.prompt), len(text(passkey))),
    ):
        found[begin:end] = text(passkey)[begin:end].encode()
    return found


if __name__ == "__main__":
    main()
