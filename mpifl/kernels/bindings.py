"""Python bindings of the C kernels.

There are three libraries: exact sums and pooling (reductions.c), training of networks (training.c), and
layers of wide networks (channels_last.c). They are built if a C compiler is available when mpifl is
installed. Check `AVAILABLE` before calling `exact_sum_add`, `exact_sum_finish`, `max_abs` or pooling: these
return the same bits as the PyTorch code that replaces them elsewhere. Check `TRAINING_AVAILABLE` before
calling `forward`, `train`, `sgd_step` or `convolve`: their last bits differ from PyTorch's. Libraries built
from sources other than the ones beside this file are not used; `BUILD` describes the libraries in use, and
`PROBLEM` says why there are none.

Every function checks the type, device, memory layout and length of its tensors and raises `ValueError` if
they do not fit, because C code that reads beyond the end of a tensor returns wrong numbers without an error.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_float, c_int
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mpifl.core.devices import CPU

FOLDER = Path(__file__).parent
SOURCES = (  # setup.py hashes them in this order
    *("common.h", "dispatch.h", "reductions.c", "training.c", "training_simd.inc"),
    *("channels_last.c", "channels_last_simd.inc"),
)
VERSION = 10  # version of the signatures below; as in common.h
REINSTALL = "install mpifl again where there is a C compiler (pip install -e . in a checkout)"

Pointer, Size = ctypes.c_void_p, ctypes.c_ssize_t
Signature = tuple[Any, list[Any]]  # result, arguments
Signatures = Mapping[str, Signature]

# Names lack the prefix mpifl_; the comments list C's parameter names.
COMMON: Signatures = {"version": (c_int, []), "build": (ctypes.c_char_p, [])}
REDUCTIONS: Signatures = {
    # sums, uploads, weights, magic; rows, num, width
    "exact_sum_add": (None, [Pointer, Pointer, Pointer, Pointer, Size, Size, Size]),
    # sums, spacing, kept, out, count
    "exact_sum_finish": (None, [Pointer, c_double, Pointer, Pointer, Size]),
    # x, count
    "max_abs": (c_float, [Pointer, Size]),
    # x, out, index, lines, width
    "max_pool2x2": (None, [Pointer, Pointer, Pointer, Size, Size]),
    # grad, index, out, lines, width
    "max_pool2x2_backward": (None, [Pointer, Pointer, Pointer, Size, Size]),
    # x, out, index, lines, width, channels
    "max_pool2x2_last": (None, [Pointer, Pointer, Pointer, Size, Size, Size]),
    # grad, index, out, lines, width, channels
    "max_pool2x2_last_backward": (None, [Pointer, Pointer, Pointer, Size, Size, Size]),
    # x, out, lines, width
    "avg_pool2x2": (None, [Pointer, Pointer, Size, Size]),
    # grad, out, lines, width
    "avg_pool2x2_backward": (None, [Pointer, Pointer, Size, Size]),
}
NETWORK = [Pointer, Size]  # layers, num_layers
RATES = [c_float, c_float, c_float]  # lr, momentum_factor, weight_decay
WORKSPACE = [Pointer, Size]  # workspace, size
TRAINING: Signatures = {
    "supported": (c_int, []),
    # on
    "use_narrow_vectors": (None, [c_int]),
    "layer_size": (Size, []),
    # layers, num_layers, max_batch
    "workspace_size": (Size, [*NETWORK, Size]),
    # layers, num_layers; weights, x, y; count, batch; workspace, size
    "forward": (c_int, [*NETWORK, Pointer, Pointer, Pointer, Size, Size, *WORKSPACE]),
    # layers, num_layers; weights, momentum, grad; x, labels, sample_weights, samples; order, factors, count,
    # batch; lr, momentum_factor, weight_decay; steps_done, last; workspace, size; loss
    "train": (
        c_int,
        [
            *NETWORK,
            *(Pointer, Pointer, Pointer),
            *(Pointer, Pointer, Pointer, Size),
            *(Pointer, Pointer, Size, Size),
            *RATES,
            *(Size, c_int),
            *WORKSPACE,
            Pointer,
        ],
    ),
    "visit_size": (Size, []),
    # layers, num_layers; parameters, visits, num_visits; table, channels; order, batch;
    # lr, momentum_factor, weight_decay; proximal, mu, change; momentum; workspace, size
    "train_visits": (
        c_int,
        [
            *(*NETWORK, Size, Pointer, Size, Pointer, Size, Pointer, Size),
            *(*RATES, c_int, c_float, c_int, Pointer, *WORKSPACE),
        ],
    ),
    # layers, num_layers; visits, num_visits; weights, num_models; table, channels; order, batch; outputs;
    # workspace, size
    "visit_outputs": (
        c_int,
        [*NETWORK, Pointer, Size, Pointer, Size, Pointer, Size, Pointer, Size, Pointer, *WORKSPACE],
    ),
    # entropy, sizes, count, out
    "permutations": (None, [Pointer, Pointer, Size, Pointer]),
    # weights, momentum, grad, count; lr, momentum_factor, weight_decay; steps_done
    "sgd_step": (None, [Pointer, Pointer, Pointer, Size, *RATES, Size]),
}
CONVOLUTION = [Size] * 7  # n, height, width, in, out, taps, margin
CHANNELS_LAST: Signatures = {
    "supported": (c_int, []),
    # on
    "use_narrow_vectors": (None, [c_int]),
    # in, out
    "convolve_workspace": (Size, [Size, Size]),
    # x, w, bias, y; n, height, width, in, out, taps, margin; flip, workspace
    "convolve": (None, [Pointer, Pointer, Pointer, Pointer, *CONVOLUTION, c_int, Pointer]),
    # g, w, gx; n, height, width, in, out, taps, margin; workspace
    "convolve_input_grad": (None, [Pointer, Pointer, Pointer, *CONVOLUTION, Pointer]),
    # x, g, gw; n, height, width, in, out, taps, margin; workspace
    "convolve_kernels_grad": (None, [Pointer, Pointer, Pointer, *CONVOLUTION, Pointer]),
}

STRIP = 32  # numbers of channels are multiples of it; as in channels_last.c
TILE_SIDES = {3: 4, 5: 2}  # side of the kernels -> side of a tile in pixels; as in channels_last.c
MAX_POOL_WIDTH = 2048  # pixels in a row of an image
CONV, RELU, MAX_POOL, AVG_POOL, RELU_AVG_POOL, FLATTEN, DENSE, DROPOUT = range(8)  # Layer.kind, as in C
BAD_LABEL, BAD_INDEX, SMALL_WORKSPACE = -1, -2, -3  # errors; as in training.c


class Layer(NamedTuple):
    """One layer of a network, as `struct layer` in training.c.

    Attributes:
        kind: one of `CONV`, `RELU`, `MAX_POOL`, `AVG_POOL`, `RELU_AVG_POOL` (ReLU, then average pooling),
            `FLATTEN`, `DENSE`, `DROPOUT`.
        in_channels: channels of the input; inputs of a dense layer.
        in_height: pixels; 1 for a dense layer.
        in_width: pixels; 1 for a dense layer.
        out_channels: channels of the output of a convolution; outputs of a dense layer; for dropout, the
            factors drawn per sample: one for each number of a row, or one for each channel of an image.
        kernel: side of the kernel of a convolution.
        padding: pixels on each side of the input of a convolution.
        weight_offset: index of the first weight in the flat parameter vector.
        bias_offset: index of the first bias in the flat parameter vector.
        trainable: 1 if the layer is trained, 0 if it is frozen.
    """

    kind: int
    in_channels: int
    in_height: int = 1
    in_width: int = 1
    out_channels: int = 0
    kernel: int = 1
    padding: int = 0
    weight_offset: int = 0
    bias_offset: int = 0
    trainable: int = 0


LAYER = np.dtype([(field, np.int64) for field in Layer._fields])
VISIT = np.dtype(  # as `struct visit` in training.c, which explains the fields
    [
        *((field, np.int64) for field in ("start", "weights", "x", "labels")),  # addresses
        *((field, np.int64) for field in ("samples", "first", "count", "epoch")),
        *((field, np.float64) for field in ("loss", "max_abs")),
    ]
)
Sgd = tuple[float, float, float]  # learning rate, momentum, weight decay


class Unavailable(Exception):
    """A library is not used; the message says why."""


def hash_of_sources(folder: Path = FOLDER) -> str:
    """Return the hash of the C sources in a folder; empty if they are missing, as in an installed wheel."""
    files = [folder / name for name in SOURCES]
    if not all(file.is_file() for file in files):
        return ""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _open(name: str, signatures: Signatures, sources: str) -> ctypes.CDLL:
    """Load a library and declare its signatures.

    Args:
        name: file name without suffix.
        signatures: the functions to declare.
        sources: hash of the sources it must be built from; empty for any.

    Raises:
        Unavailable: the library is missing, does not load, or was built from other sources.
    """
    path = next((p for s in EXTENSION_SUFFIXES if (p := FOLDER / f"{name}{s}").is_file()), None)
    if path is None:
        raise Unavailable(f"the C kernels were not built: {REINSTALL}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the C kernels do not load ({error}): {REINSTALL}") from error
    try:
        for function, (result, arguments) in {**COMMON, **signatures}.items():
            entry = getattr(library, f"mpifl_{function}")
            entry.restype, entry.argtypes = result, arguments
        same = library.mpifl_version() == VERSION and sources in ("", _build_of(library)["sources"])
        if "layer_size" in signatures:
            same = same and library.mpifl_layer_size() == LAYER.itemsize
            same = same and library.mpifl_visit_size() == VISIT.itemsize
    except AttributeError:
        same = False
    if not same:
        raise Unavailable(f"the C kernels were built from other sources than those in use: {REINSTALL}")
    return library


def _build_of(library: ctypes.CDLL) -> dict[str, str]:
    """Return what a library was built from: `sources` (their hash), `flags`, `compiler`."""
    sources, _, rest = library.mpifl_build().decode(errors="replace").partition("|")
    flags, _, compiler = rest.rpartition("|")
    compiler = f"gcc {compiler}" if compiler[:1].isdigit() else compiler  # other compilers name themselves
    return {"sources": sources, "flags": flags, "compiler": compiler}


def _open_all() -> tuple[dict[str, ctypes.CDLL], str]:
    """Return all libraries by name, or none and the reason."""
    try:
        sources = hash_of_sources()
        return {name: _open(name, signatures, sources) for name, signatures in LIBRARIES.items()}, ""
    except Unavailable as why:
        return {}, str(why)


LIBRARIES = {"reductions": REDUCTIONS, "training": TRAINING, "channels_last": CHANNELS_LAST}
_OPEN, PROBLEM = _open_all()
BUILD: dict[str, str] = _build_of(_OPEN["training"]) if _OPEN else {}  # sources, flags, compiler
AVAILABLE = bool(_OPEN)
TRAINING_AVAILABLE = AVAILABLE and bool(_OPEN["training"].mpifl_supported())
_FUNCTIONS = {
    name: getattr(library, f"mpifl_{name}")
    for of, library in _OPEN.items()
    for name in LIBRARIES[of]
    if name not in ("supported", "use_narrow_vectors")
}
if AVAILABLE and not TRAINING_AVAILABLE:
    PROBLEM = "this processor has no fused multiply-add, which the training kernels need"


def _call(name: str, *arguments: object) -> Any:
    assert AVAILABLE, "check AVAILABLE or TRAINING_AVAILABLE first"
    return _FUNCTIONS[name](*arguments)


def _tensor(x: torch.Tensor, name: str, dtype: torch.dtype = torch.float32, numel: int | None = None) -> int:
    """Return the address of a tensor.

    Raises:
        ValueError: it is not a contiguous CPU tensor of `dtype` with `numel` elements.
    """
    fits = x.dtype is dtype and x.device == CPU and x.is_contiguous() and numel in (None, x.numel())
    if not fits:
        length = "" if numel is None else f" of {numel} numbers"
        found = f"{x.dtype} {list(x.shape)} on {x.device}{'' if x.is_contiguous() else ', not contiguous'}"
        raise ValueError(f"{name} must be a contiguous {dtype} tensor{length} on the CPU, got {found}")
    return x.data_ptr()


def _array(x: np.ndarray, name: str, dtype: type | np.dtype, size: int | None = None) -> int:
    """Return the address of an array.

    Raises:
        ValueError: it is not a contiguous array of `dtype` with `size` elements.
    """
    if x.dtype != dtype or not x.flags.c_contiguous or size not in (None, x.size):
        length = "" if size is None else f" of {size} numbers"
        wanted = "Layer" if dtype is LAYER else np.dtype(dtype)
        raise ValueError(f"{name} must be a contiguous {wanted} array{length}, got {x.dtype} {x.shape}")
    return x.ctypes.data


# -- exact sums ----------------------------------------------------------------------------------------------


def exact_sum_add(
    sums: torch.Tensor, uploads: Sequence[torch.Tensor], weights: np.ndarray, magic: np.ndarray
) -> None:
    """Add weighted uploads to grid sums, each term rounded to its row's grid; see `aggregation.exact_sum`.

    Args:
        sums: int64 [K, b], contiguous; updated in place.
        uploads: m tensors, float32 [b].
        weights: float64 [K, m].
        magic: 1.5 * 2^52 times the grid spacing of each row, float64 [K].

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    weights, magic = np.ascontiguousarray(weights, np.float64), np.ascontiguousarray(magic, np.float64)
    rows, width = sums.shape
    uploads = [u.contiguous() for u in uploads]
    pointers = (Pointer * len(uploads))(*(_tensor(u, "an upload", numel=width) for u in uploads))
    arguments = (
        _tensor(sums, "sums", torch.int64),
        pointers,
        _array(weights, "weights", np.float64, rows * len(uploads)),
        _array(magic, "magic", np.float64, rows),
    )
    _call("exact_sum_add", *arguments, rows, len(uploads), width)


