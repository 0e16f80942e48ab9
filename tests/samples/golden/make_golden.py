#!/usr/bin/env python3
"""Makes the golden files beside it with engines that share no code with the sample.

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install llama-cpp-python==0.3.36 gguf==0.19.0 tokenizers==0.23.3
    /tmp/golden/bin/python tests/samples/golden/make_golden.py build/models/SmolLM2*.gguf

logits_f32.txt     llama.cpp on the same weights, dequantised to F32 by the gguf package, with an
                   F32 cache: the arithmetic of the sample, in another order.
logits_stored.txt  llama.cpp on the file as it is: weights stay Q4_1 and Q8_0, and activations are
                   rounded to 8 bits for every product, which moves logits visibly.
tokenizer.txt      token ids from the tokenizers package, built from the file's vocabulary.
dequantize.txt     random blocks of every weight type and their values from the gguf package.
"""
import os
import sys
import tempfile

import gguf
import numpy as np
from llama_cpp import Llama
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HERE = os.path.dirname(os.path.abspath(__file__))
GGML_TYPE_F32 = 0

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France, and why is it famous?<|im_end|>\n"
    "<|im_start|>assistant\n"
)

TEXTS = [
    "Hello, world!",
    "  two leading spaces, a tab\tand\n\n  a paragraph \n",
    "In 1969, 3 people flew 384400 km; that's 2³ more than 12½.",
    "I'll we've they're it's don't I'm he'd 'quoted' 'S 'LL",
    "naïve café Ünïcödé Ελληνικά русский 中文字符 日本語 한국어 العربية हिन्दी",
    "emoji: 🙂👍🏽 👩‍👩‍👧 and symbols ©®™ €£¥ ∑∫√",
    "def f(x):\n    return x ** 2  # comment\n\n\n\tx+=1;;{}[]()<>",
    "trailing spaces   ",
    "\u00a0no\u2003break \u3000wide\u200bzero\r\nwindows\r\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "<|im_start|>user\nnot <|im_end a token<|im_end|>\n",
    "٣٤٥ Ⅷ ④ ೬ 10,000.50",
    "\x00\x01\x7f control \x1b[0m",
    "",
    " ",
    "\n",
]


def write_logits(name, path, tokens, count=64):
    engine = Llama(model_path=path, n_ctx=512, n_batch=512, logits_all=True, verbose=False,
                   n_threads=2, type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32, flash_attn=False)
    assert engine.tokenize(PROMPT.encode(), add_bos=False, special=True) == tokens
    engine.eval(tokens)
    rows = np.array(engine.scores[: len(tokens)], dtype=np.float32)
    lines = ["tokens " + " ".join(map(str, tokens))]
    for row in rows:
        top = np.argsort(-row, kind="stable")[:20]
        lines.append("top " + " ".join(f"{i}:{row[i]:.6f}" for i in top))
    continuation = []
    row = rows[-1]
    margins = []
    for _ in range(count):
        first, second = np.sort(row)[::-1][:2]
        margins.append(float(first - second))
        token = int(np.argmax(row))
        continuation.append(token)
        engine.eval([token])
        row = np.array(engine.scores[engine.n_tokens - 1], dtype=np.float32)
    lines.append("greedy " + " ".join(map(str, continuation)))
    with open(os.path.join(HERE, name), "w") as out:
        out.write("\n".join(lines) + "\n")
    print(name, "smallest margin", min(margins), repr(engine.detokenize(continuation).decode()))


def write_f32_model(reader, path):
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value_type = field.types[0]
        sub_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        value = 0 if key == "general.file_type" else field.contents()
        writer.add_key_value(key, value, value_type, sub_type=sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_tokenizer(reader):
    texts = reader.fields["tokenizer.ggml.tokens"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in reader.fields["tokenizer.ggml.merges"].contents()]
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(texts)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False)
                             for t, kind in zip(texts, types) if kind == 3])
    return made


def write_tokens(tokenizer):
    with open(os.path.join(HERE, "tokenizer.txt"), "w") as out:
        for text in TEXTS + [PROMPT]:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            out.write(f"text {text.encode().hex()}\nids {' '.join(map(str, ids))}\n")


def write_blocks():
    random = np.random.default_rng(7)
    kinds = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
    # Where a block holds f16 scales, which must not be infinite or not a number.
    halves = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2],
              "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "F16": [0]}
    with open(os.path.join(HERE, "dequantize.txt"), "w") as out:
        for kind in kinds:
            quant = gguf.GGMLQuantizationType[kind]
            elements, size = gguf.GGML_QUANT_SIZES[quant]
            count = 2 if elements > 1 else 16
            block = random.integers(0, 256, (count, size), dtype=np.uint8)
            if kind in ("F32", "BF16"):
                width = np.float32
                values = random.normal(size=count).astype(width)
                raw = values.view(np.uint8).reshape(count, 4)
                block = raw if kind == "F32" else raw[:, 2:].copy()
            for i in range(count):
                for at in halves.get(kind, []):
                    half = np.float16(random.normal() * 0.1)
                    block[i, at:at + 2] = np.frombuffer(half.tobytes(), dtype=np.uint8)
            flat = block.reshape(1, -1)
            if kind in ("F32", "F16"):
                flat = flat.view(np.float32 if kind == "F32" else np.float16)
            values = gguf.dequantize(flat, quant).reshape(-1).astype(np.float32)
            out.write(f"type {int(quant)} {kind}\nbytes {block.tobytes().hex()}\n")
            out.write("values " + " ".join(float(v).hex() for v in values) + "\n")


def main():
    model = sys.argv[1]
    reader = gguf.GGUFReader(model)
    tokenizer = make_tokenizer(reader)
    write_tokens(tokenizer)
    write_blocks()
    tokens = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    write_logits("logits_stored.txt", model, tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "f32.gguf")
        write_f32_model(reader, path)
        write_logits("logits_f32.txt", path, tokens)


main()
