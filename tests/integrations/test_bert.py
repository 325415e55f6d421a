"""The moebert recipe on tiny random BERT checkpoints, which these tests write with the package transformers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil

import pytest
import torch

from moe_kernels.nn.experts import ExpertMLP
from moe_kernels.nn.gates import HashGate, TopKGate
from moe_kernels.nn.moe import MoE
from moe_kernels.nn.policies import TokenChoice
from moe_kernels.papers import train
from moe_kernels.papers.data.text import load as load_text
from moe_kernels.papers.recipes._text import IGNORED
from moe_kernels.papers.recipes.moebert import MoEBERT, importance, masked
from moe_kernels.papers.train.loop import Run
from tests.helpers.planted import interrupted

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS += ("the", "cat", "sat", "on", "mat", "and", "rat", "a", "dog", "ran", "##s", ".")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = "the cat sat on the mat and the rats sat on the cat .\na dog ran and the cats ran on the mat .\n" * 20


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Imports transformers before the first test; an import at collection would slow down every run of pytest."""
    global transformers, bert
    import transformers

    from moe_kernels.integrations import bert


@pytest.fixture(scope="module", name="checkpoint")
def tiny_checkpoint(tmp_path_factory):
    """A folder with a random BertForMaskedLM and its tokenizer, as save_pretrained writes them."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **SIZES)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertForMaskedLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(5)  # BERT's initial standard deviation, 0.02, would make all outputs nearly equal
    model.save_pretrained(folder)
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(name="text")
def text_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(TEXT)
    return path


def arguments(checkpoint, text, *words):
    parser = argparse.ArgumentParser()
    train.add_arguments(parser, ["moebert"])
    common = ["--data", str(text), "--bert", str(checkpoint), "--device", "cpu", "--threads", "1", "--length", "10"]
    small = ["--batch-size", "8", "--expert-hidden", "8", "--share", "5", "--windows", "8", "--eval-batch", "16"]
    return parser.parse_args(["moebert", *common, *small, *words])


def test_a_dropped_token_is_added_to_no_copy_of_itself():
    """ExpertFeedForward adds a dropped token once, as the residual, even if its MoE has pass_through."""
    moe = MoE(TopKGate(8, 2, 1), ExpertMLP(2, 8, 4), TokenChoice(0.5), pass_through=True)
    layer, x = bert.ExpertFeedForward(moe, torch.nn.Identity(), torch.nn.Identity()), torch.randn(2, 6, 8)
    y, out = layer(x, torch.zeros(2, 6, dtype=torch.int64))
    dropped = (out.plan.slot_row < 0).view(2, 6)
    assert dropped.any()
    assert torch.equal(y[dropped], x[dropped])


def test_a_checkpoint_is_split_and_distilled(checkpoint, text, tmp_path, capsys):
    """Trains the seven models in --sides. Kernels agree with the reference, and the written models load and predict."""
    out = tmp_path / "out"
    words = ("--sides", "dense", "small", "unguided", "topk", "hash", "comet", "comet+", "--steps", "6")
    args = arguments(checkpoint, text, *words, "--dense-share", "0.3", "--check-steps", "3", "--out", str(out))
    assert train.run(args) == 0
    assert "comet+" in capsys.readouterr().out
    report = json.loads((out / "result.json").read_text())
    assert {name: each["passed"] for name, each in report["agreement"].items()} == dict.fromkeys(args.sides, True)
    for run in report["runs"]:
        assert [row["step"] for row in run["rows"]][-1] == 6
        assert all(math.isfinite(row["test bits"]) for row in run["rows"])
        assert run["rows"][-1]["test bits"] < run["rows"][0]["test bits"] + 1
        loaded = train.load_model(out / f"model-{run['side']}-0.pt")
        assert loaded.model.split == (run["side"] != "dense")
        repeated = Run(loaded.recipe, 0, loaded.recipe.splits(load_text(text)))
        if repeated.task.before_step is not None:
            repeated.task.before_step(5)
        repeated.task.model.load_state_dict(loaded.model.state_dict())
        assert repeated.evaluate()["test bits"] == pytest.approx(run["rows"][-1]["test bits"], rel=1e-5)
        tokens = torch.randint(5, len(WORDS), (2, 10))
        assert loaded.predict(tokens).shape == (2, 10, len(WORDS))


@pytest.mark.parametrize("side", ["dense", "hash", "comet"])
def test_a_checkpoint_learns(checkpoint, text, side):
    """Tests the mean of three seeds, as one seed's result depends on rounding."""
    recipe = MoEBERT(
        sides=(side,), bert=str(checkpoint), expert_hidden=12, share=6, length=22, steps=60, dense_share=0.0,
        lr=0.01, distill=0.01, batch_size=16, windows=8,
    )  # fmt: skip
    bits = []
    for seed in range(3):
        run = Run(recipe, seed, recipe.splits(load_text(text)))
        run.advance(0)
        run.advance(60)
        bits.append([row["test bits"] for row in run.rows])
    before, after = (sum(each) / 3 for each in zip(*bits, strict=True))
    assert after < before - 1
    assert after < math.log2(16)


