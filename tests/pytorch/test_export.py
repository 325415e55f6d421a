"""Layers of experts exported by torch.export, and one packaged by AOTInductor, give the original layer's results, also
for other numbers of tokens."""

from __future__ import annotations

import io

import pytest
import torch

from tests.helpers.layers import LAYERS, NO_OTHER_TRAINING, ON_THE_HOST, assert_close, found, inputs

# name, training, strict
MODES = [(name, True, False) for name in LAYERS if name not in ON_THE_HOST]
MODES += [(name, False, False) for name in LAYERS if name not in NO_OTHER_TRAINING]
MODES += [(name, True, True) for name in ("vmoe", "capacity", "groups", "expert choice", "priority")]


@pytest.mark.parametrize(("name", "training", "strict"), MODES)
def test_an_exported_layer_is_the_layer(name, training, strict):
    if strict and name == "groups" and torch.__version__ < "2.13":
        pytest.skip("this torch ends with an AttributeError: 'UnspecializedNNModuleSource' has no attribute 'is_input'")
    torch.manual_seed(0)
    made = LAYERS[name]().train(training)
    # torch.export specialises for sizes 0 and 1. With expert choice an expert takes at least 2 tokens if T >= 4.
    tokens = torch.export.Dim("tokens", min=4 if name == "expert choice" else 2, max=4096)
    shapes = {"x": {0: tokens}, "ids": {0: tokens}}
    program = torch.export.export(made, inputs(8), dynamic_shapes=shapes, strict=strict)
    programs = [program]
    # In evaluation programs have nodes of the same kinds, except that of "stable".
    if (training and not strict) or name == "stable":
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        programs.append(torch.export.load(file))
    for exported in (each.module() for each in programs):
        own = dict(exported.named_parameters())
        for count in (8, 4, 21):
            expected = found(made, made.parameters(), count)
            assert_close(found(exported, [own[name] for name, _ in made.named_parameters()], count), expected)


# With the defaults the C++ compiler also prepares headers for more programs than this one.
QUICK_BUILD = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}


@pytest.mark.timeout(900)  # the C++ compiler may take minutes on busy cores
def test_what_aot_inductor_packages_is_the_layer(tmp_path):
    torch.manual_seed(0)
    made = torch.nn.Sequential(LAYERS["tensor"]()).eval()
    x, _ = inputs(12)
    with torch.no_grad(), torch._inductor.config.patch(QUICK_BUILD):
        program = torch.export.export(made, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", min=2, max=4096)},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        call = torch._inductor.aoti_load_package(package)
        for count in (12, 3, 31):
            x, _ = inputs(count)
            torch.testing.assert_close(call(x), made(x), rtol=1e-5, atol=1e-6)
