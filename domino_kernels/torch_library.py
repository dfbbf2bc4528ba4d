"""Where Torch meets `_C`: schemas, dispatch, dtype codes, streams, statuses.

An op is registered in one statement, in ops/<family>.py beside its public function:

    _gru_step = define("gru_step(Tensor x, ..., Tensor(a!) out) -> ()", _launch_gru_step)

`define` returns what the public function calls: the OpOverload (1.6 us a call with a Python
implementation, against 10.2 us for torch.library.custom_op: CONTRIBUTING.md, measured facts), or
past it where nobody looks (`_eager`). One implementation serves CPU and CUDA tensors:
`target(tensor)` tells `_C` which of the two runs, and on which stream.
"""

import torch
from torch.autograd import profiler

try:
    from domino_kernels import _C
except ImportError as error:
    from domino_kernels.build import build_info

    raise ImportError(f"domino_kernels._C cannot be loaded: {error}\n{build_info()}") from error

_LIBRARY = torch.library.Library("domino_kernels", "DEF")

DTYPES = {torch.float32: _C.F32, torch.float16: _C.F16, torch.bfloat16: _C.BF16}

# every registered op, by name: tests/test_schema.py runs opcheck on each
OPS: dict[str, torch._ops.OpOverload] = {}


def define(schema, implementation, fake=None, *, cpu=True, cuda=True):
    """Registers `schema` (out-variant: `name(...) -> ()`) and returns a function that calls it.

    `fake` says shapes and dtypes of what the op returns, from shapes and dtypes alone; an op that
    only writes its `Tensor(a!)` arguments returns nothing and needs none.
    """
    name = schema.split("(", 1)[0]
    if fake is None and not schema.rstrip().endswith("-> ()"):
        raise ValueError(f"{name}: an op that returns something needs a fake")
    _LIBRARY.define(schema)
    for key in ["CPU"] * cpu + ["CUDA"] * cuda:
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"domino_kernels::{name}", fake or _returns_nothing, lib=_LIBRARY)
    OPS[name] = getattr(torch.ops.domino_kernels, name).default
    return _eager(OPS[name], implementation) if cpu and cuda else OPS[name]


def _eager(overload, implementation):
    """`overload`, without the dispatcher where it would only hand plain tensors on.

    With 34 arguments the way through it takes 4 to 9 us. It is needed for tracing (compile, export,
    fake tensors, dispatch modes, functorch, jit), for the profiler's records, and for tensors that
    are not on a CPU or a CUDA device (meta).
    """

    def call(*args):
        tensor = args[0]
        if (
            not torch.compiler.is_compiling()
            and type(tensor) is torch.Tensor
            and (tensor.is_cuda or tensor.is_cpu)
            and torch._C._len_torch_dispatch_stack() == 0
            and torch._C._functorch.peek_interpreter_stack() is None
            and torch._C._get_tracing_state() is None
            and not profiler._is_profiler_enabled
        ):
            return implementation(*args)
        return overload(*args)

    return call


def _returns_nothing(*args, **kwargs):
    return None


def place(tensor):
    """What `_C` takes as `device` and `stream`: -1 and 0 run the CPU twin."""
    if not tensor.is_cuda:
        return -1, 0
    index = tensor.get_device()
    # what torch.cuda.current_stream(index).cuda_stream returns, without building a Stream object
    return index, torch._C._cuda_getCurrentRawStream(index)


def target(tensor):
    """`place` as keywords, which costs a call with fifty others of them 1 us more."""
    device, stream = place(tensor)
    return {"device": device, "stream": stream}


def pointer(tensor):
    """The address of an optional tensor, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def check_status(op, status):
    """Raises a RuntimeError that names the op for a status of `_C` other than 0."""
    if status == 0:
        return
    from domino_kernels.build import build_info

    info = build_info()
    name = _C.status_name(status)
    message = f"{op}: {name}"
    if status > 0:
        message = f"{op}: CUDA error {status} {name}: {_C.status_text(status)}"
    if name == "cudaErrorInsufficientDriver":
        message += f". CUDA {info.cuda_version} needs driver R{info.driver_minimum} or newer"
    elif name == "cudaErrorNoKernelImageForDevice":
        major, minor = torch.cuda.get_device_capability()
        message += (
            f". Built for {' '.join(info.cuda_archs)}, this GPU is sm_{major}{minor}; "
            f'rebuild with DOMINO_CUDA_ARCHS="{major}{minor}-real" pip install .'
        )
    elif status < 0:
        message += f" (CUDA backend {info.backends['cuda']})"
    raise RuntimeError(message)