def test_loading_a_model_without_its_checkpoint_names_the_folder(checkpoint, text, tmp_path):
    moved, out = tmp_path / "checkpoint", tmp_path / "out"
    shutil.copytree(checkpoint, moved)
    words = ("--sides", "hash", "--steps", "1", "--dense-share", "0", "--check-steps", "0", "--out", str(out))
    assert train.run(arguments(moved, text, *words)) == 0
    shutil.rmtree(moved)
    with pytest.raises(ValueError, match=f"{moved} is no folder of a BertForMaskedLM: expected a folder"):
        train.load_model(out / "model-hash-0.pt")


@pytest.mark.parametrize("side", ["small", "hash", "balanced", "comet", "hash+"])
def test_a_split_with_all_neurons_is_the_checkpoint(checkpoint, text, side):
    """If each expert has all neurons of the dense layer, the untrained student computes what the checkpoint does."""
    recipe = MoEBERT(
        sides=(side,), bert=str(checkpoint), expert_hidden=24, share=24, length=10, steps=4, dense_share=0.0,
        lr=0.0, entropy=0.0, zeta=0.0, eval_batch=16, batch_size=8,
    )  # fmt: skip
    run = Run(recipe, 0, recipe.splits(load_text(text)))
    run.task.model.eval()
    before = run.evaluate()
    run.task.before_step(0)
    run.task.model.eval()
    x = torch.randint(5, len(WORDS), (3, 10), generator=torch.Generator().manual_seed(0))
    whole = transformers.BertForMaskedLM.from_pretrained(checkpoint, local_files_only=True)
    wanted = whole(x, output_hidden_states=True)
    states: list[torch.Tensor] = []
    logits, outputs = run.task.model(x, states)
    assert len(outputs) == 2
    assert wanted.logits.std() > 0.1
    torch.testing.assert_close(logits, wanted.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, list(wanted.hidden_states), rtol=1e-4, atol=1e-5)
    assert run.evaluate()["test bits"] == pytest.approx(before["test bits"], rel=1e-5)
    run.task.model.student.eval()
    losses = run.task.loss(run.batch(0))
    assert losses["distilled"].item() == pytest.approx(0, abs=1e-8)


