"""From cyb's `.model` to `.model`: other encodings, everything else as it is.

Ternary tensors stay ternary with their scales, in the canonical table, or become something else
with the scale in their weights. Nothing else becomes ternary: that is trained, not rounded.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pnrt.container.convert import STEP
from pnrt.container.cyb_model import ENCODINGS, CybModel, write_model
from pnrt.container.gguf import TensorInfo, TensorPlan
from pnrt.container.writer import check_target
from pnrt.errors import FormatError
from pnrt.formats import FORMATS, Format

CANONICAL = FORMATS["cyb_ternary"]
_NAMES = {form: encoding for encoding, form in ENCODINGS.items()}


def reencode_model(
    file: CybModel,
    path: str | Path,
    target: str | None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict]:
    """Write a `.model` file with its matrices in another encoding.

    Args:
        target: format of the matrices whose K it divides; the others, and every vector, stay.
            None is refused. With cyb_ternary all stay, ternary ones in the canonical table.
    Returns: per tensor {"name", "to", "source", "target"}.
    Raises: FileError, FormatError (weights out of range, a ternary scale nobody has decided).
    """
    check_target(Path(path), Path(file.path))
    if target not in _NAMES:
        asked = f"--to {target}" if target else "--to is missing"
        ternary = " bitnet_ternary is only read: a .model's ternary is cyb_ternary."
        raise FormatError(
            f"{path}: {asked}: a .model file holds {', '.join(_NAMES)}. Choose one of these."
            + ternary * (target == "bitnet_ternary")
        )
    if target == CANONICAL.name and not file.scales:
        raise FormatError(
            f"{file.path}: no tensor is ternary, and --to cyb_ternary makes none so: weights are "
            "trained to be, not rounded. Choose another format."
        )
    forms = {i.name: _form(file, i, FORMATS[target]) for i in file.tensors.values()}
    # the scale of a tensor that is ternary no more is in its weights
    folded = {scale for name, scale in file.scales.items() if forms[name] is not CANONICAL}
    plans, encodings, rows = [], {}, []
    for info in file.tensors.values():
        if info.name in folded:
            continue
        form = forms[info.name]
        size = info.rows * form.row_bytes(info.columns)
        data = lambda info=info, form=form: _pieces(file, info, form)  # noqa: E731
        plans.append(TensorPlan(info.name, info.shape, 0, size, data))
        # a scale keeps the name of its encoding, which does not say what is in it
        same = form is info.format
        encodings[info.name] = file.encodings[info.name] if same else _NAMES[form.name]
        names = {"source": info.format.name, "target": form.name}
        rows.append({"name": info.name, "to": info.name, **names})
    front = {k.removeprefix("cyb."): v for k, v in file.metadata.items() if k.startswith("cyb.")}
    facts = {k: v for k, v in front.items() if k not in ("name", "types", "format_version")}
    name = str(front.get("name", ""))
    write_model(path, name, file.sections, plans, encodings, progress, facts)
    return rows


def _form(file: CybModel, info: TensorInfo, wanted: Format) -> Format:
    if info.format is None:
        # raises with what is known
        file.rows(info.name)
    matrix = len(info.shape) > 1 and info.name not in file.scales.values()
    if wanted is not CANONICAL and matrix and info.columns % wanted.block == 0:
        return wanted
    return CANONICAL if info.name in file.scales else info.format


def _pieces(file: CybModel, info: TensorInfo, form: Format) -> Iterator[np.ndarray]:
    step = max(1, STEP // info.columns)
    for start in range(0, info.rows, step):
        rows = file.rows(info.name)[start : start + step]
        if form is info.format:
            yield np.ascontiguousarray(rows)
        elif form is CANONICAL:
            codes = info.format.decode(rows)
            yield form.encode_blocks(codes.reshape(-1, form.block))
        else:
            values = file.values(info.name, start, start + step)
            try:
                yield form.quantize(values)
            except FormatError as error:
                raise FormatError(f"{file.path}: {info.name} from row {start}: {error}") from None
