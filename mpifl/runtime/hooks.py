"""A method's hooks as the engine calls them: what they return is checked before it is believed, and what they
raise names class and hook.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from mpifl.core.algorithm import Algorithm, Look
from mpifl.core.devices import CPU
from mpifl.core.errors import CodeFailed, MethodError, Missing, NotFinite, UserError
from mpifl.core.mixing import Mixing, Plan
from mpifl.core.parameters import width
from mpifl.core.types import ASKED_FOR, Report, Server, State

ENGINE = str(Path(__file__).parent)
LARGEST = float(np.finfo(np.float32).max)
UNCALLED = {  # hooks that the engine calls only where they are declared -> the needs, one of which does
    "fingerprint": ("fingerprint",),
    "initial_plan": ("fingerprint",),
    "assign_new_clients": ("newcomers",),
    "new_clients": ("newcomers",),
    "probe": ("probe",),
    "inspect": ("inspect",),
    "appraise": ("inspect",),
    "compares": ("gram",),
}
Shapes = Mapping[str, tuple[int, int]]  # name -> (rows, width)


def hook_name(algorithm: Algorithm, hook: str) -> str:
    """Return what a hook is called in messages."""
    return f"{type(unwrapped(algorithm)).__name__}.{hook}"


def unwrapped(algorithm: Any) -> Any:
    """Return the method itself, where somebody (a test) looks over its shoulder."""
    while not isinstance(algorithm, Algorithm) and hasattr(algorithm, "inner"):
        algorithm = algorithm.inner
    return algorithm


@contextmanager
def calling(algorithm: Algorithm, hook: str, place: str = "") -> Iterator[str]:
    """Within it a hook runs at a client; yields its name. Exceptions of the method's own pass.

    Args:
        place: where, as `client 3, visit 0`.

    Raises:
        MethodError: what the hook asked for is not there, or it tried to end the process.
        CodeFailed: it was interrupted.
    """
    where = hook_name(algorithm, hook)
    at = f"{place}: " if place else ""
    try:
        yield where
    except MethodError:
        raise
    except UserError as error:
        raise MethodError(where, f"{at}{error.key} = {error.value!r}", error.remedy) from error
    except Missing as error:
        raise MethodError(where, f"{at}{error.what}", error.remedy) from error
    except KeyError as error:
        if error.args and error.args[0] in ASKED_FOR:
            raise MethodError(where, f"{at}no {error.args[0]!r}", ASKED_FOR[error.args[0]]) from error
        error.hook = where  # type: ignore[attr-defined]
        raise
    except Exception as error:
        error.hook = where  # type: ignore[attr-defined]  # for who says where it was raised
        raise
    except SystemExit as end:
        raise MethodError(where, f"{at}sys.exit({end.code!r}) was called", "raise an exception") from end
    except KeyboardInterrupt as end:
        raise CodeFailed(f"{where}: {at}interrupted (KeyboardInterrupt)", code=130) from end


@contextmanager
def deciding(algorithm: Algorithm, hook: str, place: str = "") -> Iterator[str]:
    """As `calling`, for a hook that runs on rank 0.

    Raises:
        CodeFailed: the hook raised an exception of its own.
    """
    try:
        with calling(algorithm, hook, place) as where:
            yield where
    except (MethodError, CodeFailed):
        raise
    except Exception as error:
        at = f"{place}: " if place else ""
        text = f"{hook_name(algorithm, hook)}: {at}{type(error).__name__}: {error}"
        raise CodeFailed(text, trace_of(error)) from error


def trace_of(error: BaseException) -> str:
    """Return the traceback of an exception from the method's own code on."""
    shown = traceback.TracebackException.from_exception(error)
    frames = list(shown.stack)
    while frames and (frames[0].filename.startswith(ENGINE) or "contextlib" in frames[0].filename):
        frames.pop(0)
    shown.stack = traceback.StackSummary.from_list(frames or list(shown.stack))
    return "".join(shown.format(chain=False))


