"""A tiny BERT with random weights, its tokenizer, and made-up reviews, in the formats of Hugging Face.

    python docs/examples/tiny_bert.py FOLDER

It stands for a model and a data set that you have: FOLDER/bert is what `save_pretrained` of a model and of a
tokenizer writes, and FOLDER/reviews holds train.jsonl and test.jsonl with the columns text, label and shop.
Nothing is fetched.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from mpifl.core.optional_packages import silent_transformers, transformers_package

GOOD, BAD = ("fine", "lovely", "great", "sound"), ("poor", "awful", "broken", "dull")
PLAIN = ("the", "room", "was", "and", "film", "meal", "we", "found", "it", "today")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def save_bert(folder: Path) -> None:
    """Write a BERT of two layers of width 32, and a tokenizer that knows the words of the reviews."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    transformers = transformers_package("huggingface", "tiny_bert.py", str(folder))
    words = {word: i for i, word in enumerate((*SPECIAL, *GOOD, *BAD, *PLAIN))}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(name, words[name]) for name in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    inner.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, ends)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    tokens = dict(zip(names, SPECIAL, strict=True))
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.1,
    )
    with silent_transformers():
        transformers.set_seed(0)
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **tokens).save_pretrained(folder)


def reviews(count: int, seed: int) -> list[dict[str, object]]:
    """Return texts with one good or bad word among four to nine, their class, and one of six shops."""
    rng, rows = Random(seed), []
    for i in range(count):
        words = rng.choices(PLAIN, k=rng.randint(3, 8))
        words.insert(rng.randrange(len(words)), rng.choice(GOOD if i % 2 else BAD))
        rows.append({"text": " ".join(words), "label": i % 2, "shop": f"shop {i % 6}"})
    return rows


def main(folder: Path) -> None:
    """Write the model, its tokenizer and the reviews."""
    save_bert(folder / "bert")
    (folder / "reviews").mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", 480, 0), ("test", 120, 1)):
        lines = (json.dumps(row) + "\n" for row in reviews(count, seed))
        (folder / "reviews" / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
