"""Models in the format of transformers: heads, padding, adapters in PEFT's format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import texts
from support.texts import transformers

from mpifl.aggregation.low_rank import AdapterColumns, nearest
from mpifl.core.errors import UserError
from mpifl.core.federation import DataInfo
from mpifl.core.flat_model import FlatModel
from mpifl.core.parameters import Layout, VectorParts, flatten
from mpifl.models import LoRA, ModelOptions, adapters_of, build_model, huggingface_modules, seeded_model
from mpifl.models.huggingface import HuggingFace

T, V = 10, len(texts.SPECIAL) + len(texts.WORDS)
SPECIAL = (("padding", 0), ("mask", 4), ("class", 2), ("separator", 3), ("unknown", 1))
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40, "bos_token_id": 2, "eos_token_id": 3}
KINDS = {  # name -> class of transformers, its options, labels, outputs, name of its head
    "bert": ("BertForSequenceClassification", {}, "classes", 2, "classifier"),
    "tags": ("BertForTokenClassification", {"num_labels": 3}, "tags", 3, "classifier"),
    "masked": ("BertForMaskedLM", {}, "masked_tokens", V, "cls.predictions.decoder"),
    "gpt2": ("GPT2LMHeadModel", GPT2, "tokens", V, "lm_head"),
    "roberta": ("RobertaForSequenceClassification", {}, "classes", 2, "classifier.out_proj"),
}


def info_of(labels: str = "classes", outputs: int = 2, special: tuple = SPECIAL) -> DataInfo:
    return DataInfo((T,), outputs, "tokens", labels, V, special=special)


def sample() -> torch.Tensor:
    """Return tokens of four texts, two of which end early."""
    x = torch.from_numpy(np.random.default_rng(0).integers(5, V, (4, T)))
    x[:, 0] = 2
    x[0, 6:], x[1, 3:] = 0, 0
    return x


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the models of `KINDS`."""
    place = tmp_path_factory.mktemp("models")
    for name, (kind, options, *_) in KINDS.items():
        texts.save_model(place / name, kind, **options)
    return place


def built(folder: Path, name: str, **options):
    _, _, labels, outputs, _ = KINDS[name]
    model = HuggingFace(path=str(folder / name), **options)
    return model, build_model(model, info_of(labels, outputs)).eval()


