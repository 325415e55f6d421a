"""A BERT checkpoint of transformers, and a copy of it with experts as in MoEBERT.

    model = load("folder of a BertForMaskedLM")
    student = model.with_experts(lambda index: MoE(HashGate(30522, 4), ExpertMLP(4, 768, 768, bias=True)))
    logits, outputs = student(ids)

Nothing is downloaded: only files of the folder are read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import AutoTokenizer, BertForMaskedLM
except ImportError as error:
    raise ImportError(
        "moe_kernels.integrations.bert needs transformers 5: pip install 'transformers>=5.8.1'; "
        f"importing it gave: {error}"
    ) from error

from moe_kernels.nn.moe import MoE, MoEOutput
from moe_kernels.nn.split import SPLIT_ACTIVATIONS

__all__ = ["BertWithExperts", "load", "load_tokenizer", "token_windows"]

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
VOCABULARY = ("tokenizer.json", "vocab.txt")
LINES = 1000  # lines of text in one call of the tokenizer, to limit its memory


class ExpertFeedForward(nn.Module):
    """LayerNorm(x + dropout(MoE(x))): a BertLayer's feed-forward layer with experts.

    Input: attention output x (B, S, D), token ids (B, S) for gates that route by id. Output: (B, S, D), MoEOutput.
    dropout, norm: the modules of the BertOutput that this layer replaces.
    """

    def __init__(self, moe: MoE, dropout: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.moe, self.dropout, self.norm = moe, dropout, norm

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, MoEOutput]:
        out = self.moe(x, ids, pass_through=False)
        return self.norm(x + self.dropout(out.y)), out


class BertWithExperts(nn.Module):
    """Token ids (B, S) -> logits (B, S, vocabulary) of a BertForMaskedLM and the outputs of its layers of experts.

    Attention has no mask, so token ids must not contain padding. Gates get the token ids.
    """

    def __init__(self, model: BertForMaskedLM) -> None:
        super().__init__()
        self.model = model

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the embedding."""
        return self.model.config.vocab_size

    def with_experts(self, layer: Callable[[int], MoE]) -> BertWithExperts:
        """A copy of the model, with `layer(index)` in place of the feed-forward layer of encoder layer `index`."""
        model = copy.deepcopy(self.model)
        for index, block in enumerate(model.bert.encoder.layer):
            block.experts = ExpertFeedForward(layer(index), block.output.dropout, block.output.LayerNorm)
            del block.intermediate, block.output
        return BertWithExperts(model)

    def feed_forwards(self) -> list[tuple[nn.Linear, nn.Linear, str]]:
        """(fc1, fc2, activation) of every dense feed-forward layer."""
        blocks = [block for block in self.model.bert.encoder.layer if not hasattr(block, "experts")]
        return [(block.intermediate.dense, block.output.dense, self.model.config.hidden_act) for block in blocks]

    def forward(self, x: Tensor, states: list[Tensor] | None = None) -> tuple[Tensor, list[MoEOutput]]:
        """states: a list to which the embeddings and the output of every layer are appended."""
        outputs: list[MoEOutput] = []
        states = [] if states is None else states
        h = self.model.bert.embeddings(x)
        states.append(h)
        for block in self.model.bert.encoder.layer:
            h = block.attention(h)[0]
            if hasattr(block, "experts"):
                h, out = block.experts(h, x)
                outputs.append(out)
            else:
                h = block.feed_forward_chunk(h)
            states.append(h)
        return self.model.cls(h), outputs