def test_the_layer_with_experts_keeps_berts_residual_and_norm(checkpoint):
    """The layer computes LayerNorm(a + y): a is the attention's output, y the output of the token's expert for a."""
    dense = bert.load(checkpoint)
    assert len(dense.feed_forwards()) == 2
    made = [MoE(HashGate(len(WORDS), 3), ExpertMLP(3, 16, 4, bias=True)) for _ in range(2)]
    student = dense.with_experts(made.__getitem__).eval()
    assert [block.experts.moe for block in student.model.bert.encoder.layer] == made
    assert student.feed_forwards() == []
    assert len(dense.feed_forwards()) == 2
    x = torch.randint(5, len(WORDS), (2, 7))
    seen = []
    layer = student.model.bert.encoder.layer[0].experts
    layer.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    student(x)
    ((a, (h, _)),) = seen
    experts, w = layer.moe.gate(a.flatten(0, 1), x.flatten()).experts[:, 0], layer.moe.experts
    hidden = torch.nn.functional.gelu(torch.einsum("td,tdh->th", a.flatten(0, 1), w.w_in[experts]) + w.b_in[experts])
    y = torch.einsum("th,thd->td", hidden, w.w_out[experts]) + w.b_out[experts]
    norm = layer.norm
    wanted = torch.nn.functional.layer_norm(a + y.view_as(a), (16,), norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(h, wanted, rtol=1e-5, atol=1e-5)
    layer.train().dropout.p = 1.0
    wanted = torch.nn.functional.layer_norm(a, (16,), norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(layer(a, x)[0], wanted)  # only the residual remains


def test_importance_is_by_window_gradients(checkpoint, text):
    recipe = MoEBERT(sides=("hash",), bert=str(checkpoint), length=10)
    tokens, draw = (each[:3] for each in recipe.splits(load_text(text)).train)
    x, y = masked(tokens.long(), draw, WORDS.index("[MASK]"))
    model = bert.load(checkpoint)
    found = importance(model, [(x[:2], y[:2]), (x[2:], y[2:])])
    wanted = [torch.zeros(24), torch.zeros(24)]
    for row, target in zip(x, y, strict=True):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(row[None])[0][0], target, ignore_index=IGNORED).backward()
        for total, (fc1, fc2, _) in zip(wanted, model.feed_forwards(), strict=True):
            total += ((fc1.weight * fc1.weight.grad).sum(1) + (fc2.weight * fc2.weight.grad).sum(0)).abs().detach()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def test_masked_tokens(checkpoint, text):
    """15 % of the tokens between [CLS] and [SEP] are masked: random ones in training, fixed ones in evaluation."""
    recipe = MoEBERT(sides=("hash",), bert=str(checkpoint), length=22)
    splits = recipe.splits(load_text(text))
    tokens, draw = splits.train
    assert len(draw.unique(dim=0)) == len(draw) > 1  # other places in each window
    assert tokens.dtype == torch.int32
    assert (tokens[:, 0] == 2).all()
    assert (tokens[:, -1] == 3).all()
    words = " ".join(WORDS[each] for each in tokens[0, 1:-1])
    assert words == "the cat sat on the mat and the rat ##s sat on the cat . a dog ran and the"
    x, y = masked(tokens.long(), draw, 4)
    changed = x != tokens
    assert torch.equal(changed, y != IGNORED)
    assert torch.equal(y[changed], tokens[changed].long())
    assert (x[changed] == 4).all()
    assert (changed.sum(1) == 3).all()  # 15 % of 20
    assert not changed[:, [0, -1]].any()
    assert changed.any(0).sum() > 15
    repeated = recipe.splits(load_text(text))
    assert all(torch.equal(a, b) for a, b in zip(splits.test, repeated.test, strict=True))
    recipe = dataclasses.replace(recipe, expert_hidden=8, share=5)
    run = Run(recipe, 0, splits)
    run.task.model.eval()  # without dropout the losses differ only by the masks
    first, second = (run.task.loss(run.batch(0))["text"].item() for _ in range(2))
    assert first != second
    assert run.evaluate() == run.evaluate()


def test_windows_of_tokens(checkpoint):
    """Windows cross lines. Unknown words become [UNK]; bytes that are not UTF-8 and incomplete windows are left out."""
    found = bert.token_windows(checkpoint, b"The cat sat\non a\xff zebra. The cat", 5)
    assert found.tolist() == [[2, 5, 6, 7, 3], [2, 8, 12, 1, 3], [2, 16, 5, 6, 3]]
    assert bert.token_windows(checkpoint, b"the cat sat", 10).shape == (0, 10)
    assert bert.token_windows(checkpoint, b"the cat " * 15, 32).shape == (1, 32)  # as long as the positions
    words = [5 + line % 7 for line in range(2 * bert.LINES + 1)]  # the tokenizer gets the lines in three calls
    text = "\n".join(WORDS[each] for each in words).encode()
    assert bert.token_windows(checkpoint, text, 3)[:, 1].tolist() == words
    found = bert.token_windows(checkpoint, text, 5)  # 3 words a window, which do not divide LINES
    assert found[:, 1:-1].flatten().tolist() == words[: len(words) // 3 * 3]


def test_a_checkpoint_in_16_bits_loads_in_float32(checkpoint, tmp_path):
    model = transformers.BertForMaskedLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = bert.load(tmp_path)
    assert {each.dtype for each in loaded.parameters()} == {torch.float32}


def test_a_text_shorter_than_a_window_is_an_error(checkpoint, text):
    """The test part must fill a window; a validation part that does not is left out."""
    whole = load_text(text)
    with pytest.raises(ValueError, match="moebert: expected at least 28 tokens of test text for a window of length 30"):
        MoEBERT(sides=("hash",), bert=str(checkpoint), length=30).splits(whole)
    recipe = MoEBERT(sides=("hash",), bert=str(checkpoint), length=10)
    assert recipe.splits(whole).valid is not None
    assert recipe.splits(dataclasses.replace(whole, valid_tokens=whole.valid_tokens[:5])).valid is None


def test_distillation_of_a_checkpoint_resumes_exactly(checkpoint, text, tmp_path):
    """Resumes a run that was interrupted after the model was split into experts, with dropout and random masks."""
    words = ("--sides", "comet+", "topk", "--steps", "6", "--every", "2", "--dense-share", "0.4", "--check-steps", "0")
    whole, broken = interrupted(lambda out: arguments(checkpoint, text, *words, "--out", str(tmp_path / out)), 11)
    assert whole == broken
    assert all(math.isfinite(number) for run in whole for row in run[1:] for number in row)


def _config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def _without(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def _headless(folder):
    transformers.BertModel.from_pretrained(folder, local_files_only=True).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "expected a folder; there is none"),
        (_without("config.json"), "expected config.json; found model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "expected config.json in JSON"),
        (_config(model_type="gpt2"), "expected model_type 'bert' in config.json; found 'gpt2'"),
        (_config(is_decoder=True), "expected an encoder; config.json has is_decoder true"),
        (_config(hidden_act="gelu_new"), "expected hidden_act relu, gelu, silu, tanh; config.json has 'gelu_new'"),
        (_without("model.safetensors"), "expected one of model.safetensors, .*; found config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"1"), "expected weights that transformers can"),
        (_headless, "expected the weights of a BertForMaskedLM; .* missing, the first is cls.predictions"),
        (_without("tokenizer.json", "vocab.txt"), "expected one of tokenizer.json, vocab.txt; found config.json"),
        (_config(vocab_size=9), f"expected a tokenizer of at most vocab_size 9 tokens; it has {len(WORDS)}"),
        (_config(max_position_embeddings=9), "length must be from 3 to 9, the positions of .*; got 10"),
    ],
)
def test_a_folder_without_a_checkpoint_is_an_error(checkpoint, text, tmp_path, damage, message, capsys):
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    damage(folder)
    assert train.run(arguments(folder, text, "--sides", "hash", "--steps", "2")) == 2
    error = capsys.readouterr().err
    assert str(folder) in error
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


def test_a_share_larger_than_the_checkpoints_layers_is_an_error(checkpoint, text, capsys):
    args = arguments(checkpoint, text, "--sides", "hash", "--steps", "2", "--expert-hidden", "30", "--share", "25")
    assert train.run(args) == 2
    assert "share must be at most 24, the smaller of hidden and expert-hidden; got 25" in capsys.readouterr().err


def _tokenizer(**facts):
    """Makes the tokenizer one of no particular model, with these special tokens alone."""
    words = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **facts})
    return lambda folder: (folder / "tokenizer_config.json").write_text(words)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "tokenizer.json").write_text("{"),
            r"expected a tokenizer that transformers can read; \w+: .+",
        ),
        (_tokenizer(), "expected a tokenizer with cls, sep and mask tokens; it has no cls, sep, mask"),
        (
            _tokenizer(cls_token="[CLS]", sep_token="[SEP]"),
            "expected a tokenizer with cls, sep and mask tokens; it has no mask",
        ),
    ],
    ids=["damaged", "no tokens", "no mask"],
)
def test_a_tokenizer_without_what_windows_need_is_an_error(checkpoint, tmp_path, damage, message):
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    damage(folder)
    with pytest.raises(ValueError, match=f"^bert: {folder} is no folder of a BertForMaskedLM: {message}$"):
        bert.load_tokenizer(folder)
    _tokenizer(cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")(folder)
    shutil.copy(checkpoint / "tokenizer.json", folder)
    assert bert.load_tokenizer(folder).mask_token_id == WORDS.index("[MASK]")
