"""Models in the format of transformers, from a folder, with adapters in the format of PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from mpifl.core.errors import UserError, one_line, require
from mpifl.core.federation import CLASSES, MASKED, MULTI_HOT, NUMBERS, TAGS, TOKENS, DataInfo
from mpifl.core.files import same_folder
from mpifl.core.optional_packages import need_package, silent_transformers, transformers_package
from mpifl.core.parameters import frozen_names

from . import peft_files
from .base import ModelOptions, need_apart, seeded_model
from .lora import LoRA, adapt
from .pretrained import load_weights

if TYPE_CHECKING:
    from .huggingface_modules import SplitTransformers, Transformers, WholeTransformers

KEY, EXTRA = "model.path", "huggingface"
SEQUENCE, TOKEN, CAUSAL, HIDDEN = (
    "sequence_classification",
    "token_classification",
    "causal_lm",
    "masked_lm",
)
HEADS = {
    CLASSES: SEQUENCE,
    MULTI_HOT: SEQUENCE,
    NUMBERS: SEQUENCE,
    TAGS: TOKEN,
    TOKENS: CAUSAL,
    MASKED: HIDDEN,
}  # kind of labels -> head
AUTO = {
    SEQUENCE: "AutoModelForSequenceClassification",
    TOKEN: "AutoModelForTokenClassification",
    CAUSAL: "AutoModelForCausalLM",
    HIDDEN: "AutoModelForMaskedLM",
}  # head -> class of transformers
TASK_TYPES = {SEQUENCE: "SEQ_CLS", TOKEN: "TOKEN_CLS", CAUSAL: "CAUSAL_LM", HIDDEN: None}  # PEFT's words
BODY = "body.net."
BASE = "base"  # folder of the model without adapters, beside them
PROBED = 2  # samples on which a model is tried
_results: dict[Any, tuple[str, bool]] = {}  # of `HuggingFace._tried`


@dataclass(frozen=True)
class HuggingFace(ModelOptions):
    """A model of transformers for texts, from a folder that `save_pretrained` wrote.

    Nothing is fetched from a network, and no code of the folder is executed. Without weights in the folder,
    the model of its config.json is drawn. Tokens after the end of a text (`padding` of the tokenizer of
    `data.source`) are masked. Embedding = the input of the last layer.

    With `lora`, all linear layers but that of a language model's output get adapters. `layers` and `train`
    take the names of transformers, also their ends (`query`), as in PEFT. By default, `train` is the last
    layer of a classifier and all modules for which the folder holds no weights. The run folder gets the
    adapters in PEFT's format.

    `model.weights` takes tensors under the names of transformers, and for `lora` a folder of adapters that
    PEFT or an earlier run wrote.

    Attributes:
        path: folder with config.json and model.safetensors.
        head: sequence_classification, token_classification, causal_lm or masked_lm; null: the one for the
            labels of the source.
    """

    paper = "wolf2020transformers"

    takes: ClassVar[tuple[str, ...]] = (TOKENS,)

    path: str = ""
    head: Literal["sequence_classification", "token_classification", "causal_lm", "masked_lm"] | None = None

    def build_for(self, info: DataInfo) -> Any:
        """Return the network for tokens as in `info`, with its weights and adapters; see `ModelOptions`."""
        with same_folder():
            net = self.make_for(info)
        adapters = self.weights if self.starts_from_adapters else None
        if self.weights is not None and adapters is None:
            load_weights(net, self.weights, body=BODY, head=net.head_name)
        if self.lora.rank:
            need_package("peft", EXTRA, "model.lora.rank", self.lora.rank)
            lora, spared = self.adapted(net, info)
            net.frozen = adapt(net, lora, spared)
        if adapters is not None:
            peft_files.load_adapters(net, self.lora, adapters, BODY)
        return net

    @property
    def starts_from_adapters(self) -> bool:
        """Whether `weights` is a folder of adapters."""
        return self.weights is not None and Path(self.weights).expanduser().is_dir()

    def weight_files(self) -> tuple[str, ...]:
        """Return the files of the folder, and that of `weights` or of its adapters."""
        found = map(str, weights_of(Path(self.path).expanduser()))
        if self.weights is None:
            return tuple(found)
        file = (
            Path(self.weights).expanduser() / peft_files.FILE if self.starts_from_adapters else self.weights
        )
        return (*found, str(file))

    def _kind(self, info: DataInfo) -> str:
        return self.head or HEADS[info.labels]

    def adapted(self, net: Any, info: DataInfo) -> tuple[LoRA, tuple[str, ...]]:
        """Return which modules are adapted and trained, under their names in the network, and what is not.

        Args:
            net: the network, with or without adapters.
            info: format of samples and labels.

        Returns:
            The adapters, and the names of layers that no pattern of `layers` means.
        """
        lora, head = self.lora, net.head_name
        text = self._kind(info) in (CAUSAL, HIDDEN)
        train = lora.train if lora.train != LoRA().train else net.trained
        spared = ("head",) if text and not {head, head.rpartition(".")[2]} & {*lora.layers} else ()
        return replace(lora, train=_renamed(train, head), layers=_renamed(lora.layers, head)), spared

    def make_for(self, info: DataInfo) -> Any:
        """Return the network for tokens as in `info`, as its folder has it, in training mode."""
        from .huggingface_modules import Transformers, split

        transformers = transformers_package(EXTRA, "model.name", "huggingface")
        folder, kind = Path(self.path).expanduser(), self._kind(info)
        told = "holds no config.json: give a folder that save_pretrained of a model wrote"
        if (folder / peft_files.CONFIG).is_file():
            told = "holds adapters: give the folder of their model, and this one as model.weights"
        require(bool(self.path) and (folder / "config.json").is_file(), KEY, self.path, told)
        with silent_transformers():
            net, drawn, remarks = self._read(transformers, folder, kind, info)
        padding, second = info.token_of("padding"), info.token_of("second")
        typed = getattr(net.config, "type_vocab_size", 0) or 0
        own = net.config.get_text_config().pad_token_id
        body = Transformers(net, padding, second if typed > 1 else None, own)
        try:
            head, ahead = self._tried(body, folder, kind, info)
        except Exception as error:
            most = getattr(net.config, "max_position_embeddings", None)
            remedy = f"does not take {info.shape[0]} tokens ({one_line(f'{type(error).__name__}: {error}')})"
            long = most is not None and info.shape[0] > most - 2  # RoBERTa's begin at 2
            advice = f"; it has {most} positions: set data.source.length" if long else ""
            raise UserError(KEY, self.path, remedy + advice) from error
        remedy = "sees the tokens that it is to predict; use a model that is made for causal_lm"
        require(not ahead, "model.head", kind, remedy)
        made: SplitTransformers | WholeTransformers = split(body, head)
        need_apart(made, KEY, self.path)
        made.drawn, made.remarks = drawn, remarks
        made.trained = trained(made, kind in (CAUSAL, HIDDEN))
        return made

    @staticmethod
    def _tried(body: Transformers, folder: Path, kind: str, info: DataInfo) -> tuple[str, bool]:
        """Return the name of the head (empty: none), and whether outputs see what they are to predict.

        A run builds its model several times: the result is kept for the files of the folder and `info`.
        """
        from .huggingface_modules import head_of, looks_ahead

        states = [
            (str(file.resolve()), file.stat()) for file in (folder / "config.json", *weights_of(folder))
        ]
        known = (kind, info, *((name, about.st_size, about.st_mtime_ns) for name, about in states))
        if known not in _results:
            config: Any = body.net.config
            width = info.num_classes if kind in (SEQUENCE, TOKEN) else config.get_text_config().vocab_size
            text = next(t for t in range(info.vocabulary) if t not in dict(info.special).values())
            probe = torch.full((PROBED, info.shape[0]), text)
            probe[-1] = torch.arange(info.shape[0]) % info.vocabulary
            with torch.random.fork_rng(devices=[]):  # so that later draws do not depend on what is known
                ahead = kind == CAUSAL and info.shape[0] > 1 and looks_ahead(body, probe)
                _results[known] = head_of(body, width, probe), ahead
        return _results[known]

    def _read(
        self, transformers: Any, folder: Path, kind: str, info: DataInfo
    ) -> tuple[Any, frozenset[str], tuple[str, ...]]:
        """Return the model of transformers, what of it was drawn, and lines for the user about it."""
        auto, place = getattr(transformers, AUTO[kind]), str(folder)
        try:
            config = transformers.AutoConfig.from_pretrained(place, local_files_only=True)
            remedy = f"is of the kind {config.model_type}, which has no head for {kind} in transformers"
            require(type(config) in auto._model_mapping, KEY, self.path, remedy)
            text = config.get_text_config()
            remedy = f"knows {text.vocab_size} tokens, and the data have {info.vocabulary}; use its tokenizer"
            require(info.vocabulary <= text.vocab_size, KEY, self.path, remedy)
            if kind in (SEQUENCE, TOKEN):
                config.num_labels = info.num_classes
            if kind == CAUSAL and not config.is_encoder_decoder:
                config.is_decoder = True  # BERT as a causal model
            if text.pad_token_id is None:
                config.pad_token_id = text.pad_token_id = info.token_of("padding")
            config.use_cache = text.use_cache = False
            if not weights_of(folder):
                told = f"{KEY} = {self.path!r}: no weights there: the model is drawn with seed.model"
                net = auto.from_config(config, dtype=torch.float32)
                return net, frozenset(net.state_dict()), (told,)
            net, found = auto.from_pretrained(
                place,
                config=config,
                local_files_only=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:
            if isinstance(error, UserError):
                raise
            why = one_line(f"{type(error).__name__}: {error}")[:300]
            raise UserError(KEY, self.path, f"cannot be read with a head for {kind} ({why})") from error
        remarks = []
        lacks = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
        if lacks:
            more = f" (and {len(lacks) - 1} more)" if len(lacks) > 1 else ""
            remarks.append(f"{KEY} = {self.path!r}: {lacks[0]}{more} is not there: drawn with seed.model")
        if not info.special:
            remedy = "the data were made with none: give data.source.tokenizer"
            remarks.append(
                f"{KEY} = {self.path!r}: its weights know the tokens of its tokenizer, and {remedy}"
            )
        return net, frozenset(lacks), tuple(remarks)

    def own(self, net: Any) -> nn.Module:
        """Return the model of transformers."""
        module: nn.Module = net.whole()
        return module

    def export(
        self,
        folder: Path,
        models: Mapping[str, torch.Tensor],
        info: DataInfo,
        seed: int,
        ranks: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Write the adapters of models in PEFT's format, each to a folder below `folder`/adapters.

        The model without adapters is written beside them if its frozen weights were drawn.
        """
        if not self.lora.rank or not models:
            return
        net: Any = seeded_model(self, info, seed)
        place = folder / peft_files.FOLDER
        base, kind = Path(self.path).expanduser().resolve(), TASK_TYPES[self._kind(info)]
        frozen = {peft_files.published(name, net.head_name, BODY) for name in frozen_names(net)}
        if any(f"{peft_files.PREFIX}{name}" in frozen for name in net.drawn):
            plain: Any = seeded_model(replace(self, lora=LoRA(), weights=None), info, seed)
            base = (place / BASE).resolve()
            with silent_transformers():
                plain.whole().save_pretrained(str(base))
        lora, _ = self.adapted(net, info)
        for name, vector in models.items():
            rank = ranks.get(name, lora.rank)
            peft_files.save_adapters(net, lora, vector, place / name, str(base), kind, BODY, rank)


def weights_of(folder: Path) -> list[Path]:
    """Return the files of weights in the folder of a model; of two formats those that are read."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def trained(net: Any, text: bool) -> tuple[str, ...]:
    """Return which modules are trained whole beside adapters: a classifier, and what has no weights.

    Nothing is said to have no weights if nothing has.

    Args:
        net: the network before it gets adapters.
        text: whether it is a language model, whose last layer is trained only if it has no weights.
    """
    head = net.head_name
    inside = net.body.net.state_dict().keys()
    drawn = {name.rpartition(".")[0] for name in net.drawn} if inside - net.drawn else set()
    top = head.partition(".")[0]  # `classifier` of more than one layer
    several = not text and bool(head) and any(name.startswith(f"{top}.") for name in inside)
    last = bool(head) and (not text or head in drawn)
    return (*sorted(drawn - {head}), *([top] if several else []), *(["head"] if last else []))


def _renamed(patterns: tuple[str, ...], head: str) -> tuple[str, ...]:
    """Return names of modules in which the last layer, under its name in transformers, is `head`."""
    own = {head, head.rpartition(".")[2]}
    return tuple("head" if pattern in own and head else pattern for pattern in patterns)