def exact_sum_finish(sums: torch.Tensor, spacing: np.ndarray, kept: torch.Tensor | None) -> torch.Tensor:
    """Return sums * spacing + kept, computed in float64, as float32 [K, b].

    Args:
        sums: int64 [K, b], contiguous.
        spacing: float64 [K].
        kept: float64 [K, b], contiguous, or None.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    rows, width = sums.shape
    _tensor(sums, "sums", torch.int64)
    if kept is not None:
        _tensor(kept, "kept", torch.float64, sums.numel())
    if len(spacing) != rows:
        raise ValueError(f"spacing must have {rows} numbers, got {len(spacing)}")
    out = torch.empty(sums.shape, dtype=torch.float32, device=CPU)
    for k, g in enumerate(spacing.tolist()):
        old = None if kept is None else kept[k].data_ptr()
        _call("exact_sum_finish", sums[k].data_ptr(), g, old, out[k].data_ptr(), width)
    return out


def max_abs(x: torch.Tensor) -> float:
    """Return the largest absolute value of a contiguous float32 vector; NaN if it contains NaN.

    Raises:
        ValueError: the tensor has the wrong type, device or layout.
    """
    return float(_call("max_abs", _tensor(x, "a vector"), x.numel()))


# -- pooling -------------------------------------------------------------------------------------------------


def _image_shape(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the shape of images [n, c, H, W].

    Raises:
        ValueError: a side is odd, or rows are longer than `MAX_POOL_WIDTH`.
    """
    n, c, h, w = x.shape
    if h % 2 or w % 2 or w > MAX_POOL_WIDTH:
        raise ValueError(
            f"images of {h}x{w} pixels: both sides must be even, the second at most {MAX_POOL_WIDTH}"
        )
    return n, c, h, w