def check_needs(algorithm: Algorithm) -> None:
    """Raise `MethodError` where a method has hooks that would never be called."""
    inner = unwrapped(algorithm)
    if "needs" in vars(inner):
        return  # they follow from its options
    for hook, needs in UNCALLED.items():
        asked = any(getattr(algorithm.needs, need) for need in needs)
        if getattr(type(inner), hook, None) is not getattr(Algorithm, hook) and not asked:
            remedy = f"declare needs = Needs({needs[0]}=...), or leave the hook out"
            raise MethodError(hook_name(algorithm, hook), "would never be called", remedy)


# -- at a client ---------------------------------------------------------------------------------------------


def checked_visit(
    where: str, place: str, made: Any, algorithm: Algorithm, device: torch.device
) -> tuple[Report, State]:
    """Return what `local_update` returned, its uploads contiguous.

    Args:
        device: of the client's model; uploads lie there, or in main memory.
    """
    if not isinstance(made, tuple) or len(made) != 2:
        what = f"{place}: returned {_kind(made)}"
        raise MethodError(where, what, "return (client.report(...), state), state {} where nothing is kept")
    report, state = made
    needs = algorithm.needs
    always = (
        type(unwrapped(algorithm)).compares is Algorithm.compares
    )  # or in the steps that the method names
    gram = needs.gram if always else None
    asked = {"gram": gram, "memory": needs.memory, "row_distance": needs.row_distance}
    report = checked_report(where, place, report, asked, device)
    if not isinstance(state, Mapping) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        what = f"{place}: the state it returned is no mapping from names to tensors"
        raise MethodError(where, what, "return (report, {'name': tensor, ...}), or {} to keep nothing")
    if state and not needs.state:
        what = f"{place}: returned state ({', '.join(map(str, state))}), which would be thrown away"
        raise MethodError(where, what, "declare needs = Needs(state=True), or return {}")
    return report, state


def checked_report(
    where: str, place: str, report: Any, asked: Mapping[str, str | None], device: torch.device
) -> Report:
    """Return a report with its uploads contiguous: float32 [d] or [C, d]; what they hold is checked later.

    Args:
        asked: need -> the upload that it names.
    """
    if not isinstance(report, Report):
        raise MethodError(
            where, f"{place}: returned {_kind(report)} for a report", "return client.report(...)"
        )
    vectors = {}
    for name, x in report.vectors.items():
        wrong = _problem(x, device)
        if wrong:
            raise MethodError(where, f"{place}: upload {name!r} {wrong[0]}", wrong[1])
        vectors[name] = x.detach().contiguous()
    for need, upload in asked.items():
        if upload is not None and upload not in vectors:
            what = f"{place}: no upload {upload!r}, which Needs({need}={upload!r}) names"
            raise MethodError(where, what, f"uploads are {', '.join(vectors) or 'none'}: name one of them")
    return _with(report, vectors)


def _with(report: Report, vectors: Mapping[str, torch.Tensor]) -> Report:
    if all(v is report.vectors[name] for name, v in vectors.items()):
        return report
    return Report(report.client, report.num_samples, vectors, report.notes, report.metrics, report.unsent)


def _problem(x: Any, device: torch.device) -> tuple[str, str] | None:
    """Return what is wrong with an upload, and the remedy."""
    if not isinstance(x, torch.Tensor):
        return f"is {_kind(x)}", "upload a tensor; small things travel as notes"
    if x.dtype != torch.float32:
        return f"is {str(x.dtype).removeprefix('torch.')}", "upload float32: .float()"
    if x.layout != torch.strided or x.ndim not in (1, 2) or x.numel() == 0:
        return (
            f"has shape {tuple(x.shape)}, {x.layout}",
            "upload a vector [d], or several of one width [C, d]",
        )
    if x.device not in (CPU, device):
        return f"is on {x.device}", f"upload what lies on {device} or in main memory"
    return None


