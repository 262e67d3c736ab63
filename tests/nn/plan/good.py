"""Lines of plans that are right: the examples of all statements, each with its value, and other ways to write some."""

from sbpflow import S
from sbpflow.nn.plan.language.statements import STATEMENTS, Statement

DATA = (("data", S(0)),)
EACH: dict[str, Statement] = {text: kind(*said) for kind in STATEMENTS for text, said in kind.form.examples.items()}

# Other ways to write the same, all of them harmless.
SAME = {
    "\ufeffGRID CUDA(data = 2,tensor=4 ,)\r": "grid cuda (data=2, tensor=4)",
    "grid  cuda : [0-7]  as  (data=2, tensor=4)": "grid cuda : [0-7] as (data=2, tensor=4)",
    "\t{ states , grads } ** :data= s( 0 )": "{grads,states} **: data=S(0)",
    "{weights}  h : data = split(0)": "h: data=S(0)",
    "h->tensor=b": "h -> tensor=B",
    "h<-tensor=P()": "h <- tensor=P",
    "h.{a, b}: ?": "h.{a,b}: ?",
    "h[2:8].up: ?": "h[2:8].up: ?",
    "INPUT x <- data=S(0),": "input x <- data=S(0)",
    "Take TP_PLAN Over tensor": "take tp_plan over tensor",
    "pipe h over pipe": "pipe h over pipe by 1f1b",
    "pipe h over pipe, 4 slices, 2 micro_batches": "pipe h over pipe by terapipe, 2 micro-batches, 4 slices",
    "pipe h over pipe by GPipe , 1 micro-batch": "pipe h over pipe by gpipe, 1 micro-batches",
    "offload weights h to CPU ahead 1": "offload weights h to cpu ahead 1",
    "cast h to torch.bfloat16": "cast h to bf16",
    "cast h to Float32": "cast h to fp32",
    "limit memory 1.5gib": "limit memory 1536 MiB",
    "limit memory 1e3 kb": "limit memory 1 MB",
    "expect 2 all_gathers": "expect 2 all_gather",
    "expect 2 all-gather per layer": "expect 2 all_gather a layer",
    "expect 0 all_gather": "expect no all_gather",
    "expect gathered<=1 layer": "expect gathered at once <= 1 layers",
    "expect memory ≤ 1 GiB": "expect memory <= 1 GiB",
    "expect time<=200 ms": "expect time <= 0.2 s",
    "expect time <= 2 seconds": "expect time <= 2 s",
    "seek micro_batches": "seek micro-batches",
}