def max_pool2x2(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum of each 2x2 window and its index in the window (uint8), both [n, c, H/2, W/2].

    Args:
        x: float32 [n, c, H, W], contiguous, both sides even, W at most `MAX_POOL_WIDTH`.

    Raises:
        ValueError: `x` has the wrong type, device, layout or shape.
    """
    n, c, h, w = _image_shape(x)
    images = _tensor(x, "images")
    out = x.new_empty(n, c, h // 2, w // 2)
    index = torch.empty_like(out, dtype=torch.uint8)
    if out.numel():
        _call("max_pool2x2", images, out.data_ptr(), index.data_ptr(), n * c * (h // 2), w // 2)
    return out, index


def max_pool2x2_backward(grad: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the gradient [n, c, H, W] of the input of `max_pool2x2`.

    Args:
        grad: gradient of the output, float32 [n, c, H/2, W/2].
        index: as returned by `max_pool2x2`.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    n, c, h, w = grad.shape
    arguments = _tensor(grad, "a gradient"), _tensor(index, "index", torch.uint8, grad.numel())
    out = grad.new_empty(n, c, 2 * h, 2 * w)
    _call("max_pool2x2_backward", *arguments, out.data_ptr(), n * c * h, w)
    return out


def max_pool2x2_last(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `max_pool2x2`, both channels last.

    Args:
        x: float32 [n, c, H, W], channels last, both sides even, W at most `MAX_POOL_WIDTH`.

    Raises:
        ValueError: `x` has the wrong type, device, layout or shape.
    """
    n, c, h, w = _image_shape(x)
    images = _channels_last(x, "images", x.shape)
    out = torch.empty((n, c, h // 2, w // 2), dtype=torch.float32, memory_format=torch.channels_last)
    index = torch.empty_like(out, dtype=torch.uint8)
    if out.numel():
        _call("max_pool2x2_last", images, out.data_ptr(), index.data_ptr(), n * (h // 2), w // 2, c)
    return out, index


def max_pool2x2_last_backward(grad: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the gradient [n, c, H, W] of the input of `max_pool2x2_last`, channels last.

    Args:
        grad: gradient of the output, float32 [n, c, H/2, W/2], channels last.
        index: as returned by `max_pool2x2_last`.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    n, c, h, w = index.shape
    arguments = (
        _channels_last(grad, "a gradient", index.shape),
        _channels_last(index, "index", index.shape, torch.uint8),
    )
    out = torch.empty((n, c, 2 * h, 2 * w), dtype=torch.float32, memory_format=torch.channels_last)
    _call("max_pool2x2_last_backward", *arguments, out.data_ptr(), n * h, w, c)
    return out


def avg_pool2x2(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of each 2x2 window [n, c, H/2, W/2]; `x` and errors as for `max_pool2x2`."""
    n, c, h, w = _image_shape(x)
    images = _tensor(x, "images")
    out = x.new_empty(n, c, h // 2, w // 2)
    _call("avg_pool2x2", images, out.data_ptr(), n * c * (h // 2), w // 2)
    return out


def avg_pool2x2_backward(grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient [n, c, H, W] of the input of `avg_pool2x2` from that of its output."""
    n, c, h, w = grad.shape
    address = _tensor(grad, "a gradient")
    out = grad.new_empty(n, c, 2 * h, 2 * w)
    _call("avg_pool2x2_backward", address, out.data_ptr(), n * c * h, w)
    return out


# -- training ------------------------------------------------------------------------------------------------


def use_narrow_vectors(on: bool) -> None:
    """Use AVX2 even on a processor with AVX-512, or the widest vectors again; the bits are the same."""
    for name in ("training", "channels_last"):
        _OPEN[name].mpifl_use_narrow_vectors(on)


def workspace_size(layers: np.ndarray, batch: int) -> int:
    """Return how many floats of workspace `forward` and `train` need.

    Args:
        layers: `LAYER` [layers].
        batch: samples per step.
    """
    return int(_call("workspace_size", _array(layers, "layers", LAYER), len(layers), batch))


def _network(layers: np.ndarray, batch: int) -> tuple[int, int]:
    """Return the address of a network's layers, and their number.

    Raises:
        ValueError: the batch is empty, or `layers` is not a contiguous array of `LAYER`.
    """
    if batch < 1:
        raise ValueError(f"a batch must have at least one sample, got {batch}")
    return _array(layers, "layers", LAYER), len(layers)


def _num_inputs(layers: np.ndarray) -> int:
    """Return how many numbers one sample consists of."""
    first = layers[0]
    return int(first["in_channels"] * first["in_height"] * first["in_width"])


def _check(status: int, batch: int, workspace: torch.Tensor) -> None:
    """Raise the error that a return value of the training kernels stands for, if any."""
    if status == SMALL_WORKSPACE:
        raise ValueError(f"{batch} samples need a larger workspace than {len(workspace)} floats")
    if status in (BAD_LABEL, BAD_INDEX):
        raise IndexError(
            "a label is not a class" if status == BAD_LABEL else "an index in order is not that of a sample"
        )


def forward(
    layers: np.ndarray,
    weights: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    batch: int,
    workspace: torch.Tensor,
) -> torch.Tensor:
    """Write the outputs of a network for `x` to `out` and return it.

    Args:
        layers: `LAYER` [layers].
        weights: float32 [p].
        x: float32 [n, ...].
        out: float32 [n, outputs], contiguous; updated in place.
        batch: number of samples computed at a time.
        workspace: float32, at least `workspace_size` elements.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    network, inputs = _network(layers, batch), len(x) * _num_inputs(layers)
    tensors = _tensor(weights, "weights"), _tensor(x, "images", numel=inputs), _tensor(out, "outputs")
    space = _tensor(workspace, "workspace"), workspace.numel()
    _check(_call("forward", *network, *tensors, len(x), batch, *space), batch, workspace)
    return out


def train(
    layers: np.ndarray,
    weights: torch.Tensor,
    momentum: torch.Tensor,
    gradient: torch.Tensor | None,
    samples: tuple[torch.Tensor, torch.Tensor],
    order: np.ndarray,
    batch: int,
    sgd: Sgd,
    steps_done: int,
    last: bool,
    workspace: torch.Tensor,
    sample_weights: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> float:
    """Take SGD steps on the samples in `order`; return the sum of the mean losses of the batches.

    The loss of a batch counts by its samples, in units of the first batch.

    Args:
        layers: `LAYER` [layers].
        weights: float32 [p]; updated in place.
        momentum: float32 [p]; updated in place.
        gradient: None to take steps; or float32 [p], which receives the gradient of one batch while weights
            and momentum stay unchanged.
        samples: images float32 [N, ...] and labels int64 [N], contiguous.
        order: indices of samples, int64 [n].
        batch: samples per step.
        sgd: learning rate, momentum, weight decay.
        steps_done: number of earlier steps; if it is 0, the momentum is not read.
        last: whether no further steps follow; if so, the last step does not write the momentum.
        workspace: float32, at least `workspace_size` elements.
        sample_weights: factor of each sample's loss, float32 [N], contiguous; None for 1.
        factors: factors of dropout, ordered by batch, then by layer, float32; None drops nothing.

    Raises:
        IndexError: a label is not a class, or an index in `order` is not a sample.
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    network, space = _network(layers, batch), (_tensor(workspace, "workspace"), workspace.numel())
    x, y = samples
    p, inputs, loss = weights.numel(), len(y) * _num_inputs(layers), c_double()
    drawn = None
    if factors is not None:
        numel = len(order) * int(layers["out_channels"][layers["kind"] == DROPOUT].sum())
        drawn = _tensor(factors, "factors of dropout", numel=numel)
    arguments = (
        _tensor(weights, "weights"),
        _tensor(momentum, "momentum", numel=p),
        None if gradient is None else _tensor(gradient, "a gradient", numel=p),
        _tensor(x, "images", numel=inputs),
        _tensor(y, "labels", torch.int64),
        None if sample_weights is None else _tensor(sample_weights, "weights of samples", numel=len(y)),
        len(y),
        _array(order, "order", np.int64),
        drawn,
        len(order),
        batch,
    )
    status = _call("train", *network, *arguments, *sgd, steps_done, last, *space, ctypes.addressof(loss))
    _check(status, batch, workspace)
    return loss.value


def train_visits(
    layers: np.ndarray,
    visits: np.ndarray,
    num_weights: int,
    table: torch.Tensor | None,
    order: np.ndarray,
    batch: int,
    sgd: Sgd,
    momentum: torch.Tensor,
    workspace: torch.Tensor,
    mu: float | None = None,
    change: bool = False,
) -> None:
    """Train visits one after the other, each from its own weights, and write their losses to `visits`.

    The memory that the addresses in `visits` point to is not checked here; `Network.train_visits` sets them.

    Args:
        layers: `LAYER` [layers].
        visits: `VISIT` [visits]; `loss` and `max_abs` are written.
        num_weights: p.
        table: value of each possible byte in each channel, float32 [channels, 256]; None if samples are
            stored as floats.
        order: indices of the samples of all visits, int64 [n].
        batch: samples per step.
        sgd: learning rate, momentum, weight decay.
        momentum: scratch memory, float32 [p].
        workspace: float32, at least `workspace_size` elements.
        mu: weight of a proximal term mu/2 ||w - start||^2; None for none.
        change: whether to write w - start instead of the weights w.

    Raises:
        IndexError: a label is not a class, or an index in `order` is not a sample.
        ValueError: a tensor or array has the wrong type, device, layout or length.
    """
    network, space = _network(layers, batch), (_tensor(workspace, "workspace"), workspace.numel())
    arguments = (
        num_weights,
        _array(visits, "visits", VISIT),
        len(visits),
        *_stored(layers, visits, table, order),
        batch,
        *sgd,
        mu is not None,
        mu or 0.0,
        change,
        _tensor(momentum, "momentum", numel=num_weights),
    )
    _check(_call("train_visits", *network, *arguments, *space), batch, workspace)


def visit_outputs(
    layers: np.ndarray,
    visits: np.ndarray,
    models: np.ndarray,
    table: torch.Tensor | None,
    order: np.ndarray,
    batch: int,
    out: torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    """Write the outputs of several models for the samples of each visit.

    The memory that the addresses in `visits` and `models` point to is not checked here;
    `Network.visit_outputs` sets them.

    Args:
        layers: `LAYER` [layers].
        visits: `VISIT` [visits]; where the samples are stored, and which ones to use.
        models: addresses of weights, int64 [visits, models].
        table: as for `train_visits`.
        order: as for `train_visits`.
        batch: number of samples computed at a time.
        out: float32 [models, samples of all visits, outputs]; updated in place.
        workspace: float32, at least `workspace_size` elements.

    Raises:
        IndexError: a label is not a class, or an index in `order` is not a sample.
        ValueError: a tensor or array has the wrong type, device, layout or length.
    """
    network, space = _network(layers, batch), (_tensor(workspace, "workspace"), workspace.numel())
    numel = models.shape[1] * int(visits["count"].sum()) * int(layers[-1]["out_channels"])
    arguments = (
        _array(visits, "visits", VISIT),
        len(visits),
        _array(models, "models", np.int64, len(visits) * models.shape[1]),
        models.shape[1],
        *_stored(layers, visits, table, order),
        batch,
        _tensor(out, "outputs", numel=numel),
    )
    _check(_call("visit_outputs", *network, *arguments, *space), batch, workspace)


def _stored(
    layers: np.ndarray, visits: np.ndarray, table: torch.Tensor | None, order: np.ndarray
) -> tuple[int | None, int, int]:
    """Return the address of the table of pixels, the number of its channels, and the address of `order`.

    Raises:
        ValueError: a tensor or array has the wrong type, device, layout or length, or samples cannot have so
            many channels.
    """
    channels = 1 if table is None else len(table)
    if len(visits) and int((visits["first"] + visits["count"]).max()) > len(order):
        raise ValueError("visits take more samples than there are in order")
    if _num_inputs(layers) % channels:
        raise ValueError(f"samples of {_num_inputs(layers)} numbers have no {channels} channels")
    numbers = None if table is None else _tensor(table, "table", numel=256 * channels)
    return numbers, channels, _array(order, "order", np.int64)


def permutations(entropy: bytes, sizes: np.ndarray) -> np.ndarray:
    """Return permutations of 0 .. size - 1, concatenated, as NumPy's generators draw them.

    Args:
        entropy: 16 bytes for each permutation, little-endian, which seed its NumPy generator,
            `Generator(Philox(SeedSequence(...)))`.
        sizes: int64 [permutations], each below 2^32.

    Raises:
        ValueError: there are not 16 bytes for each permutation, or a size is negative or too large.
    """
    words = np.frombuffer(entropy, "<u4")
    if len(words) != 4 * len(sizes) or ((sizes < 0) | (sizes >= 1 << 32)).any():
        raise ValueError(f"{len(sizes)} permutations of {sizes} samples do not fit {len(entropy)} bytes")
    out = np.empty(int(sizes.sum()), np.int64)
    arguments = _array(words, "entropy", np.uint32), _array(sizes, "sizes", np.int64)
    _call("permutations", *arguments, len(sizes), _array(out, "out", np.int64))
    return out


def sgd_step(
    weights: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, sgd: Sgd, steps_done: int
) -> None:
    """Take one SGD step.

    Args:
        weights: float32 [p]; updated in place.
        momentum: float32 [p]; updated in place.
        gradient: float32 [p].
        sgd: learning rate, momentum, weight decay.
        steps_done: number of earlier steps; if it is 0, the momentum is not read.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    p = gradient.numel()
    vectors = (_tensor(v, "a vector", numel=p) for v in (weights, momentum, gradient))
    _call("sgd_step", *vectors, p, *sgd, steps_done)


# -- layers of wide networks ---------------------------------------------------------------------------------


def _channels_last(
    x: torch.Tensor, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> int:
    """Return the address of images.

    Raises:
        ValueError: `x` is not a channels-last CPU tensor of `dtype` and `shape`.
    """
    found = x.dtype is dtype and x.device == CPU and x.is_contiguous(memory_format=torch.channels_last)
    if not found or x.shape != tuple(shape):
        got = f"{x.dtype} {list(x.shape)} with steps {list(x.stride())} on {x.device}"
        raise ValueError(f"{name} must be {dtype} {list(shape)} on the CPU, channels last, got {got}")
    return x.data_ptr()


def _convolution(
    images: Sequence[int], out_channels: int, taps: int, margin: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of a convolution in the kernels' order, and the shape of its output [n, o, H', W'].

    Args:
        images: shape of the input, [n, c, H, W].
        out_channels: o.
        taps: side of the kernels.
        margin: zero padding around the images, in pixels.

    Raises:
        ValueError: there are no pixels, a number of channels is not a multiple of `STRIP`, or the size of the
            kernels or the margin is not supported.
    """
    n, channels, height, width = images
    if taps not in TILE_SIDES or not 0 <= margin < taps:
        raise ValueError(f"kernels must be 3x3 or 5x5, and margins smaller: {taps}x{taps} and {margin}")
    out = n, out_channels, height + 2 * margin + 1 - taps, width + 2 * margin + 1 - taps
    shape = n, height, width, channels, out_channels, taps, margin
    if min(*images, *out) < 1 or channels % STRIP or out_channels % STRIP:
        raise ValueError(f"{shape}: there must be pixels, and channels in multiples of {STRIP}")
    return shape, out


def convolve_workspace(channels: int, out_channels: int) -> int:
    """Return how many floats of workspace a convolution and its gradients need."""
    return int(_call("convolve_workspace", channels, out_channels))


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    margin: int,
    workspace: torch.Tensor,
    flip: bool = False,
) -> torch.Tensor:
    """Return a convolution of stride 1, [n, o, H + 2 margin + 1 - k, W + 2 margin + 1 - k], channels last.

    Args:
        x: float32 [n, c, H, W], channels last; c and o are multiples of `STRIP`.
        weight: float32 [o, c, k, k], contiguous; k is 3 or 5.
        bias: float32 [o]; None for none.
        margin: zero padding around the images, in pixels; less than k.
        workspace: float32, at least `convolve_workspace` elements.
        flip: whether to flip the kernels and read them as [c, o, k, k]. With a margin of k - 1 minus that of
            the forward pass, this turns the gradient of the output into the gradient of the input.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    out_channels, taps = len(weight[0] if flip else weight), weight.shape[-1]
    shape, out = _convolution(x.shape, out_channels, taps, margin)
    y = torch.empty(out, dtype=torch.float32, memory_format=torch.channels_last)
    tensors = (
        _channels_last(x, "images", x.shape),
        _tensor(weight, "weights", numel=x.shape[1] * out_channels * taps * taps),
        None if bias is None else _tensor(bias, "a bias", numel=out_channels),
        y.data_ptr(),
    )
    space = _workspace(workspace, x.shape[1], out_channels)
    _call("convolve", *tensors, *shape, flip, space)
    return y


def convolve_input_grad(
    grad: torch.Tensor, weight: torch.Tensor, images: Sequence[int], margin: int, workspace: torch.Tensor
) -> torch.Tensor:
    """Return the gradient [n, c, H, W] of the input of `convolve`, channels last.

    Args:
        grad: gradient of the output, float32 [n, o, H', W'], channels last.
        weight: as for `convolve`.
        images: shape of the input, [n, c, H, W].
        margin: as for `convolve`.
        workspace: float32, at least `convolve_workspace` elements.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    out_channels, taps = len(weight), weight.shape[-1]
    shape, out = _convolution(images, out_channels, taps, margin)
    tensors = (
        _channels_last(grad, "a gradient", out),
        _tensor(weight, "weights", numel=images[1] * out_channels * taps * taps),
    )
    space = _workspace(workspace, images[1], out_channels)
    x = torch.empty(tuple(images), dtype=torch.float32, memory_format=torch.channels_last)
    _call("convolve_input_grad", *tensors, x.data_ptr(), *shape, space)
    return x


def convolve_kernels_grad(
    x: torch.Tensor, grad: torch.Tensor, taps: int, margin: int, workspace: torch.Tensor
) -> torch.Tensor:
    """Return the gradient [o, c, k, k] of the weights of `convolve`.

    Args:
        x: input of `convolve`, float32 [n, c, H, W], channels last.
        grad: gradient of the output, float32 [n, o, H', W'], channels last.
        taps: k.
        margin: as for `convolve`.
        workspace: float32, at least `convolve_workspace` elements.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    channels, out_channels = x.shape[1], grad.shape[1]
    shape, out = _convolution(x.shape, out_channels, taps, margin)
    tensors = _channels_last(x, "images", x.shape), _channels_last(grad, "a gradient", out)
    weight = torch.empty((out_channels, channels, taps, taps), dtype=torch.float32)
    space = _workspace(workspace, channels, out_channels)
    _call("convolve_kernels_grad", *tensors, weight.data_ptr(), *shape, space)
    return weight


def _workspace(workspace: torch.Tensor, channels: int, out_channels: int) -> int:
    """Return the address of a workspace.

    Raises:
        ValueError: it is too small for the convolution, or not a contiguous float32 tensor on the CPU.
    """
    needed = convolve_workspace(channels, out_channels)
    if workspace.numel() < needed:
        raise ValueError(f"{workspace.numel()} floats of workspace are fewer than {needed}")
    return _tensor(workspace, "workspace")
