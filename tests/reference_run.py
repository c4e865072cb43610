"""Run a program with the reference's ops: the bits every backend must return."""

import numpy as np

from pnrt import reference


def run_reference(model, tokens, activations: str, kv: str) -> np.ndarray:
    """Logits [T, V] of a model's own program, all tokens at once, from an empty state."""
    file, program = model.file, model.program
    cos, sin = (table[: len(tokens)] for table in model.session.rope_tables)
    slots, caches, kind = {}, {}, np.float16 if kv == "f16" else np.float32

    def vector(name):
        return file.tensors[name].format.decode(file.rows(name)).reshape(-1)

    def heads(x, count):
        return x[:, : x.shape[1] // count * count].reshape(len(x), count, -1)

    for step in program.steps:
        n = step.numbers
        x = slots.get(step.inputs[0]) if step.inputs else None
        weight = step.weights[0] if step.weights else None
        if step.op == "embed":
            y = reference.embedding(file.tensors[weight].format.name, file.rows(weight), tokens)
        elif step.op == "matmul":
            y = reference.matmul(
                file.tensors[weight].format.name, file.rows(weight), x, activations
            )
        elif step.op == "rms_norm":
            shaped = heads(x, n["heads"])
            y = reference.rms_norm(shaped, vector(weight), n["eps"]).reshape(x.shape)
        elif step.op == "add_bias":
            y = reference.add(x, np.broadcast_to(vector(weight), x.shape))
        elif step.op == "rope":
            y = reference.rope(heads(x, n["heads"]), cos, sin, n["neox"]).reshape(x.shape)
        elif step.op == "store_kv":
            groups, _ = program.caches[n["cache"]]
            stored = [slots[i].astype(kind).astype(np.float32) for i in step.inputs]
            caches[n["cache"]] = [heads(s, groups) for s in stored]
            continue
        elif step.op == "attention":
            y = reference.attention(heads(x, n["heads"]), *caches[n["cache"]], 0, n["scale"])
            y = y.reshape(len(x), -1)
        elif step.op == "swiglu":
            y = reference.swiglu(*(slots[i] for i in step.inputs))
        elif step.op == "add":
            y = reference.add(*(slots[i] for i in step.inputs))
        elif step.op == "take":
            y = x
        else:
            raise KeyError(step.op)
        slots[step.output] = y
    return slots[program.logits]
