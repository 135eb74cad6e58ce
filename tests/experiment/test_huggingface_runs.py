"""Whole runs of tiny models of transformers with adapters: bytes, digests, adapters of the run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import texts, toy
from support.runs import SCRIPT
from support.texts import transformers

from mpifl import cli
from mpifl.results.reader import load

RANK, HEAD = 2, 16 * 2 + 2
# r (in + out) of the linear layers of BERT: query, key, value, output; two of the feed-forward part; pooler
NUMBERS = RANK * (2 * (4 * (16 + 16) + 2 * (16 + 32)) + (16 + 16)) + HEAD
METHODS = {
    "fedavg": ["--algorithm", "fedavg"],
    "ifca": ["--algorithm", "{name: ifca, num_clusters: 2}"],
    "hypcluster": ["--algorithm", "{name: hypcluster, num_clusters: 2}"],
    "ucfl": ["--algorithm", "{name: ucfl, noise_batch: 0.5}"],
    "emdcfl": ["--algorithm", "{name: emdcfl, sample_cap: 16, epsilon: 0.05}"],
    "cfl": ["--algorithm", "{name: cfl, warmup: 1, eps1: 100, eps2: 0}"],
    "pacfl": ["--algorithm", "pacfl"],
    "fedper": ["--algorithm", "fedper"],
    "ditto": ["--algorithm", "ditto"],
    "fedasync": ["--algorithm", "fedasync", "--policy", "every_arrival"],
    "whole": ["--algorithm", "fedper", "--model.lora.rank", "0"],
}


def options(folder: Path) -> list[str]:
    """Return the options of all runs."""
    model = f"{{name: huggingface, path: {folder}/bert, lora: {{rank: {RANK}}}}}"
    source = f"{{name: huggingface, path: {folder}/reviews, tokenizer: {folder}/bert}}"
    scenario = "{name: relations, permutes: labels, clients: 6, validation: 0.3}"
    local = "{epochs: 1, batch_size: 16, lr: 0.05}"
    return [
        *("--model", model, "--data.source", source, "--data.scenario", scenario, "--local", local),
        *("--rounds", "2", "--evaluation.every", "0", "--data.cache", str(folder / "cache")),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny BERT with reviews, and a wider one with reviews in two languages."""
    place = texts.save_all(tmp_path_factory.mktemp("texts"))
    words = (*texts.WORDS, *(f"{word}x" for word in texts.WORDS))
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": len(texts.SPECIAL) + len(words)}
    texts.save_model(place / "wide", **sizes, **still)
    texts.save_tokenizer(place / "wide", words)
    texts.save_rows(place / "languages" / "train.jsonl", texts.in_two_languages())
    texts.save_rows(place / "many" / "train.jsonl", texts.reviews(900))
    return place


def run(folder: Path, name: str, *more: str) -> Path:
    """Run a method in this process; return its run folder."""
    place = ["--output.folder", str(folder / "runs"), "--output.id", name, "--quiet"]
    assert cli.main(["run", "quickstart", *options(folder), *more, *place]) == 0
    return folder / "runs" / f"quickstart-{name}"


def summary(place: Path) -> dict[str, Any]:
    return json.loads((place / "summary.json").read_text())


