"""Which known mistake makes these numbers? Tries them all on one tensor or step, nearest first.

The numbers are an .npz or a trace with values (`pnrt trace --full`). Keys of an .npz:

    y [T, N] or [N], x [T, K] or [K]    a product's result and input (before any rotation)
    y [n, K] and no x, row (optional)   decoded weights, from a row on
    y and a step's inputs               rope: x; attention: q, k, v (all positions); rms_norm: x;
                                        swiglu: gate, up; delta: q, k, v, g, beta (all tokens);
                                        start (optional): position of the first row of y
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pnrt.container.kinds import open_any
from pnrt.container.mapped import MappedFile
from pnrt.debug import misreadings_scales  # noqa: F401  (enters its misreadings)
from pnrt.debug.misreadings import MISREADINGS
from pnrt.debug.misuses import MISUSES, RIGHT, Guess, Product
from pnrt.debug.misuses_steps import STEPS, Context
from pnrt.debug.npz import read_npz
from pnrt.debug.trace import Trace, is_trace
from pnrt.errors import ModelError
from pnrt.models.rotation import Rotation, read_rotation
from pnrt.program import Program, Step

Progress = Callable[[str, int, int], None]
Numbers = Mapping[str, np.ndarray]

NEEDED = "an .npz with y (and x), or a trace, is needed. numpy.savez makes one."
# a guess nearer than this, relative to the numbers' own size, makes them
TOLERANCE = 1e-4
# guesses this much farther than the nearest cannot be told from it
ALIKE = 3.0
# weights, rows and tokens looked at: enough to tell, whatever the size of the tensor
WEIGHTS, ROWS, TOKENS = 1 << 20, 256, 8


@dataclass
class Explanation:
    """What was found.

    Attributes:
        about: tensor or step; kind: of the numbers, as in "q4_0 product, 256 of 4096 rows".
        guesses: dicts of name, says, distance (relative RMS; None where not finite), nearest first.
        named: names of the guesses that make the numbers and cannot be told apart; "right" among
            them means that nothing is wrong here.
    """

    about: str
    kind: str
    guesses: list[dict[str, Any]] = field(default_factory=list)
    named: list[str] = field(default_factory=list)

    @property
    def found(self) -> bool:
        return bool(self.named)


def explain(
    path: str | Path,
    numbers: str | Path,
    *,
    tensor: str | None = None,
    step: str | None = None,
    activations: str | None = None,
    rotation: str | None = None,
    extra_types: Mapping[int, str] | None = None,
    tolerance: float = TOLERANCE,
    progress: Progress | None = None,
) -> Explanation:
    """Try the known mistakes on the numbers of one tensor or step.

    Args:
        path: the model file; numbers: .npz or full trace of the wrong side.
        tensor, step: whose numbers they are; one of them, a trace takes either.
        activations: how a product should see its input; default q8_0, or what a trace says.
        rotation: as of `read_rotation`.
        tolerance: relative distance within which a guess makes the numbers.
    Raises:
        FileError, FormatError, ModelError: numbers, names or shapes that do not fit.
    """
    if (tensor is None) == (step is None):
        raise ModelError(
            "explain: needed is --tensor NAME or --step NAME, and only one of them. Give one."
        )
    with open_any(path, extra_types=extra_types) as file:
        rotated = _rotation(file, rotation)
        if is_trace(Path(numbers)):
            from pnrt.debug.explain_trace import from_trace

            program = _program(file, rotated)
            with Trace(numbers) as trace:
                given, tensor, chosen = from_trace(trace, program, tensor, step, file.path)
                activations = activations or trace.index.get("activations")
        else:
            given = read_npz(Path(numbers), NEEDED)
            chosen = _step(_program(file, rotated), step) if step is not None else None
        if chosen is not None and chosen.op == "matmul":
            tensor, chosen = chosen.weights[0], None
        if chosen is not None:
            about, kind, y, guesses = _step_guesses(file, chosen, given, rotated)
        else:
            about = tensor
            kind, y, guesses = _tensor_guesses(file, tensor, given, activations or "q8_0", rotated)
        return _rank(Explanation(about, kind), y, guesses, tolerance, progress)


def _rank(
    out: Explanation, y: np.ndarray, guesses: Iterator[Guess], tolerance: float, progress
) -> Explanation:
    good = np.isfinite(y)
    if not good.any():
        raise ModelError(
            f"{out.about}: y holds no finite value; a distance needs some. "
            "`pnrt trace --nan-stop` finds where the others come from."
        )
    size = _norm(y[good])
    if size == 0:
        raise ModelError(f"{out.about}: y is all zeros; any scale of zero explains that.")
    nearest: dict[str, tuple[float, Guess]] = {}
    for done, guess in enumerate(guesses):
        if progress:
            progress(guess.name, done, done + 1)
        distance = _distance(guess.y, y, good, size)
        if guess.name not in nearest or distance < nearest[guess.name][0]:
            nearest[guess.name] = distance, guess
    ranked = sorted(nearest.values(), key=lambda pair: pair[0])
    out.guesses = [
        {"name": g.name, "says": g.says, "distance": d if np.isfinite(d) else None}
        for d, g in ranked
    ]
    makes = [(d, g) for d, g in ranked if d <= max(tolerance, g.noise)]
    if makes:
        # what fits without allowance for another order of roundings comes first
        strict = [pair for pair in makes if pair[0] <= tolerance] or makes
        limit = max(ALIKE * strict[0][0], 1e-6)
        named = [g.name for d, g in strict if d <= limit]
        # a mistake that changes nothing here is none
        out.named = [RIGHT] if RIGHT in named else named
    return out


def _distance(x: np.ndarray, y: np.ndarray, good: np.ndarray, size: float) -> float:
    """Relative RMS of x - y where y is finite; infinite if x is finite elsewhere than y."""
    if not np.array_equal(np.isfinite(x), good):
        return np.inf
    with np.errstate(over="ignore"):
        return _norm(x[good].astype(np.float64) - y[good]) / size


def _norm(x: np.ndarray) -> float:
    # a sum, not BLAS: its threads cost more than they save here
    return float(np.sqrt(np.square(x).sum()))


# products and decoded weights


def _tensor_guesses(
    file: MappedFile, name: str, given: Numbers, activations: str, rotation: Rotation
) -> tuple[str, np.ndarray, Iterator[Guess]]:
    from pnrt.backend import ACTIVATIONS, check_choice

    check_choice("activations", activations, ACTIVATIONS)
    info, rows, y = file.tensor(name), file.rows(name), _array(given, "y", name)
    y = y[None] if y.ndim == 1 else y
    if "x" not in given:
        return _weights(file, name, given, y, rows)
    x = np.ascontiguousarray(_array(given, "x", name), np.float32)
    x = x[None] if x.ndim == 1 else x
    if x.shape != (len(y), info.columns) or y.shape[1:] != (info.rows,):
        raise ModelError(
            f"{name}: x is {list(x.shape)} and y {list(y.shape)}; [T, {info.columns}] and "
            f"[T, {info.rows}] are needed. Give the product's input and its result."
        )
    tokens, index = _spread(len(y), TOKENS), _spread(info.rows, _count(info.columns))
    delta = None
    if getattr(_config(file), "delta", None) and name.endswith("ssm_out.weight"):
        d = _config(file).delta
        delta = (d.state_size, d.value_heads, d.key_heads)
    product = Product(
        file, name, index, np.ascontiguousarray(rows[index]), x[tokens], y[tokens][:, index],
        activations, rotation, delta,
    )  # fmt: skip
    kind = f"{info.type_name} product, {len(index)} of {info.rows} rows, {len(tokens)} tokens"
    return kind, product.y, _product_guesses(product)


def _product_guesses(p: Product) -> Iterator[Guess]:
    for misuse in MISUSES:
        yield from misuse(p)
    for reading in MISREADINGS:
        if p.form.name in reading.formats:
            for more, y in p.times(p.scaled(reading.weights(p.form, p.rows))):
                yield Guess(f"{reading.name}{more}", reading.says, y)


def _weights(
    file: MappedFile, name: str, given: Numbers, y: np.ndarray, rows: np.ndarray
) -> tuple[str, np.ndarray, Iterator[Guess]]:
    info, first = file.tensor(name), _number(given, "row", name)
    if y.shape[1] != info.columns or not 0 <= first <= info.rows - len(y):
        raise ModelError(
            f"{name}: y is {list(y.shape)} from row {first} on, and there is no x; the tensor is "
            f"[{info.rows}, {info.columns}]. Give x [T, {info.columns}] beside a product's y, or "
            f"decoded rows [n, {info.columns}]."
        )
    picked = _spread(len(y), _count(info.columns))
    part = np.ascontiguousarray(rows[first + picked])

    def guesses():
        yield Guess(RIGHT, "the right weights", file.tensor(name).format.decode(part))
        for reading in MISREADINGS:
            if info.format.name in reading.formats:
                w = reading.weights(info.format, part)
                yield Guess(reading.name, reading.says, w)

    return f"{info.type_name} weights, {len(picked)} rows", y[picked], guesses()


# other steps


def _step_guesses(
    file: MappedFile, step: Step, given: Numbers, rotation: Rotation
) -> tuple[str, str, np.ndarray, Iterator[Guess]]:
    if step.op not in STEPS:
        raise ModelError(
            f"step {step.name}: no known mistakes of {step.op}; there are some of matmul, "
            f"{', '.join(STEPS)}. Choose such a step."
        )
    roles, guess = STEPS[step.op]
    arrays = {role: _two(_array(given, role, step.name)) for role in roles}
    y = _two(_array(given, "y", step.name))
    program, config = _program(file, rotation), _config(file)
    groups, dim = program.caches[step.numbers["cache"]] if step.op == "attention" else (0, 0)
    factors = None
    if "rope_freqs.weight" in file.tensors:
        factors = file.values("rope_freqs.weight").reshape(-1)
    weights = tuple(file.values(name).reshape(-1) for name in step.weights)
    start = _number(given, "start", step.name)
    context = Context(step.numbers, config, factors, groups, dim, weights, start)
    try:
        results = list(guess(context, arrays))
    except (ValueError, IndexError) as error:
        shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in {**arrays, "y": y}.items())
        raise ModelError(
            f"step {step.name}: {shapes} do not fit the model's {step.op} with "
            f"{dict(step.numbers)} ({error}). Give each as [tokens, width]."
        ) from error
    width = results[0].y.shape[1]
    if len(y) != len(results[0].y) or y.shape[1] < width:
        raise ModelError(
            f"step {step.name}: y is {list(y.shape)}; these inputs give "
            f"{list(results[0].y.shape)}. Give result and inputs of the same tokens."
        )
    return step.name, f"{step.op}, {len(y)} tokens", y[:, :width], iter(results)


# reading


def _array(given: Numbers, name: str, about: str) -> np.ndarray:
    if name not in given:
        raise ModelError(
            f"{about}: the numbers hold {', '.join(given) or 'nothing'}; {name} is missing. "
            "Add it to the .npz."
        )
    a = np.asarray(given[name])
    if a.dtype.kind not in "fiu" or a.ndim not in (1, 2, 3) or not a.size:
        raise ModelError(
            f"{about}: {name} is {a.dtype} of shape {list(a.shape)}; numbers of shape "
            "[tokens, width] are needed."
        )
    with np.errstate(all="ignore"):
        a = a.astype(np.float64 if name == "y" else np.float32)
    if name != "y" and not np.isfinite(a).all():
        raise ModelError(f"{about}: {name} holds values that are not finite; it must not.")
    return a


def _two(a: np.ndarray) -> np.ndarray:
    """[T, width], whether heads were an axis or tokens were not."""
    return a[None] if a.ndim == 1 else a.reshape(len(a), -1)


def _number(given: Numbers, name: str, about: str) -> int:
    value = np.asarray(given.get(name, 0))
    if value.size != 1 or value.dtype.kind not in "iu" or value.item() < 0:
        raise ModelError(f"{about}: {name} is {value.tolist()!r}; one whole number is needed.")
    return int(value.item())


def _spread(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def _count(columns: int) -> int:
    return max(16, min(ROWS, WEIGHTS // columns))


def _rotation(file: MappedFile, choice: str | None) -> Rotation:
    try:
        return read_rotation(file, choice)
    except ModelError:
        if choice is not None:
            raise
        # an undeclared rotation is one of the things to find out
        return Rotation(source="not declared")


def _config(file: MappedFile):
    from pnrt.models.config import read_config

    try:
        return read_config(file)
    except ModelError:
        # a file of tensors that is no model: products can be explained all the same
        return None


def _program(file: MappedFile, rotation: Rotation) -> Program:
    from pnrt.generate import build_program
    from pnrt.models.config import read_config

    return build_program(read_config(file), set(file.tensors), rotation)


def _step(program: Program, name: str) -> Step:
    for step in program.steps:
        if step.name == name:
            return step
    raise ModelError(
        f"--step {name}: the program has no such step; it has {len(program.steps)}, such as "
        f"{', '.join(s.name for s in program.steps[:4])}. `pnrt trace FILE -p TEXT` lists them."
    )
