"""Trained models on disk: a state dict, model-SIDE-SEED.pt, and a description of the model, model-SIDE-SEED.json.

SIDE names one of the models that the recipe compares, with the values of swept options if there are any.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_kernels.papers import data as datasets
from moe_kernels.papers import recipes
from moe_kernels.papers.recipes import Recipe, Splits, Task
from moe_kernels.papers.train import checkpoint
from moe_kernels.papers.train.loop import Run


@dataclass
class Trained:
    """A model that `train --out` wrote: `model` is in eval mode, `predict` applies it to new inputs.

    recipe: the recipe with its options.
    data: the data set with zeros in place of its samples. Its `classes` (images) or `vocabulary` (text, as bytes) names
        the columns of a prediction; but `moebert --bert` predicts BERT's tokens.
    """

    recipe: Recipe
    data: datasets.Dataset
    task: Task
    seed: int

    @property
    def model(self) -> torch.nn.Module:
        return self.task.model

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """`predict`."""
        return self.predict(*inputs)

    @torch.no_grad()
    def predict(self, *inputs: torch.Tensor) -> Any:
        """Predictions for a batch; their form depends on the data set.

        Images (B, C * H * W), as moe_kernels.papers.data gives them -> logits or log probabilities (B, classes).
        Tokens (B, S) -> logits (B, S, vocabulary).
        Users (B,) and movies (B,) -> (logit of watching (B,), rating (B,)).
        Rows of a table (B, inputs) -> the one output that the recipe learns (B, 1), scaled as in the data set.
        """
        assert self.task.predict is not None
        self.model.eval()
        return self.task.predict(*inputs)


def chosen_state(run: Run) -> Mapping[str, Any]:
    """The state dict of the model at evaluation `run.chosen`."""
    best = run.best if run.validates and run.recipe.choose == "best" else None
    return best or run.model_state()


def save_model(folder: Path, name: str, run: Run, state: Mapping[str, Any]) -> None:
    """Writes the model with this state dict to model-NAME.pt and model-NAME.json."""
    path = folder / f"model-{name}.pt"
    checkpoint.save_tensors(path, state)
    description = {
        "recipe": type(run.recipe).__module__.rpartition(".")[2],
        "options": dataclasses.asdict(run.recipe),
        "seed": run.seed,
        "steps": run.steps,
        "step": int(run.rows[run.chosen]["step"]),
        "data": datasets.describe(run.data.source),
    }
    checkpoint.write(path.with_suffix(".json"), json.dumps(description, indent=1) + "\n")


def load_model(path: str | Path, device: torch.device | str = "cpu") -> Trained:
    """The model that `train --out` wrote to `path`, model-SIDE-SEED.pt, ready to predict.

    Raises:
        ValueError: a file is missing or damaged, the .pt holds more than torch.load(weights_only=True) reads, or its
            tensors do not fit the model of the .json. For `moebert --bert FOLDER`: FOLDER is gone.
        ImportError: the model is made from BERT, and transformers is not installed.
    """
    path = Path(path)
    json_path = path.with_suffix(".json")
    state = checkpoint.read(path)
    try:
        saved = json.loads(json_path.read_text())
        options: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in saved["options"].items()}
        recipe = recipes.find(saved["recipe"])(**options)
        data = datasets.blank(saved["data"], getattr(recipe, "length", 1) + 1).to(device)
        splits = recipe.blank_splits(data)
        with torch.random.fork_rng(devices=[]):
            task = recipe.build(Splits(data, splits.train, splits.test), saved["seed"], saved["steps"])
            if task.before_step is not None and saved["step"] > 0:
                task.before_step(saved["step"] - 1)  # sets what depends on the step, such as a gate's k
        task.model.load_state_dict(state)
    except ImportError:
        raise
    except Exception as error:  # damaged files raise errors of any kind
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path} and {json_path.name} are no model of this program: {first}") from error
    task.model.eval()
    return Trained(recipe, data, task, saved["seed"])
