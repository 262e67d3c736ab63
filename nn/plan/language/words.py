"""The words of plans: each statement with an example, kinds, types, and what a reader is told was expected."""

from .statements import Kind

__all__ = ["EXAMPLES", "KINDS", "MICRO_BATCHES", "MORE_WORDS", "TAKEN", "TYPES", "WORDS"]

# The word that a statement begins with, or the sign that it has, and one such line.
EXAMPLES = {
    "grid": "grid cuda (data=2, tensor=4)",
    ":": "states **: data=S(0)",
    "->": "model.norm -> tensor=S(1)",
    "<-": "model.layers.*.mlp <- tensor=B",
    "input": "input tokens <- data=S(0)",
    "take": "take tp_plan over tensor",
    "place": "place model.vision at pipe=0",
    "pipe": "pipe model.layers over pipe by 1f1b, 8 micro-batches",
    "recompute": "recompute model.layers.* keep mm, attention",
    "offload": "offload states ** to cpu ahead 2",
    "cast": "cast {grads,states} ** to fp32",
    "inside": "inside model.layers.*.self_attn use ring over context",
    "compress": "compress model.layers.** by sign(rows=True) over data",
    "limit": "limit memory 70 GiB",
    "seek": "seek pipe, data, micro-batches",
    "expect": "expect 2 all_gather over tensor a layer forward",
    "expect gathered": "expect gathered at once <= 2 layers",
    "expect memory": "expect memory <= 40 GiB",
    "expect time": "expect time <= 0.2 s",
}

KINDS: tuple[Kind, ...] = ("weights", "grads", "states")
TAKEN = ("tp_plan", "ep_plan", "pp_plan")
MICRO_BATCHES = "micro-batches"

# How a type is spelled, and how else.
TYPES = {
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half", "f16"),
    "fp32": ("float32", "float", "f32"),
    "fp64": ("float64", "double", "f64"),
    "fp8": ("fp8_e4m3", "float8", "float8_e4m3fn"),
    "fp8_rowwise": ("float8_rowwise",),
}

# Of each terminal of the grammar how it is called where it is missing.
WORDS = {
    "$END": "the end of the line", "AHEAD": "'ahead'", "AND": "'and'", "AT": "'at'", "AT_MOST": "'at most'",
    "A_LAYER": "'a layer'", "BY": "'by'", "COLON": "':'", "COMMA": "','", "DEVICE": "a type of device",
    "DIRECTION": "'forward', 'backward', 'update'", "ENCODER": "an encoder such as topk(fraction=0.01)",
    "EQUAL": "'='", "FILE": "the file of a plan", "FOLDS": "'folds'",
    "GATHERED": "'gathered at once'", "HOLE": "'?'", "INT": "a whole number", "INTO": "'<-'", "KEEP": "'keep'",
    "LAYERS": "'layers'", "LESS": "'<='", "LPAR": "'('", "MEMORY": "'memory'", "MICRO_BATCHES": "'micro-batches'",
    "NAME": "an axis", "NO": "'no'", "NUMBER": "a number", "OF": "'of'", "ONLY": "'only'", "OP": "an op", "OUT": "'->'",
    "OVER": "'over'", "PATH": "a path", "PLACEMENT": "a placement", "RPAR": "')'", "SBP": "a signature such as S(0)",
    "SCHEDULE": "a schedule", "SECONDS": "'s'", "SLICES": "'slices'", "STAR": "'*'", "THING": "what to look for",
    "TIME": "'time'", "TO": "'to'", "TYPE": "a type", "UNIT": "a unit such as GiB", "USE": "'use'", "WORD": "a name",
}  # fmt: skip

# Where a word of the grammar is another thing than elsewhere.
MORE_WORDS = {
    ("take", "WORD"): "tp_plan, ep_plan or pp_plan",
    ("offload", "WORD"): "cpu or disk",
    ("inside", "WORD"): "the name of a way to compute",
    ("expect", "WORD"): "a move such as all_gather",
    ("pipe", "NAME"): "a name",
    ("recompute", "WORD"): "the name of an op",
}
