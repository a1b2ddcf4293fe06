"""LoRA adapters of random weights for the tiny Llama, as PEFT lays them out.

    python tiny_lora.py FOLDER HIDDEN_SIZE LAYERS NAME…

Run by the Python of SGLang's environment; a folder for each name. The same name gives the same.
"""

import json
import sys
from pathlib import Path

RANK = 8
MODULE = "o_proj"
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": 2 * RANK,
    "target_modules": [MODULE],
    "bias": "none",
}


def write(folder: Path, name: str, hidden_size: int, layers: int) -> None:
    """Make both files of one."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(sum(name.encode()))
    weights = {}
    for layer in range(layers):
        module = f"base_model.model.model.layers.{layer}.self_attn.{MODULE}"
        weights[f"{module}.lora_A.weight"] = torch.randn(RANK, hidden_size) / 10
        weights[f"{module}.lora_B.weight"] = torch.randn(hidden_size, RANK) / 10
    (folder / name).mkdir(parents=True)
    save_file(weights, folder / name / "adapter_model.safetensors")
    (folder / name / "adapter_config.json").write_text(json.dumps(CONFIG))


if __name__ == "__main__":
    for one in sys.argv[4:]:
        write(Path(sys.argv[1]), one, int(sys.argv[2]), int(sys.argv[3]))
