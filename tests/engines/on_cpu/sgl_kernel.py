"""In the place of SGLang's compiled kernels, which its wheel has for GPUs alone.

SGLang imports names from here and, on a CPU without AMX, computes with torch instead; a name that
it calls all the same raises. Where it prepares copies from and to a GPU without asking whether
there is one (adapters, KV transfers), nothing is to be done: memory is not pinned, events are over.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args: object, **_options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is compiled for other machines")

    return absent


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        return make(*args, **options)

    return made


for _name in ("empty", "full", "ones", "tensor", "zeros"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda self, *_: self


class _Event:
    """What is to be awaited of a GPU."""

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True


torch.cuda.Event = _Event
torch.cuda.current_stream = lambda *_: None
torch.cuda.cudart = lambda: SimpleNamespace(
    cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0
)
