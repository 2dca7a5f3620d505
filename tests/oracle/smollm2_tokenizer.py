"""Golden token ids and chat prompts of SmolLM2, from two independent paths that must agree.

    python smollm2_tokenizer.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out ../golden/smollm2_tokenizer.json

One path is a byte-pair encoder written out here in plain Python over the file's merges; the other is
transformers' GGUF reader, whose pre-tokenizer is corrected (it forgets that SmolLM splits digits).
Chat prompts come from transformers' apply_chat_template.
"""

import argparse
import itertools
import json
from pathlib import Path

import gguf
import regex
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

TEXTS = [
    "",
    " ",
    "Hello world",
    "Hello, world! How's it going? I've been well; they'll see, we're done, he'd go.",
    "  leading and trailing  ",
    "tabs\tand\nnew\n\nlines\r\nand \t mixed \n  indents",
    "def f(x):\n    if x >= 10:\n        return x ** 2\n    return -x\n",
    "Numbers 1, 12, 123, 1234567890 and 3.14159, 1e-5, 0xFF, 50%",
    "a   5  12    x",
    "x²+y³=½ and ٣٤ and Ⅷ",
    "naïve café déjà vu Ångström Übermut",
    "cafe\u0301 (combining) vs caf\u00e9",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "Привет, мир! Γειά σου Κόσμε שלום עולם مرحبا بالعالم",
    "emoji 🦊🎉 family 👨\u200d👩\u200d👧\u200d👦 flag 🇸🇪 skin 👍🏽",
    "<|im_start|>user\nhi<|im_end|>\n",
    "no special: < |im_start| > <|im_start <|endoftext|>x<|endoftext|>",
    "<repo_name>a/b<file_sep>main.py\n<filename>x",
    "\u00a0non\u2003breaking\u200bspaces\ufeff",
    "https://example.com/a?b=c&d=%20#e user@example.org C:\\Temp\\x",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...---===///\\\\\\",
    "\x00\x01\x7f control",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 𐍈",
    "THE QUICK BROWN FOX'S CAN'T WON'T",
]

CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "user", "content": "Hi\nthere"},
        {"role": "assistant", "content": "Hello! <b>&amp;</b>"},
        {"role": "user", "content": "日本語で 🦊"},
    ],
    [{"role": "user", "content": ""}],
]

WORDS = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)


class PlainEncoder:
    """Byte-pair encoding as published for GPT-2, with SmolLM's rule that each digit stands alone."""

    def __init__(self, path: str):
        fields = gguf.GGUFReader(path).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        types = fields["tokenizer.ggml.token_type"].contents()
        merges = fields["tokenizer.ggml.merges"].contents()
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        control = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
        self.control = regex.compile("(" + "|".join(map(regex.escape, control)) + ")")
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in visible]
        self.alphabet = {byte: chr(byte) for byte in visible}
        self.alphabet |= {byte: chr(256 + index) for index, byte in enumerate(rest)}

    def word(self, text: str) -> list[int]:
        parts = [self.alphabet[byte] for byte in text.encode()]
        while len(parts) > 1:
            best = min(itertools.pairwise(parts), key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            merged, index = [], 0
            while index < len(parts):
                if tuple(parts[index : index + 2]) == best:
                    merged.append("".join(best))
                    index += 2
                else:
                    merged.append(parts[index])
                    index += 1
            parts = merged
        return [self.ids[part] for part in parts]

    def encode(self, text: str) -> list[int]:
        ids = []
        for piece in self.control.split(text):
            if self.control.fullmatch(piece):
                ids.append(self.ids[piece])
                continue
            for part in regex.split(r"(\p{N})", piece):
                for word in WORDS.findall(part):
                    ids += self.word(word)
        return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    plain = PlainEncoder(str(args.gguf))
    tokenizer = AutoTokenizer.from_pretrained(args.gguf.parent, gguf_file=args.gguf.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    texts = []
    for text in TEXTS:
        ids = plain.encode(text)
        other = tokenizer(text, add_special_tokens=False).input_ids
        if ids != other:
            print("the two paths disagree:", repr(text), ids, other)
        texts.append({"text": text, "ids": ids})
    chats = []
    for messages in CHATS:
        for prompt in (True, False):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            entry = {"messages": messages, "add_generation_prompt": prompt, "text": text}
            chats.append(entry | {"ids": plain.encode(text)})
    args.out.write_text(json.dumps({"texts": texts, "chats": chats}, indent=1) + "\n")
    print(f"{args.out}: {args.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
