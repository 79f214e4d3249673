"""Put a trained demo model into the package: weights, tokenizer, held-out text, model card.

python -m examples.package_demo --model demo --trained out/demo --data .carry/demo
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from examples.demo_data import HELDOUT_NAME, Dataset
from examples.demo_models import MAX_LENGTH, MODELS
from examples.demo_tokenizer import save_tokenizer
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.params import model_specs, num_params

ROOT = Path(__file__).parents[1]
DEMOS = ROOT / "qwen_hybrid" / "demos"
VECTORS = ROOT / "tests" / "vectors"

MECHANISMS = {
    "demo": """\
Four residual streams with hyper-connections, six Gated DeltaNet layers (one with an n-gram
table), two sparse-attention layers that keep 64 tokens and the unfinished group, eight experts
of which two work, and an MTP head.""",
    "demo-dense": """\
Six Gated DeltaNet layers, two of gated full attention, gated MLPs, tied embeddings and an MTP
head.""",
}
PHASES = {
    "demo": """\
First, sparse layers see every token, while the indexer learns the attention mass of each group.
Second, they see what it selects, and the MTP head learns from the target's own predictions over
three self-fed steps. Third, that loss also reaches the trunk through the hidden rows the head
reads.""",
    "demo-dense": """\
First, the trunk alone. Second, the MTP head learns from the target's own predictions over three
self-fed steps. Third, that loss also reaches the trunk through the hidden rows the head reads.""",
}


def model_card(
    model: str, dataset: Dataset, training: dict[str, Any], quality: dict[str, Any]
) -> str:
    """Return the text of the model's README.md."""
    hf_config = MODELS[model]
    card = (Path(__file__).parent / "demo_card.md").read_text()
    return card.format(
        name=model,
        parameters=num_params(model_specs(HybridConfig.from_hf(hf_config))),
        architecture=hf_config["model_type"].removesuffix("_text"),
        mechanisms=MECHANISMS[model],
        data=dataset.provenance,
        heldout=len(dataset.heldout_text.encode()),
        heldout_name=HELDOUT_NAME,
        steps=training["step"],
        minutes=training["seconds"] / 60,
        phases=PHASES[model],
        quality=quality,
    )


def package(model: str, trained: Path, dataset: Dataset, destination: Path) -> None:
    """Write the folder that ships."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(trained / name, destination / name)
    save_tokenizer(dataset.tokenizer, destination, max_length=MAX_LENGTH)
    training, quality = (
        json.loads((trained / name).read_text()) for name in ("training.json", "quality.json")
    )
    card = model_card(model, dataset, training, quality)
    (destination / "README.md").write_text(card)


def main() -> None:
    """Package one model and write the held-out text for the tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MECHANISMS, required=True)
    parser.add_argument("--trained", type=Path, required=True, help="weights and their records")
    parser.add_argument("--data", type=Path, default=Path(".carry/demo"), help="prepared corpus")
    arguments = parser.parse_args()
    dataset = Dataset.load(arguments.data)
    destination = DEMOS / arguments.model
    package(arguments.model, arguments.trained, dataset, destination)
    VECTORS.mkdir(parents=True, exist_ok=True)
    (VECTORS / HELDOUT_NAME).write_text(dataset.heldout_text)
    size = sum(path.stat().st_size for path in destination.iterdir())
    print(f"{destination}: {size:,} bytes")


if __name__ == "__main__":
    main()