def check_peaks(where: str, place: str, max_abs: Mapping[str, Sequence[float]]) -> None:
    """Raise `NotFinite` where the largest absolute value of an upload is none."""
    for name, values in max_abs.items():
        if not all(map(math.isfinite, values)):
            remedy = "train with a smaller local.lr, or leave such clients out: on_client_error drop"
            raise NotFinite(where, f"{place}: upload {name!r} is not finite", remedy)


def checked_light(where: str, place: str, report: Report, client: int) -> Report:
    """Return a report whose notes are arrays of numbers and whose metrics are numbers."""
    if report.client != client:
        what = f"{place}: the report is of client {report.client!r}"
        raise MethodError(where, what, "return client.report(...)")
    notes = {name: checked_note(where, place, name, value) for name, value in report.notes.items()}
    metrics = {}
    for name, value in report.metrics.items():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"{place}: metric {name!r} is {_kind(value)}"
            raise MethodError(where, what, "metrics are single numbers: float(...)") from error
    return Report(report.client, report.num_samples, report.vectors, notes, metrics, report.unsent)


def checked_note(where: str, place: str, name: str, value: Any) -> Any:
    """Return a note, as it is, if it is a number or an array of numbers."""
    try:
        kind = np.asarray(value).dtype.kind
    except (TypeError, ValueError, RuntimeError):
        kind = "O"
    if kind not in "biuf":
        what = f"{place}: note {name!r} is {_kind(value)}"
        raise MethodError(where, what, "notes are numbers or arrays of numbers, of one shape for all clients")
    return value


def check_look(where: str, place: str, look: Any) -> None:
    """Raise `MethodError` for what is no outcome of a probe."""
    if not isinstance(look, Look):
        raise MethodError(
            where, f"{place}: returned {_kind(look)}", "return Look(notes={...}, findings={...})"
        )


def check_scores(where: str, place: str, scores: Any) -> None:
    """Raise `MethodError` for scores without accuracy and loss, or that are no numbers."""
    numbers = isinstance(scores, Mapping) and all(
        isinstance(v, (int, float, np.number)) for v in scores.values()
    )
    if not numbers or not {"accuracy", "loss"} <= set(scores):
        what = f"{place}: returned {sorted(scores) if numbers else _kind(scores)}"
        raise MethodError(
            where, what, "return a mapping with the numbers `accuracy` and `loss`: client.evaluate(w, split)"
        )


def check_vector(where: str, place: str, w: Any, size: int) -> None:
    """Raise `MethodError` for what is no model [d]."""
    if not isinstance(w, torch.Tensor) or tuple(w.shape) != (size,):
        shape = tuple(w.shape) if isinstance(w, torch.Tensor) else _kind(w)
        raise MethodError(where, f"{place}: returned {shape}", f"return a model: one vector [{size}]")


# -- on rank 0 -----------------------------------------------------------------------------------------------


def check_reads(where: str, k: int, reads: Any, tables: Shapes) -> None:
    """Raise `MethodError` where a client would read what is not there.

    Args:
        tables: name -> (rows, width).
    """

    def wrong(what: str, remedy: str) -> NoReturn:
        raise MethodError(where, f"client {k}: {what}", remedy)

    if not isinstance(reads, Mapping):
        wrong(f"returned {_kind(reads)}", "return a mapping from tables to rows: {'model': (0,)}")
    for name, which in reads.items():
        if name not in tables:
            wrong(f"no table {name!r}", f"the server has {', '.join(tables)}")
        num = tables[name][0]
        if isinstance(which, np.ndarray):
            if which.shape != (num,) or not np.isfinite(which).all() or not which.any():
                remedy = (
                    f"an array holds the finite weight of each of its {num} rows, not all 0; a tuple, rows"
                )
                wrong(f"reads {which!r} of table {name!r}", remedy)
        elif not isinstance(which, Sequence) or not all(0 <= r < num for r in which) or not len(which):
            wrong(
                f"reads rows {which!r} of table {name!r}", f"it has rows 0 to {num - 1}; give a tuple of them"
            )


