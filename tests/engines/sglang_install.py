"""What SGLang needs on a CPU, by its own metadata.

    python sglang_install.py

Run by the Python of an environment that has the wheel and nothing else. It prints requirements, one
a line: all but what computes on GPUs alone or serves what no text model needs.
"""

import importlib.metadata
import re
import sys

from pip._vendor.packaging.requirements import Requirement

NOT_FROM_HERE = re.compile(
    "apache-tvm|av$|build$|cuda-|datasets|decord|deepseek|flash|humming|kernels|mistral|modelscope"
    "|nvidia-(cutlass|mathdx)|nvshmem|py-spy|quack|sgl-|sglang-kernel|smg-|tilelang|timm|tml-"
    "|torchaudio|torchcodec"
)


def wanted(requirements: list[str]) -> list[str]:
    """Those that hold for this Python and machine, without extras and what is left out."""
    parsed = [Requirement(text) for text in requirements]
    here = [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in here:
        one.marker = None
    return [str(one) for one in here if not NOT_FROM_HERE.match(one.name.lower())]


if __name__ == "__main__":
    sys.stdout.write("\n".join(wanted(importlib.metadata.requires("sglang") or [])) + "\n")