def load(folder: str | Path) -> BertWithExperts:
    """The BertForMaskedLM in a folder, without experts, in float32 and eval mode.

    Raises:
        ValueError: a file or weight is missing or damaged, the model is a decoder or no BERT, or its activation is
            not one of SPLIT_ACTIVATIONS (nn/split.py), those with act(0) = 0 whose layers can be split into experts.
    """
    place, config = _config(folder)
    if not any((place / name).is_file() for name in WEIGHTS):
        raise _error(place, f"one of {', '.join(WEIGHTS)}", f"found {_listed(place)}")
    if config.get("is_decoder"):
        raise _error(place, "an encoder", "config.json has is_decoder true")
    activation = config.get("hidden_act", "gelu")
    if activation not in SPLIT_ACTIVATIONS:
        raise _error(place, f"hidden_act {', '.join(SPLIT_ACTIVATIONS)}", f"config.json has {activation!r}")
    try:
        found: Any = BertForMaskedLM.from_pretrained(
            str(place), local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # damaged files raise errors of several libraries
        first = str(error).strip().partition("\n")[0]
        raise _error(place, "weights that transformers can read", f"{type(error).__name__}: {first}") from error
    model, info = found
    missing = sorted(info["missing_keys"])
    if missing:
        raise _error(
            place, "the weights of a BertForMaskedLM", f"{len(missing)} are missing, the first is {missing[0]}"
        )
    return BertWithExperts(model).eval()


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in the folder of a BERT checkpoint.

    Raises:
        ValueError: a file is missing or damaged, the tokenizer lacks [CLS], [SEP] or [MASK], or it has more tokens than
            the embedding (vocab_size in config.json).
    """
    place, config = _config(folder)
    if not any((place / name).is_file() for name in VOCABULARY):
        raise _error(place, f"one of {', '.join(VOCABULARY)}", f"found {_listed(place)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(place), local_files_only=True)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise _error(place, "a tokenizer that transformers can read", f"{type(error).__name__}: {first}") from error
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "mask")}
    missing = [name for name, each in ids.items() if each is None]
    if missing:
        raise _error(place, "a tokenizer with cls, sep and mask tokens", f"it has no {', '.join(missing)}")
    if len(tokenizer) > config.get("vocab_size", 30522):
        raise _error(
            place,
            f"a tokenizer of at most vocab_size {config.get('vocab_size', 30522)} tokens",
            f"it has {len(tokenizer)}",
        )
    return tokenizer


def token_windows(folder: str | Path, text: bytes, length: int) -> Tensor:
    """Windows of a text in UTF-8, int32 (n, length): [CLS], the next length - 2 tokens, [SEP].

    Tokens at the end that fill no window are dropped.

    Raises:
        ValueError: as load_tokenizer; or length is below 3 or above the model's positions.
    """
    place, config = _config(folder)
    tokenizer, positions = load_tokenizer(place), config.get("max_position_embeddings", 512)
    if not 3 <= length <= positions:
        raise ValueError(f"bert: length must be from 3 to {positions}, the positions of {place}; got {length}")
    lines, size = text.decode("utf-8", "replace").splitlines(), length - 2
    ids: list[int] = []
    for start in range(0, len(lines), LINES):
        found = tokenizer(lines[start : start + LINES], add_special_tokens=False, verbose=False)["input_ids"]
        ids += [each for line in found for each in line]
    rows = len(ids) // size
    tokens = torch.tensor(ids[: rows * size], dtype=torch.int32).view(rows, size)
    ends = tokens.new_ones(rows, 1)
    return torch.cat([ends * tokenizer.cls_token_id, tokens, ends * tokenizer.sep_token_id], 1)


def _config(folder: str | Path) -> tuple[Path, dict[str, Any]]:
    """The folder and its config.json as a dict; ValueError unless model_type is "bert"."""
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise _error(place, "a folder", "it is a file" if place.exists() else "there is none")
    path = place / "config.json"
    if not path.is_file():
        raise _error(place, "config.json", f"found {_listed(place)}")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _error(place, "config.json in JSON", str(error)) from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "bert":
        raise _error(place, "model_type 'bert' in config.json", f"found {kind!r}")
    return place, config


def _listed(place: Path) -> str:
    names = sorted(each.name for each in place.iterdir())
    return ", ".join(names[:8]) + ", ..." * (len(names) > 8) if names else "an empty folder"


def _error(place: Path, expected: str, found: str) -> ValueError:
    return ValueError(f"bert: {place} is no folder of a BertForMaskedLM: expected {expected}; {found}")
