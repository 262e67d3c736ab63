"""The plan of a published run, in the plan language: all that it says, and nothing chosen besides."""

from .setting import Architecture, Run

__all__ = ["plan_of"]

TENSOR = {
    "gpt": """
{embedding.words,head}.weight: tensor=S(0)
layers.*.attention.qkv: tensor=S(0)
layers.*.attention.proj.weight: tensor=S(1)
layers.*.mlp.up: tensor=S(0)
layers.*.mlp.down.weight: tensor=S(1)
""",
    "llama": """
{words,head}.weight: tensor=S(0)
layers.*.attention.{q,k,v}.weight: tensor=S(0)
layers.*.attention.o.weight: tensor=S(1)
layers.*.mlp.{gate,up}.weight: tensor=S(0)
layers.*.mlp.down.weight: tensor=S(1)
""",
}
MIXTURE = """
{words,head}.weight: tensor=S(0)
layers.*.attention.{q,k,v,q_up,kv_up}.weight: tensor=S(0)
layers.*.attention.o.weight: tensor=S(1)
"""
TENSOR |= {
    "titan": TENSOR["llama"],
    "even": TENSOR["llama"].replace("{words,head}", "layers.*.{words,head}"),
    "mixtral": MIXTURE,
    "deepseek": MIXTURE,
}
EXPERT = """
layers.*.mlp.experts.*: expert=S(0)
inside layers.*.mlp.experts use dropless over expert
"""
SEQUENCE = """
{FIRST} -> tensor=S(1)
layers.*.{norm1,norm2} -> tensor=S(1)
layers.*.{attention,mlp} -> tensor=S(1)
layers{BLOCKS} -> tensor=S(1)
"""
WHOLE = """
{FIRST} -> tensor=B
layers.*.{attention,mlp} -> tensor=B
"""  # all_reduce, also where samples could be cut
FIRST = {"gpt": "embedding", "even": "layers.0"}  # whose result is cut along words first
ZERO: tuple[list[str], ...] = ([], ["states **"], ["{grads,states} **"], ["**"])  # what is in pieces
AGAIN = {
    "full": "recompute layers.*",
    "core": "recompute layers.*.attention.core",
    "products": "recompute layers.* keep every second mm, attention",
}


def plan_of(of: Architecture, run: Run) -> str:
    """The text of the plan; `hold **` keeps flows that it does not name as they follow from it."""
    # Inner axes stay in a node: as everybody places them.
    sizes = {"pipe": run.pipe, "data": run.data, "context": run.context, "tensor": run.tensor}
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    folded = f", expert={run.expert} folds data" if run.expert > 1 else ""
    lines = [f"grid cuda ({axes or 'data=1'}{folded})"]
    if run.expert > 1:
        lines += EXPERT.strip().splitlines()
    if run.tensor > 1:
        lines += TENSOR[of.family].strip().splitlines()
        first, blocks = FIRST.get(of.family, "words"), "[:-1]" if of.family == "even" else ".*"
        flows = SEQUENCE if run.sequence else WHOLE
        lines += flows.replace("{FIRST}", first).replace("{BLOCKS}", blocks).strip().splitlines()
    cut = [f"{axis}=S({dim})" for dim, axis in enumerate(("data", "context")) if sizes[axis] > 1]
    lines += [f"input {name} <- {', '.join(cut)}" for name in ("tokens", "targets") if cut]
    shards = [axis for axis in ("data", "context") if sizes[axis] > 1]  # who has the same weights
    if shards:
        over = ", ".join(f"{axis}=S(0)" for axis in shards)
        lines += [f"{kinds}: {over}" for kinds in ZERO[run.zero]]
    if run.context > 1:
        lines.append("inside layers.*.attention.core use ring over context")
    if run.pipe > 1:
        chunks = f" v={run.chunks}" if run.chunks > 1 else ""
        lines.append(f"pipe layers over pipe by {run.schedule}{chunks}, {run.micro_batches} micro-batches")
    elif run.micro_batches > 1:
        lines.append(f"{run.micro_batches} micro-batches")
    if not of.fused and run.micro_batches > 1:
        lines.append("draw by micro-batch")
    if run.again:
        lines.append(AGAIN[run.again])
    half = "bf16" if run.dtype == "fp8" else run.dtype
    lines += [f"cast ** to {half}", f"cast grads ** to {run.gradients}", "cast states ** to fp32"]
    if run.dtype == "fp8":
        lines.append("cast layers.*.{attention,mlp} to fp8")
    return "\n".join([*lines, "hold **"])
