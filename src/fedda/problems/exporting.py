"""A trained model as a file for other programs: .pt (PyTorch), .safetensors (weights) or .onnx (ONNX Runtime)."""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import one_line, warn
from ..extras import needed_for
from ..files import write_whole
from .neural import Neural
from .trained import trained_model, trained_state
from .trees import arguments, map_tensors

SUFFIXES = (".pt", ".safetensors", ".onnx")
BATCH = 3  # samples in the example; a program takes any number of them


def check_suffix(path: Path) -> None:
    """Refuse a file name that no format fits, and .onnx without its packages."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: a model file must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if path.suffix == ".onnx":
        with needed_for(str(path)):
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401


def write_model(
    path: Path, problem: Neural, x: Tensor, weights: Tensor | None = None, client: int | None = None
) -> Path:
    """Write the model at the flat parameters x [d]; the suffix of the path chooses the format (docs/own-models.md)."""
    check_suffix(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if problem.d_personal and client is None:
        warn(f"{path}: has the mean of the personal parameters; client=... takes those of one")
    writers = {".pt": to_pt, ".safetensors": to_safetensors, ".onnx": to_onnx}
    return write_whole(path, writers[path.suffix](path, problem, x, weights, client))


def facts(problem: Neural) -> dict[str, Any]:
    """What a program around the model must know: standardisation, names of the classes, columns of the table."""
    mean, std = (None, None) if problem.scale is None else (v.cpu() for v in problem.scale)
    classes = None if problem.class_names is None else list(problem.class_names)
    columns = None if problem.columns is None else [[name, values and list(values)] for name, values in problem.columns]
    return {"mean": mean, "std": std, "classes": classes, "columns": columns}


def as_texts(known: dict[str, Any]) -> dict[str, str]:
    """The facts as JSON, for formats whose extra entries are texts; without those that are None."""
    lists = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in known.items() if v is not None}
    return {name: json.dumps(value) for name, value in lists.items()}


def to_safetensors(path: Path, problem: Neural, x: Tensor, weights: Tensor | None, client: int | None) -> bytes:
    from safetensors.torch import save

    state = {name: value.cpu().contiguous() for name, value in trained_state(problem, x, weights, client).items()}
    return save(state, {"format": "pt"} | as_texts(facts(problem)))


def to_pt(path: Path, problem: Neural, x: Tensor, weights: Tensor | None, client: int | None) -> bytes:
    state = {name: value.cpu() for name, value in trained_state(problem, x, weights, client).items()}
    program, file = io.BytesIO(), io.BytesIO()
    try:
        torch.export.save(traced(problem, x, weights, client), program)
    except ValueError as why:
        warn(f"{path}: {why}: the file holds its weights alone")
    torch.save({"program": program.getvalue() or None, "state_dict": state} | facts(problem), file)
    return file.getvalue()


def to_onnx(path: Path, problem: Neural, x: Tensor, weights: Tensor | None, client: int | None) -> bytes:
    import onnx

    try:
        program = traced(problem, x, weights, client)
        with silent():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                input_names=input_names(problem),
                output_names=output_names(program),
                verbose=False,
            )
    except Exception as why:  # the exporter can raise anything about a user's module
        raise ValueError(f"{path}: {one_line(why)}; a .safetensors file holds the weights alone") from why
    assert exported is not None
    content = exported.model_proto
    onnx.helper.set_model_props(content, as_texts(facts(problem)))
    return bytes(content.SerializeToString())


def input_names(problem: Neural) -> list[str]:
    """The names of the inputs: x, the keys of a dict, or x0, x1, ... for a tuple."""
    positional, named = arguments(problem.data.x)
    return list(named) or (["x"] if len(positional) == 1 else [f"x{i}" for i in range(len(positional))])


def output_names(program: torch.export.ExportedProgram) -> list[str]:
    """The names of the outputs: output; output_KEY for those of a dict; or output0, output1, ... for a tuple."""
    form = program.call_spec.out_spec
    if form is None or form.is_leaf():
        return ["output"]
    if form.type is dict and len(form.context) == form.num_leaves:
        return [f"output_{name}" for name in form.context]
    return [f"output{i}" for i in range(form.num_leaves)]


def traced(problem: Neural, x: Tensor, weights: Tensor | None, client: int | None) -> torch.export.ExportedProgram:
    """The model as a program of PyTorch's own operations, which needs no class of the user's or of ours."""
    index = torch.arange(BATCH, device=problem.device) % problem.data.samples
    positional, named = arguments(map_tensors(lambda v: v.cpu(), problem.pick(problem.data, index).x))
    dynamic = map_tensors(lambda v: {0: torch.export.Dim.DYNAMIC}, positional or named)
    try:
        with silent(), torch.no_grad():
            model = trained_model(problem, x, weights, client).cpu()
            return torch.export.export(model, positional, named, dynamic_shapes=dynamic)
    except Exception as why:  # as above
        raise ValueError(f"PyTorch cannot export this model as a program ({one_line(why, 200)})") from why


@contextmanager
def silent() -> Iterator[None]:
    """Without the exporters' remarks, which are about PyTorch and not about the model."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