@pytest.mark.in_turn
@pytest.mark.parametrize("name", KINDS)
def test_a_model_computes_what_transformers_computes_and_its_head_is_found(folder, name):
    kind, _, labels, outputs, head = KINDS[name]
    _, net = built(folder, name)
    x = sample()
    theirs = getattr(transformers(), kind).from_pretrained(folder / name).eval()
    lengths = [6, 3, T, T]
    with torch.no_grad():
        found, embedded = net(x), net.embed(x)
        for i, length in enumerate(lengths):  # alone and without padding
            alone = theirs(input_ids=x[i : i + 1, :length]).logits[0]
            mine = found[i] if labels == "classes" else found[i, :length]
            torch.testing.assert_close(mine, alone, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(net.head(embedded), found)
    assert net.head_name == head
    assert found.shape == ((4, outputs) if labels == "classes" else (4, T, outputs))
    assert net.remarks == ()


def test_the_head_of_another_number_of_classes_is_drawn_with_the_model_seed(folder):
    model = HuggingFace(path=str(folder / "bert"))
    nets = [seeded_model(model, info_of(outputs=3), 5, j) for j in (0, 0, 1)]
    heads = [net.head.weight for net in nets]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    bodies = [flatten(net)[: -heads[0].numel() - 3] for net in nets]
    assert torch.equal(bodies[0], bodies[2])
    assert "classifier.bias (and 1 more) is not there" in nets[0].remarks[0]


def test_a_config_alone_is_drawn_and_a_folder_of_two_seeds_differs(tmp_path):
    texts.save_model(tmp_path / "bert", weights=False)
    model = HuggingFace(path=str(tmp_path / "bert"))
    one, other = (flatten(seeded_model(model, info_of(), seed)) for seed in (0, 1))
    assert not torch.equal(one, other)
    assert "the model is drawn with seed.model" in build_model(model, info_of()).remarks[0]


def test_a_model_is_tried_once_for_the_files_of_a_folder_and_a_form_of_the_data(tmp_path, monkeypatch):
    texts.save_model(tmp_path / "gpt2", "GPT2LMHeadModel", **GPT2)
    tried: list[int] = []
    find = huggingface_modules.head_of
    monkeypatch.setattr(huggingface_modules, "head_of", lambda *given: tried.append(1) or find(*given))
    nets = [built(tmp_path, "gpt2")[1] for _ in range(2)]
    assert len(tried) == 1
    assert nets[0].head_name == nets[1].head_name == "lm_head"
    assert [n for n, _ in nets[0].named_parameters()] == [n for n, _ in nets[1].named_parameters()]
    with torch.no_grad():
        torch.testing.assert_close(nets[0](sample()), nets[1](sample()), atol=0, rtol=0)
    assert seeded_model(HuggingFace(path=str(tmp_path / "gpt2")), info_of("tokens", V), 0).training
    config = tmp_path / "gpt2" / "config.json"
    config.write_text(config.read_text() + " ")
    built(tmp_path, "gpt2")
    assert len(tried) == 2


def test_padding_inside_of_a_text_is_text_and_an_empty_text_has_an_output(folder):
    _, net = built(folder, "gpt2")
    x = sample()
    x[2, 4] = 0
    given = net.body.inputs(x)["attention_mask"]
    assert given.sum(1).tolist() == [6, 3, T, T]
    empty = torch.zeros(2, T, dtype=torch.int64)
    with torch.no_grad():
        assert bool(torch.isfinite(net(empty)).all())


def test_the_second_text_of_a_pair_has_the_segment_that_the_tokenizer_gives(folder):
    model = HuggingFace(path=str(folder / "bert"))
    net = build_model(model, info_of(special=(*SPECIAL, ("second", 3))))
    x = torch.tensor([[2, 5, 6, 3, 7, 8, 3, 0, 0, 0]])
    assert net.body.inputs(x)["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 0, 0, 0]]


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_model_whose_output_is_no_linear_layer_is_refused_only_where_a_head_is_needed(tmp_path):
    small = {"embedding_size": 16, "intra_bottleneck_size": 8, "true_hidden_size": 8}
    texts.save_model(tmp_path / "mobile", "MobileBertForMaskedLM", **small)
    net = build_model(HuggingFace(path=str(tmp_path / "mobile")), info_of("masked_tokens", V))
    assert net(sample()).shape == (4, T, V)
    assert net.embed(sample()).shape == (4, 16)
    with pytest.raises(UserError, match="a network without `head`"):
        Layout.of(net).part("head")


REFUSED = {
    "no folder": ({"path": "nowhere"}, info_of(), "holds no config.json"),
    "no head": ({"path": "gpt2", "head": "masked_lm"}, info_of(), "is of the kind gpt2, which has no head"),
    "too many tokens": ({"path": "bert"}, replace(info_of(), vocabulary=V + 1), f"knows {V} tokens"),
    "too long": ({"path": "bert"}, replace(info_of(), shape=(41,)), "it has 40 positions"),
    "images": ({"path": "bert"}, DataInfo((1, 8, 8), 10), "takes tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(folder, monkeypatch, case):
    options, info, message = REFUSED[case]
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=message) as found:
        build_model(HuggingFace(**options), info)
    assert "\n" not in str(found.value)


# -- adapters ------------------------------------------------------------------------------------------------


def moved(net: torch.nn.Module, seed: int = 1) -> torch.Tensor:
    """Return a vector of a model in which adapters do something."""
    vector = flatten(net)
    return vector + 0.2 * torch.from_numpy(np.random.default_rng(seed).normal(size=len(vector))).float()


@pytest.mark.parametrize(
    ("name", "numbers"), [("bert", 994), ("gpt2", 1024), ("roberta", 1202), ("tags", 947)]
)
def test_saved_adapters_give_the_same_logits_in_peft_alone_and_can_be_read_again(
    folder, tmp_path, name, numbers
):
    from peft import PeftModel

    kind, _, labels, outputs, _ = KINDS[name]
    model, net = built(folder, name, lora=LoRA(rank=2, alpha=3))
    vector, x = moved(net), sample()
    assert len(vector) == numbers  # r (in + out) of each linear layer, and the head of a classifier
    model.export(tmp_path, {"model-0": vector}, info_of(labels, outputs), 0)
    place = tmp_path / "adapters" / "model-0"
    base = getattr(transformers(), kind).from_pretrained(folder / name)
    theirs = PeftModel.from_pretrained(base, place).eval()
    net = FlatModel(net).load(vector, train=False)
    with torch.no_grad():
        expected = theirs(**net.body.inputs(x)).logits
        torch.testing.assert_close(net(x), expected, atol=1e-5, rtol=1e-4)
        again = build_model(replace(model, weights=str(place)), info_of(labels, outputs)).eval()
        torch.testing.assert_close(flatten(again), vector, rtol=0, atol=0)
    assert json.loads((place / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        folder / name
    )


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_adapters_of_a_smaller_rank_have_it_in_peft(folder, tmp_path, name):
    """alpha / r is that of the run for all clients: 3 / 4 is 1.5 / 2 in PEFT, with the own rank."""
    from peft import PeftModel

    kind, _, labels, outputs, _ = KINDS[name]
    model, net = built(folder, name, lora=LoRA(rank=4, alpha=3))
    layout = Layout.of(net)
    columns = AdapterColumns(layout, [*adapters_of(net)], VectorParts(layout))
    vector, x = moved(net).masked_fill(columns.beyond("model", layout.size, 2), 0.0), sample()
    model.export(tmp_path, {"client-3": vector}, info_of(labels, outputs), 0, {"client-3": 2})
    place = tmp_path / "adapters" / "client-3"
    told = json.loads((place / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"]) == (2, 1.5)
    base = getattr(transformers(), kind).from_pretrained(folder / name)
    theirs = PeftModel.from_pretrained(base, place).eval()
    assert {m.shape[0] for n, m in theirs.named_parameters() if "lora_A" in n} == {2}
    net = FlatModel(net).load(vector, train=False)
    with torch.no_grad():
        torch.testing.assert_close(net(x), theirs(**net.body.inputs(x)).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_mean_products_are_those_of_peft(folder, tmp_path, name):
    """PEFT combines adapters of ranks 1, 2 and 2 itself: concatenated, and by its SVD in rank 2."""
    from peft import PeftModel

    kind, _, labels, outputs, _ = KINDS[name]
    rank, ranks, weights = 2, (1, 2, 2), [0.5, 0.3, 0.2]
    lora = LoRA(rank=rank, alpha=3, train=())
    model, net = built(folder, name, lora=lora)
    layout = Layout.of(net)
    columns = AdapterColumns(layout, [*adapters_of(net)], VectorParts(layout))
    uploads = torch.stack([moved(net, seed) for seed in range(3)])
    for row, r in zip(uploads, ranks, strict=True):
        lacks = columns.beyond("model", layout.size, r)
        row.masked_fill_(torch.zeros_like(row, dtype=torch.bool) if lacks is None else lacks, 0.0)
    names = [f"client-{i}" for i in range(3)]
    of_names = dict(zip(names, ranks, strict=True))
    model.export(tmp_path, dict(zip(names, uploads, strict=True)), info_of(labels, outputs), 0, of_names)
    base = getattr(transformers(), kind).from_pretrained(folder / name)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapters" / names[0], adapter_name=names[0])
    for other in names[1:]:
        theirs.load_adapter(tmp_path / "adapters" / other, adapter_name=other)
    theirs.add_weighted_adapter(names, weights, "cat", combination_type="cat")
    theirs.add_weighted_adapter(names, weights, "svd", combination_type="svd", svd_rank=rank)
    pairs = zip(adapters_of(net).items(), columns.factors("model", layout.size), strict=True)
    for (layer, own), f in pairs:
        a, b = f.take(uploads)
        left = (b * torch.tensor(weights)[:, None, None]).permute(1, 0, 2).flatten(1)
        stacked = a.flatten(0, 1)
        place = f"base_model.model.{layer.removeprefix('body.net.')}"
        module = theirs.get_submodule("base_model.model.classifier" if layer == "head" else place)
        scale = 3 / rank
        for kind_of, found in (
            ("cat", left.double() @ stacked.double()),
            ("svd", (best := nearest(left, stacked, rank, stacked[:0])).b @ best.a),
        ):
            wanted = module.get_delta_weight(kind_of).double()
            wanted = wanted.T if own.transposed else wanted
            torch.testing.assert_close(scale * found, wanted, atol=1e-5, rtol=1e-4)


def test_adapters_that_peft_wrote_are_read(folder, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = transformers().AutoModelForSequenceClassification.from_pretrained(folder / "bert")
    torch.manual_seed(0)
    options = {"r": 2, "lora_alpha": 8, "target_modules": ["query", "value"], "init_lora_weights": False}
    theirs = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", **options)).eval()
    theirs.save_pretrained(tmp_path)
    lora = LoRA(rank=2, alpha=8, layers=("query", "value"))
    _, net = built(folder, "bert", lora=lora, weights=str(tmp_path))
    x = sample()
    with torch.no_grad():
        torch.testing.assert_close(net(x), theirs(**net.body.inputs(x)).logits, atol=1e-5, rtol=1e-4)
    for other, message in (
        (LoRA(rank=3, alpha=8, layers=("query",)), "rank 2 and alpha 8"),
        (LoRA(rank=2, alpha=8), r"is not there.*set model\.lora\.layers"),
    ):
        with pytest.raises(UserError, match=message):
            built(folder, "bert", lora=other, weights=str(tmp_path))
    with pytest.raises(UserError, match=r"set model\.lora"):
        built(folder, "bert", weights=str(tmp_path))


def test_drawn_weights_that_stay_frozen_are_written_beside_the_adapters(tmp_path):
    from peft import PeftModel

    texts.save_model(tmp_path / "bert", weights=False)
    model = HuggingFace(path=str(tmp_path / "bert"), lora=LoRA(rank=2))
    net = seeded_model(model, info_of(), 3)
    vector, x = moved(net), sample()
    model.export(tmp_path, {"model-1": vector}, info_of(), 3)
    base = transformers().AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapters" / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapters" / "model-1").eval()
    net = FlatModel(net).load(vector, train=False)
    with torch.no_grad():
        expected = theirs(**net.body.inputs(x)).logits
        torch.testing.assert_close(net(x), expected, atol=1e-5, rtol=1e-4)


def test_modules_without_weights_are_trained_whole_and_a_language_head_is_not(folder, tmp_path):
    base = transformers().RobertaModel.from_pretrained(folder / "roberta")
    base.save_pretrained(tmp_path / "body")
    model = HuggingFace(path=str(tmp_path / "body"), lora=LoRA(rank=2))
    names = Layout.of(build_model(model, info_of())).names
    whole = {n for n in names if "lora" not in n}
    assert whole == {f"body.net.classifier.dense.{n}" for n in ("weight", "bias")} | {
        "head.weight",
        "head.bias",
    }
    _, text = built(folder, "gpt2", lora=LoRA(rank=2))
    assert all("lora" in n for n in Layout.of(text).names)
    _, text = built(folder, "gpt2", lora=LoRA(rank=2, train=("lm_head",)))
    assert Layout.of(text).tied == (("body.net.transformer.wte.weight", "head.weight"),)


def test_the_model_of_a_run_is_that_of_transformers_with_merged_adapters(folder):
    model, net = built(folder, "gpt2", lora=LoRA(rank=2))
    vector, x = moved(net), sample()[2:]
    net = FlatModel(net).load(vector, train=False)
    assert isinstance(model, ModelOptions)
    whole = model.merged(net, info_of("tokens", V)).whole()
    assert type(whole).__name__ == "GPT2LMHeadModel"
    with torch.no_grad():
        torch.testing.assert_close(whole(input_ids=x).logits, net(x), atol=1e-5, rtol=1e-4)


def test_without_transformers_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setattr("mpifl.core.optional_packages.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'needs transformers: pip install "mpifl\[huggingface\]"'):
        built(folder, "bert")


def test_a_tied_last_layer_that_is_trained_is_the_same_in_peft(folder, tmp_path):
    from peft import PeftModel

    model, net = built(folder, "gpt2", lora=LoRA(rank=2, train=("lm_head",)))
    vector, x = moved(net), sample()[2:]
    model.export(tmp_path, {"model-0": vector}, info_of("tokens", V), 0)
    base = transformers().GPT2LMHeadModel.from_pretrained(folder / "gpt2")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapters" / "model-0").eval()
    with torch.no_grad():
        expected = FlatModel(net).load(vector, train=False)(x)
        torch.testing.assert_close(theirs(input_ids=x).logits, expected, atol=1e-5, rtol=1e-4)