def check_clients(where: str, chosen: Any, known: np.ndarray) -> None:
    """Raise `MethodError` unless `chosen` are clients out of `known`, each once."""
    good = isinstance(chosen, np.ndarray) and chosen.ndim == 1 and chosen.dtype.kind in "iu"
    if not good or len(np.unique(chosen)) != len(chosen) or not np.isin(chosen, known).all():
        what = f"returned {chosen.tolist() if good else _kind(chosen)}"
        raise MethodError(where, what, f"return an integer array of clients out of {known.tolist()[:20]}")


def check_tables(where: str, tables: Any, known: Mapping[str, torch.Tensor] | None = None) -> None:
    """Raise `MethodError` unless tables hold finite rows float32 [K, width].

    Args:
        known: tables that were checked.
    """
    if not isinstance(tables, Mapping):
        raise MethodError(
            where, f"returned {_kind(tables)} for tables", "tables map names to rows [K, width]"
        )
    for name, rows in tables.items():
        if known is not None and rows is known.get(name):
            continue
        good = isinstance(rows, torch.Tensor) and rows.dtype == torch.float32 and rows.ndim == 2 and len(rows)
        if not good or rows.device != CPU:
            remedy = "a table is float32 [K, width] in main memory, K >= 1"
            raise MethodError(where, f"table {name!r} is {_kind(rows)}", remedy)
        if not bool(torch.isfinite(rows[:1] if rows.stride(0) == 0 else rows).all()):
            raise MethodError(
                where, f"table {name!r} is not finite", "something is divided by zero, or diverges"
            )


def check_server(
    where: str, server: Any, num_clients: int, default_reads: bool, known: Server | None = None
) -> None:
    """Raise `MethodError` for a server that no step can start from.

    Args:
        default_reads: whether every client reads its row of `model`.
        known: the server before; rows that it has too were checked.
    """
    if not isinstance(server, Server):
        raise MethodError(
            where, f"returned {_kind(server)}", "return Server(tables, assign, algorithm_state)"
        )
    check_tables(where, server.tables, None if known is None else known.tables)
    if known is not None and set(known.tables) - set(server.tables):
        gone = ", ".join(set(known.tables) - set(server.tables))
        raise MethodError(where, f"table {gone!r} is gone", "return all tables: {**server.tables, ...}")
    num_rows = len(server.tables["model"]) if default_reads and "model" in server.tables else None
    check_assign(where, server.assign, num_clients, num_rows)


def check_assign(where: str, assign: Any, num_clients: int, num_rows: int | None) -> None:
    """Raise `MethodError` unless `assign` holds a row of `model` for each client.

    Args:
        num_rows: of `model`; None where `reads` says what clients read.
    """
    good = isinstance(assign, np.ndarray) and assign.shape == (num_clients,) and assign.dtype.kind in "iu"
    if not good:
        what = f"{assign.dtype} {assign.shape}" if isinstance(assign, np.ndarray) else _kind(assign)
        raise MethodError(
            where, f"assign is {what}", f"it holds an integer for each of the {num_clients} clients"
        )
    least, most = int(assign.min()), int(assign.max())
    if least < 0 or (num_rows is not None and most >= num_rows):
        client = int(assign.argmin() if least < 0 else assign.argmax())
        what = f"assign gives client {client} row {int(assign[client])}"
        rows = f"{num_rows} rows" if num_rows is not None else "rows"
        raise MethodError(where, what, f"table 'model' has {rows}, counted from 0")