@pytest.mark.in_turn
def test_only_adapters_travel_and_those_of_the_run_are_read_by_peft_alone(folder):
    from peft import PeftModel

    place = run(folder, "fedavg", *METHODS["fedavg"])
    told = summary(place)
    assert told["model_parameters"] == NUMBERS
    for way in ("up", "down"):
        assert (
            told[f"federation_bytes_{way}"] == told["federation_bytes_expected"][way] == 6 * 2 * 4 * NUMBERS
        )
    base = transformers().AutoModelForSequenceClassification.from_pretrained(folder / "bert")
    theirs = PeftModel.from_pretrained(base, place / "adapters" / "model-0").eval()
    merged = load(str(place)).model(client=3).eval()
    assert type(merged) is type(base)
    tokens = transformers().AutoTokenizer.from_pretrained(folder / "bert")
    given = tokens(["the room was fine", "dull film"], padding=True, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(merged(**given).logits, theirs(**given).logits, atol=1e-5, rtol=1e-4)
    again = run(folder, "again", *METHODS["fedavg"], "--model.weights", str(place / "adapters" / "model-0"))
    assert summary(again)["digest"] != told["digest"]


def test_a_client_of_a_smaller_rank_moves_and_serves_adapters_of_that_rank(folder):
    """Clients 0 to 2 have rank 1 of 2: half of the adapters' numbers, and r = 1 in PEFT."""
    from peft import PeftModel

    lora = f"{{rank: {RANK}, ranks: {{0-2: 1}}, average: product}}"
    model = f"{{name: huggingface, path: {folder}/bert, lora: {lora}}}"
    place = run(folder, "ranks", "--algorithm", "fedavg", "--model", model, "--output.client_models", "true")
    told, small = summary(place), (NUMBERS - HEAD) // RANK + HEAD
    for way in ("up", "down"):
        sent = 2 * 4 * 3 * (small + NUMBERS)
        assert told[f"federation_bytes_{way}"] == told["federation_bytes_expected"][way] == sent
    ran, transformer = load(str(place)), transformers()
    tokens = transformer.AutoTokenizer.from_pretrained(folder / "bert")
    given = tokens(["the room was fine", "dull film"], padding=True, return_tensors="pt")
    for client, rank in ((0, 1), (5, 2)):
        written = place / "adapters" / f"client-{client}"
        assert json.loads((written / "adapter_config.json").read_text())["r"] == rank
        base = transformer.AutoModelForSequenceClassification.from_pretrained(folder / "bert")
        theirs = PeftModel.from_pretrained(base, written).eval()
        with torch.no_grad():
            mine = ran.model(client=client).eval()(**given).logits
            torch.testing.assert_close(mine, theirs(**given).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.nightly
def test_methods_have_one_digest_for_any_number_of_ranks(folder, mpirun):
    runs = {name: [*options(folder), *more] for name, more in METHODS.items()}
    digests: dict[str, set[str]] = {name: set() for name in METHODS}
    for ranks in (1, 2, 3):
        out = folder / f"ranks-{ranks}"
        program = SCRIPT, "quickstart", out, json.dumps(runs)
        done = mpirun(ranks, *program, env=toy.PYTHONPATH, timeout=900)
        assert done.returncode == 0, done.stderr
        for name in METHODS:
            digests[name].add(summary(out / f"quickstart-{name}")["digest"])
    assert {name: len(found) for name, found in digests.items()} == dict.fromkeys(METHODS, 1)
    up = {
        name: summary(out / f"quickstart-{name}")["federation_bytes_up"] / (4 * 6 * 2)
        for name in ("fedper", "ditto", "cfl", "whole")
    }
    # embeddings of words, positions and segments; two norms and one of the embeddings; layers with biases
    whole = 16 * (len(texts.SPECIAL) + len(texts.WORDS) + 40 + 2) + 5 * 2 * 16 + 16 * 16 + 16
    whole += 2 * (4 * (16 * 16 + 16) + 16 * 32 + 32 + 32 * 16 + 16)
    assert up == {"fedper": NUMBERS - HEAD, "ditto": NUMBERS, "cfl": NUMBERS, "whole": whole}


LIT = '''
import lightning
import torch
import transformers


class Lit(lightning.LightningModule):
    """The model of a folder, by AdamW with a cosine over the visit."""

    def __init__(self, num_classes):
        super().__init__()
        auto = transformers.AutoModelForSequenceClassification
        self.net = auto.from_pretrained({path!r}, num_labels=num_classes)

    def forward(self, x):
        return self.net(input_ids=x, attention_mask=(x != {padding}).long()).logits

    def training_step(self, batch, number):
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        adamw = torch.optim.AdamW(self.parameters(), lr=0.01)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, self.trainer.estimated_stepping_batches)
        return [adamw], [{{"scheduler": cosine, "interval": "step"}}]
'''
ADAMW = ["--local.trainer", "{name: torch, optimizer: AdamW, lr: 0.01, scheduler: cosine}"]


@pytest.mark.nightly
def test_adamw_with_a_cosine_trains_alike_by_torch_and_by_lightning_on_any_number_of_ranks(folder, mpirun):
    """Both take the same steps: the models differ by rounding."""
    padding = texts.SPECIAL.index("[PAD]")
    (folder / "lit.py").write_text(LIT.format(path=str(folder / "wide"), padding=padding))
    model = f"{{name: huggingface, path: {folder}/wide, lora: {{rank: 0}}}}"
    whole = ["--model", model, *METHODS["fedavg"], *ADAMW]
    lit = ["--model", f"{{name: custom, path: '{folder}/lit.py:Lit'}}", *METHODS["fedavg"]]
    kept = ["--output.model", "true", "--data.source.tokenizer", f"{folder}/wide"]
    runs = {
        "torch": [*options(folder), *whole, *kept],
        "lightning": [*options(folder), *lit, "--local.trainer", "lightning", *kept],
    }
    digests: dict[str, set[str]] = {name: set() for name in runs}
    for ranks in (1, 2):
        out = folder / f"trainers-{ranks}"
        done = mpirun(ranks, SCRIPT, "quickstart", out, json.dumps(runs), env=toy.PYTHONPATH, timeout=600)
        assert done.returncode == 0, done.stderr
        for name in runs:
            digests[name].add(summary(out / f"quickstart-{name}")["digest"])
    assert {name: len(found) for name, found in digests.items()} == dict.fromkeys(runs, 1)
    one, two = (load(str(out / f"quickstart-{name}")).model(client=0) for name in runs)
    ours, theirs = one.state_dict(), two.net.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, atol=1e-4, rtol=1e-3)


def test_lightning_refuses_a_model_of_transformers_before_the_run(folder, capsys):
    place = ["--output.folder", str(folder / "runs"), "--output.id", "no", "--quiet"]
    assert cli.main(["run", "quickstart", *options(folder), "--local.trainer", "lightning", *place]) == 2
    assert "give one as model custom" in capsys.readouterr().err.splitlines()[-1]
    assert not (folder / "runs" / "quickstart-no").exists()


PERMUTED, NATURAL = "{name: relations, permutes: labels, clients: 6}", "{name: natural, validation: 0.3}"
SCENARIOS = {  # method -> its options, data, their columns, scenario, rounds
    "ifca": ("num_clusters: 2", "many", "", PERMUTED, "4"),
    "emdcfl": ("epsilon: 0.006", "languages", ", client: shop, group: language", NATURAL, "2"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("method", SCENARIOS)
def test_two_groups_of_texts_are_found_through_adapters(folder, method):
    """IFCA tells clients apart who mean the opposite by a class, EMD-CFL those who write in two languages."""
    given, data, columns, scenario, rounds = SCENARIOS[method]
    source = f"{{name: huggingface, path: {folder}/{data}, tokenizer: {folder}/wide{columns}}}"
    place = run(
        folder,
        f"groups-{method}",
        *("--algorithm", f"{{name: {method}, {given}}}", "--rounds", rounds, "--data.source", source),
        *("--model", f"{{name: huggingface, path: {folder}/wide, lora: {{rank: 8}}}}"),
        *("--data.scenario", scenario),
        *("--local", "{epochs: 5, batch_size: 8, lr: 0.003, optimizer: adam, momentum: 0}"),
    )
    assert summary(place)["ari"] == 1.0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("task", "model", "source"),
    [
        ("next_token", "GPT2LMHeadModel", "labels: next"),
        ("masked_token", "BertForMaskedLM", "labels: masked"),
        ("token_classification", "BertForTokenClassification", "path: FOLDER/tagged"),
    ],
)
def test_other_heads_learn(folder, task, model, source):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40} if "GPT2" in model else {}
    texts.save_model(folder / task, model, **sizes)
    rows = [
        {"tokens": row["text"].split(), "ner_tags": [int(w in texts.GOOD) for w in row["text"].split()]}
        for row in texts.reviews()
    ]
    texts.save_rows(folder / "tagged" / "train.jsonl", rows)
    given = f"{{name: huggingface, path: {folder}/reviews, tokenizer: {folder}/bert, {source}}}"
    given = given.replace(f"path: {folder}/reviews, ", "") if "FOLDER" in given else given
    rank, losses = 8 if task == "token_classification" else 0, []
    for rounds in ("1", "6"):
        place = run(
            folder,
            f"{task}-{rounds}",
            *("--algorithm", "fedavg", "--task", task, "--data.source", given.replace("FOLDER", str(folder))),
            *("--data.scenario", "{name: iid, clients: 4}", "--rounds", rounds),
            *("--model", f"{{name: huggingface, path: {folder}/{task}, lora: {{rank: {rank}}}}}"),
            *("--local", "{epochs: 2, batch_size: 8, lr: 0.01, optimizer: adam, momentum: 0}"),
        )
        losses.append(_loss(place))
    assert np.isfinite(losses).all()
    assert losses[1] < losses[0]
    assert losses[1] < 0.96 * np.log(summary(place)["num_classes"])  # of a guess among all


def _loss(place: Path) -> float:
    rows = load(str(place)).metrics
    return float(rows["loss"].iloc[-1])
