"""Names of torch that are not public: each is here with why it is needed, and is there in the torch that runs.

A torch that lacks one fails here by its name, and not deep inside of a call.
"""

import ast
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("placement", "sbp", "boxing", "actors", "nn", "sbpflow")

CAPTURE, KEYS, TYPES = "to see the ATen calls of a function", "to tell at which key a call is", "what an op is"
WORLD, COMPILE, FAKES = "groups and stores over one rendezvous", "to compile each rank's part", "tensors without values"
NEEDED: dict[str, str] = {
    "torch.Tensor._make_subclass": "the shell of a global tensor, in one call",
    "torch._C.DispatchKey": KEYS,
    "torch._C.DispatchKey.AutocastCPU": KEYS,
    "torch._C.DispatchKey.AutocastCUDA": KEYS,
    "torch._C.DispatchKey.PreDispatch": CAPTURE,
    "torch._C.DispatchKeySet": KEYS,
    "torch._C.TensorBase": "what C++ code has of a tensor, under its Python properties",
    "torch._C.TensorBase.data": "the property that refuses a global value for a plain tensor",
    "torch._C._DisableAutocast": "casts are captured once",
    "torch._C.DisableTorchFunction": "experts are tried while a step is captured",
    "torch._C._ForceDispatchKeyGuard": "casts are captured once",
    "torch._C._VariableFunctions": "torch's own binding of an op, at half the price",
    "torch._C._autograd._top_saved_tensors_default_hooks": "whether what autograd saves is some region's already",
    "torch._C._current_graph_task_id": "to know one backward pass from the next",
    "torch._C._dispatch_get_all_op_names": "to look for ops of the same name",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "to know which ops autocast casts",
    "torch._C._dispatch_tls_is_dispatch_key_excluded": KEYS,
    "torch._C._dispatch_tls_local_exclude_set": KEYS,
    "torch._C._dispatch_tls_local_include_set": KEYS,
    "torch._C._distributed_c10d": "the process group of a kind of device, by its backend's name",
    "torch._C._distributed_c10d.PrefixStore": WORLD,
    "torch._C._distributed_c10d.ProcessGroupGloo": WORLD,
    "torch._C._distributed_c10d.Store": WORLD,
    "torch._C._dynamo.eval_frame": "torch.compile is to leave what answers for global tensors alone",
    "torch._C._functorch.get_unwrapped": "tensors below transforms of torch.func, which a capture records",
    "torch._C._functorch.is_functorch_wrapped_tensor": "to know tensors of torch.func",
    "torch._C._functorch.peek_interpreter_stack": "whether a capture is inside of a transform of torch.func",
    "torch._C._is_any_autocast_enabled": "one question at each op, for what is part of its key",
    "torch._C._nn": "torch's own binding of an op, at half the price",
    "torch._C._storage_Use_Count": "whether another tensor would not see what is written",
    "torch._C.parse_schema": "a schema for a Function, which has none",
    "torch._amp_foreach_non_finite_check_and_unscale_": "GradScaler calls it",
    "torch._assert": "what a model may call",
    "torch.autograd.profiler._is_profiler_enabled": "spans for a profiler, on all threads, only while one records",
    "torch._dispatch.python.enable_python_dispatcher": CAPTURE,
    "torch._foreach_add_": "optimizers call it",
    "torch._foreach_norm": "clip_grad_norm_ calls it",
    "torch._functorch.eager_transforms": "where torch.func wraps tensors",
    "torch._functorch.vmap": "where torch.vmap wraps tensors",
    "torch._guards.TracingContext": COMPILE,
    "torch._guards.detect_fake_mode": "whether a step is being captured",
    "torch._guards.tracing": COMPILE,
    "torch._inductor.compile_fx": COMPILE,
    "torch._inductor.config": COMPILE,
    "torch._inductor.decomposition": COMPILE,
    "torch._ops.OpOverload": TYPES,
    "torch._ops.OpOverloadPacket": TYPES,
    "torch._scaled_mm": "products of 8 bits: the public one takes recipes that not every torch from 2.11 on has",
    "torch._subclasses.FakeTensor": FAKES,
    "torch._subclasses.fake_tensor.DataDependentOutputException": FAKES,
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": FAKES,
    "torch._subclasses.fake_tensor.FakeTensor": FAKES,
    "torch._subclasses.fake_tensor.FakeTensorMode": FAKES,
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": FAKES,
    "torch._subclasses.fake_tensor.unset_fake_temporarily": FAKES,
    "torch._subclasses.schema_check_mode.SchemaCheckMode": CAPTURE,
    "torch.autograd.Variable._execution_engine.queue_callback": "to be called when a backward pass is over",
    "torch.distributed.distributed_c10d._get_default_store": WORLD,
    "torch.distributed.distributed_c10d._set_pg_timeout": "flow.init(timeout=) before torch 2.14",
    "torch.fx.experimental.proxy_tensor._MakefxTracer": "where make_fx traces, to refuse it",
    "torch.nn.modules._functions.BackwardHookFunction": "to refuse full backward hooks by name",
    "torch.nn.modules.module._has_any_global_hook": "layers under hooks are not captured once for all",
    "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype": "to tell that there is nothing to clip",
    "torch.nn.utils.clip_grad._clip_grads_with_norm_": "to tell where a graph has used up what is to be clipped",
    "torch.utils._foreach_utils._foreach_supported_types": "that optimizers take their one-call path",
    "torch.utils._mode_utils.no_dispatch": "a deep model's thousands of fakes, made without a question to all modes",
    "torch.utils._python_dispatch.TorchDispatchMode": CAPTURE,
    "torch.utils._python_dispatch._disable_current_modes": "shells are made outside of fakes",
    "torch.utils._python_dispatch.autograd_would_have_decomposed": "inference mode leaves composite ops whole",
    "torch.utils._triton.has_triton": COMPILE,
    "torch.Tensor._make_wrapper_subclass": "stand-ins, which transforms wrap",
    "torch._C.DisableTorchFunctionSubclass": "calls of stand-ins go to torch's own code",
    "torch._C.DispatchKey.ADInplaceOrView": KEYS,
    "torch._C.DispatchKey.AutogradFunctionality": KEYS,
    "torch._C.DispatchKey.Undefined": KEYS,
    "torch._C._DisableTorchDispatch": "a stand-in takes another shape in place",
    "torch._C._EnableTorchFunction": "below transforms calls are those of eager code again",
    "torch._VF": "where forward-mode differentiation wraps tensors, in torch 2.11",
    "torch._functorch.predispatch": "where forward-mode differentiation wraps tensors",
    "torch._vmap_internals": "the vmap that torch.autograd.functional has for itself, to refuse it",
    "torch._dynamo._trace_wrapped_higher_order_op": "what masks of flex attention pick by",
}
SOMETIMES = {
    "torch._C.TensorBase.const_data_ptr": "of torch 2.13; asked for by hasattr",
}
TAKEN = {  # named by strings, in nn/transforms/flex_attention.py
    "torch.nn.attention.flex_attention.setup_compilation_env": "before torch compiles the op",
    "torch.nn.attention.flex_attention._warn_once": "that it is slow if not compiled",
    "torch.nn.attention.flex_attention._validate_device": "no gradients on processors",
    "torch.nn.attention.flex_attention.flex_attention_hop": "the op",
    "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": "whether it is compiled",
    "torch.nn.attention.flex_attention._LARGE_SPARSE_BLOCK_SIZE": "the size of the block that is all",
}
OPENED = {  # named by strings, in nn/transforms/levels.py
    "torch._functorch.vmap.vmap_increment_nesting": "a level of vmap",
    "torch._functorch.eager_transforms.grad_increment_nesting": "a level of derivatives",
    "torch._functorch.eager_transforms.jvp_increment_nesting": "a level of forward derivatives",
    "torch._functorch.eager_transforms._wrap_for_grad": "arguments of derivatives",
    "torch._functorch.eager_transforms._unwrap_for_grad": "results of derivatives",
    "torch._functorch.eager_transforms._autograd_grad": "gradients that are pulled once the level is closed",
    "torch._functorch.vmap._add_batch_dim": "arguments of vmap",
    "torch._functorch.vmap._remove_batch_dim": "results of vmap",
    "torch._functorch.predispatch._make_dual": "arguments of forward-mode differentiation",
    "torch._functorch.predispatch._unpack_dual": "results of forward-mode differentiation",
}
CLOSED = {  # named by strings, in nn/eager/refusals.py
    "torch._vmap_internals._create_batched_inputs": "the vmap that torch.autograd.functional has for itself",
    "torch.autograd._make_grads": "a global gradient of a plain tensor",
    "torch.distributed.distributed_c10d._check_single_tensor": "collectives of torch.distributed",
    "torch.distributed.distributed_c10d._check_tensor_list": "collectives of torch.distributed",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "torch.compile leaves what answers alone",
}