def check_plan(
    where: str,
    plan: Any,
    server: Server,
    uploads: Shapes,
    max_abs: Mapping[str, np.ndarray],
    spread: Sequence[str],
    default_reads: bool,
) -> None:
    """Raise `MethodError` for a plan that cannot be carried out, or whose rows would not be finite.

    Args:
        uploads: name -> (components of all uploads, width).
        max_abs: name -> largest absolute value of each component [uploads].
        spread: tables whose rows live with their readers.
    """
    if not isinstance(plan, Plan) or isinstance(plan.mixings, Mixing):
        given = plan.mixings if isinstance(plan, Plan) else plan
        raise MethodError(where, f"returned {_kind(given)}", "return Plan([mixing, ...])")
    tables = {name: (len(rows), rows.shape[1]) for name, rows in server.tables.items()}
    for number, mixing in enumerate(plan.mixings):
        if not isinstance(mixing, Mixing):
            raise MethodError(where, f"mixing {number} is {_kind(mixing)}", "return Plan([mixing, ...])")
        wrong = _mixing_problem(mixing, tables, uploads, max_abs, mixing.into in spread)
        if wrong:
            raise MethodError(where, f"mixing {number} into {mixing.into!r}: {wrong[0]}", wrong[1])
        tables[mixing.into] = (mixing.num_rows, tables[mixing.into][1])
    if plan.algorithm_state is not None and not isinstance(plan.algorithm_state, Mapping):
        raise MethodError(
            where,
            f"algorithm_state is {_kind(plan.algorithm_state)}",
            "a algorithm_state is a mapping from names to arrays",
        )
    num_rows = tables["model"][0] if default_reads and "model" in tables else None
    check_assign(where, server.assign if plan.assign is None else plan.assign, len(server.assign), num_rows)


def _mixing_problem(
    m: Mixing, tables: Shapes, uploads: Shapes, max_abs: Mapping[str, np.ndarray], spread: bool
) -> tuple[str, str] | None:
    """Return what is wrong with a mixing, and the remedy."""
    if m.into not in tables:
        return "there is no such table", f"the server has {', '.join(tables)}"
    if m.of and m.of not in uploads:
        return f"there is no upload {m.of!r}", f"clients upload {', '.join(uploads) or 'nothing'}"
    num, wide = tables[m.into]
    count, upload = uploads[m.of] if m.of else (0, 0)
    if not isinstance(m.weights, np.ndarray) or m.weights.ndim != 2 or m.weights.dtype.kind not in "biuf":
        return f"weights are {_kind(m.weights)}", "weights are a float array [K, m]"
    if not np.isfinite(m.weights).all():
        return "weights are not finite", "something is divided by zero: was anybody chosen?"
    if not m.num_rows or m.weights.shape[1] != count:
        return f"weights have shape {m.weights.shape}", f"a column for each of the {count} uploads {m.of!r}"
    taken = upload if m.part is None else width(m.part)
    beyond = m.part is not None and any(not 0 <= s.start <= s.stop <= upload for s in m.part)
    if m.of and (taken != wide or beyond):
        return f"uploads {m.of!r} bring {taken} numbers", f"its rows hold {wide}: see `part`"
    if m.keep is not None:
        if not isinstance(m.keep, np.ndarray) or not np.isfinite(m.keep).all():
            return "keep is no finite array", "something is divided by zero"
        if m.keep.shape not in ((m.num_rows, num), (m.num_rows,)) or (m.keep.ndim == 1 and m.num_rows != num):
            fits = f"[{m.num_rows}, {num}]" + (f" or [{num}]" if m.num_rows == num else "")
            return f"keep has shape {m.keep.shape}", f"{num} rows become {m.num_rows}: keep is {fits}"
    if spread and (m.num_rows != num or (m.keep is not None and m.keep.ndim == 2)):
        return "rows that live with their readers become others", "set system.collective to gather"
    if m.of and (np.abs(m.weights) @ max_abs[m.of] > LARGEST).any():
        return "rows would overflow", "the weights are too large"
    return None


def _kind(value: Any) -> str:
    """Return a value's type in words."""
    if value is None:
        return "None"
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return f"{type(value).__name__} {value.dtype} {tuple(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
