"""The other side of the comparison: `transformers` on PyTorch, in an environment of its own.

    python -m tests.models.parity.with_transformers goldens FOLDER     logits of each family's small model
    python -m tests.models.parity.with_transformers logits FOLDER OUT  logits of an exported model on TOKENS
    python -m tests.models.parity.with_transformers gguf FILE OUT      logits and token ids of a GGUF file

`make parity` runs all three and compares. `tests/models/goldens` holds what the first printed once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from tests.models.parity import families
from tests.models.parity.families import PROMPT


def _logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def _small_model(family: str) -> Any:
    values = families.config(family)
    kind = values.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **values)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    tied = values.get("tie_word_embeddings")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.gate_up_proj"):  # fused in memory, apart in files
                stem = name.removesuffix("gate_up_proj")
                _, double, width = parameter.shape
                for expert in range(len(parameter)):
                    for half, part in enumerate(("gate", "up")):
                        rows = slice(half * double // 2, (half + 1) * double // 2)
                        value = families.weight(f"{stem}{expert}.{part}_proj.weight", (double // 2, width))
                        parameter[expert, rows] = torch.tensor(value)
            elif name.endswith("experts.down_proj"):
                stem = name.removesuffix("down_proj")
                for expert in range(len(parameter)):
                    value = families.weight(f"{stem}{expert}.down_proj.weight", tuple(parameter.shape[1:]))
                    parameter[expert] = torch.tensor(value)
            elif not (tied and name == "lm_head.weight"):
                parameter.copy_(torch.tensor(families.weight(name, tuple(parameter.shape))))
    return model


def write_goldens(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for family in families.FAMILIES:
        logits = _logits(_small_model(family), families.tokens(family))
        metadata = {"transformers": transformers.__version__, "torch": torch.__version__}
        save_file({"logits": logits}, folder / f"{family}.safetensors", metadata)
        print(f"{family}: logits up to {np.abs(logits).max():.2f}")


def write_logits(folder: Path, out: Path, **loading: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **loading).eval()
    vocabulary = model.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, (2, 32))
    arrays = {"tokens": tokens, "logits": _logits(model, tokens)}
    if (folder / "tokenizer.json").is_file() or loading:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **loading)
        arrays["prompt_ids"] = np.array(tokenizer(PROMPT)["input_ids"])
    save_file(arrays, out)
    print(json.dumps({name: list(array.shape) for name, array in arrays.items()}))


def main() -> None:
    what, first, *rest = sys.argv[1:]
    if what == "goldens":
        write_goldens(Path(first))
    elif what == "logits":
        write_logits(Path(first), Path(rest[0]))
    else:
        path = Path(first)
        write_logits(path.parent, Path(rest[0]), gguf_file=path.name)


if __name__ == "__main__":
    main()