def private(name: str) -> bool:
    parts = name.split(".")
    ours = parts[0] == "torch" and parts[:2] != ["torch", "ops"]
    return ours and any(part.startswith("_") and not part.startswith("__") for part in parts)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def names_in(tree: ast.Module) -> Iterator[str]:
    """Whole dotted names, without their own beginnings."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            yield dotted(node)


def used() -> set[str]:
    files = [path for room in ROOMS for path in (ROOT / room).glob("**/*.py") if not path.is_symlink()]
    assert len(files) > 150
    return {name for path in files for name in names_in(ast.parse(path.read_text())) if private(name)}


def found(name: str) -> Any:
    parts = name.split(".")
    for at in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:at]))
        except ImportError:
            continue
        for part in parts[at:]:
            value = getattr(value, part)
        return value
    raise ImportError(name)


def test_every_private_name_of_torch_is_here_with_its_reason() -> None:
    assert used() == {*NEEDED, *SOMETIMES}


@pytest.mark.parametrize("name", [*NEEDED, *TAKEN, *OPENED, *CLOSED])
def test_a_private_name_is_there_in_this_torch(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # inductor's own, of what it imports
        assert found(name) is not None


def test_a_name_in_a_string_is_in_the_code_that_takes_it() -> None:
    source = (ROOT / "nn" / "eager" / "refusals.py").read_text()
    assert all(name.rpartition(".")[2] in source for name in CLOSED)
    source = (ROOT / "nn" / "transforms" / "levels.py").read_text()
    assert all(f'"{name.rpartition(".")[2]}"' in source for name in OPENED)
