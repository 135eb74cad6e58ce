"""Tiny models, tokenizers and texts in the formats of Hugging Face, made here: nothing is fetched."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from mpifl.core.optional_packages import silent_transformers, transformers_package

GOOD = ("fine", "lovely", "great", "sound")
BAD = ("poor", "awful", "broken", "dull")
PLAIN = ("the", "room", "was", "and", "film", "meal", "we", "found", "it", "today")
WORDS = (*GOOD, *BAD, *PLAIN)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "initializer_range": 0.1,  # weights that were never trained tell words apart only if they are large
}


def transformers() -> Any:
    """Return the package transformers."""
    return transformers_package("test", "test", "test")


def save_tokenizer(folder: Path, words: Sequence[str] = WORDS, pair: bool = True, **tokens: str) -> Path:
    """Write a tokenizer of whole words, as BERT's; `tokens` replace its special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    known = {word: i for i, word in enumerate((*SPECIAL, *words))}
    inner = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if pair:
        ends = [("[CLS]", known["[CLS]"]), ("[SEP]", known["[SEP]"])]
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    given = dict(zip(names, SPECIAL, strict=True)) if pair else {"unk_token": "[UNK]"}
    kept = transformers().PreTrainedTokenizerFast(tokenizer_object=inner, **(given | tokens))
    kept.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    kept.save_pretrained(str(folder))
    return folder


def save_model(
    folder: Path, kind: str = "BertForSequenceClassification", weights: bool = True, **options: Any
) -> Path:
    """Write a tiny model of a class of transformers, drawn; without `weights` its config.json alone."""
    import torch

    cls = getattr(transformers(), kind)
    size = len(SPECIAL) + len(WORDS)
    config = cls.config_class(**({"vocab_size": size} | SIZES | options))
    with torch.random.fork_rng(devices=[]), silent_transformers():
        torch.manual_seed(7)
        (cls(config) if weights else config).save_pretrained(str(folder))
    return folder


def reviews(n: int = 240, seed: int = 0) -> list[dict[str, Any]]:
    """Return texts of 4 to 9 words with a good or a bad one among them, its class, and one of six shops."""
    rng = Random(seed)
    rows = []
    for i in range(n):
        words = rng.choices(PLAIN, k=rng.randint(3, 8))
        words.insert(rng.randrange(len(words)), rng.choice(GOOD if i % 2 else BAD))
        rows.append({"text": " ".join(words), "label": i % 2, "shop": f"shop {i % 6}"})
    return rows


def in_two_languages(n: int = 900, clients: int = 6) -> list[dict[str, Any]]:
    """Return reviews of clients, half of whom write other words of the same meaning."""
    rows = reviews(n)
    for i, row in enumerate(rows):
        k = (i // 2) % clients
        other = [f"{word}x" for word in row["text"].split()]
        row |= {"shop": f"shop {k}", "language": "a" if k < clients // 2 else "b"}
        row["text"] = row["text"] if row["language"] == "a" else " ".join(other)
    return rows


def save_rows(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as JSON Lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def save_all(folder: Path, **options: Any) -> Path:
    """Write `bert` (a tiny BERT with its tokenizer) and `reviews` (train.jsonl, test.jsonl) into a folder."""
    save_model(folder / "bert", **options)
    save_tokenizer(folder / "bert")
    save_rows(folder / "reviews" / "train.jsonl", reviews())
    save_rows(folder / "reviews" / "test.jsonl", reviews(60, 1))
    return folder
