"""make hub: writes the layout of a kernel for the Hugging Face Hub, from Triton's kernels and the definitions.

dist/hub has a project for kernel-builder (build.toml, flake.nix, CARD.md, LICENSE, torch-ext) and what it would build
of Python alone: build/torch-cuda, and build/torch-cpu, where the definitions run. The library `kernels` loads either:

    kernels.get_local_kernel(Path("dist/hub"))

A copy of the package imports relatively and registers its operators under a name of its own, so that several versions,
and an installed moe_kernels, share a process.

Source: https://huggingface.co/docs/kernels/kernel-requirements (layout, metadata), kernel-builder's build.toml,
edition 5.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from moe_kernels import _version
from release.environments import ROOT, say

NAME = "moe-kernels"
MODULE = NAME.replace("-", "_")
VERSION = 0  # the Hub's number for an API that may still change
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")  # GPUs for which Triton's kernels are meant
PACKAGES = ("moe_kernels", "python_ref")
LEFT_OUT = (
    "__main__", "_checkout", "_source", "_visible_gpus", "cases", "info", "papers", "precompile", "verify",
    "backends/cpu", "backends/cuda", "backends/native",
)  # fmt: skip

NAMES = '''"""Names of this copy of the package: they differ between versions, which may share a process."""

from ._ops import add_op_namespace_prefix

OPERATORS = add_op_namespace_prefix("").partition("::")[0]
DEFINITIONS = f"{__package__}.python_ref"
'''
LAYERS = """
from . import nn  # noqa: E402

__all__ += ["nn"]
"""
ABSENT = """raise ImportError("the Hub's copy has Triton's kernels alone; install moe_kernels for C++ and CUDA")
"""
OPS = """import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{id}::{{op_name}}"
"""
COMPATIBLE = """import importlib.util
import sys
from pathlib import Path

# For old versions of the library kernels, which look for the package here.
_path = Path(__file__).parent.parent / "__init__.py"
_spec = importlib.util.spec_from_file_location("{id}", _path)
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
globals().update(vars(_module))
"""
BUILD = f"""[general]
name = "{NAME}"
version = {VERSION}
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda"]

[torch-noarch]
pyext = ["json", "py"]
cuda-capabilities = {json.dumps(CAPABILITIES)}
"""
FLAKE = f"""{{
  description = "Flake of {NAME}";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    {{ self, kernel-builder }}:
    kernel-builder.lib.genKernelFlakeOutputs {{
      inherit self;
      path = ./.;
    }};
}}
"""
CARD = f"""---
library_name: kernels
license: apache-2.0
tags:
- kernels
- mixture-of-experts
---

# {NAME} {_version.__version__}

Triton kernels for mixtures of experts, with gradients: top-k gates, routing under a capacity, grouped expert products,
k-winner-take-all masks, smooth-step tree gates, Sinkhorn iterations, and layers made of them.

```python
import torch
from kernels import get_kernel

mk = get_kernel("OWNER/{NAME}", version={VERSION})       # or get_local_kernel(path) of this folder
experts = mk.nn.ExpertMLP(16, 256, 512, device="cuda", dtype=torch.bfloat16)
gate = mk.nn.TopKGate(256, 16, 2, device="cuda", dtype=torch.bfloat16)
out = mk.nn.MoE(gate, experts)(torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16))
```

GPUs: NVIDIA, capability 8.0 and later. Needs torch 2.11 or later with Triton 3.6 or later. On a CPU the definitions
in plain PyTorch run, which are slow: `pip install` the package itself for kernels in C++.

**No kernel has run on a GPU yet.** Each is verified on the CPU, by executing the PTX that Triton compiles for sm_80
and sm_90.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m release.hub", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "hub", metavar="FOLDER", help="default: dist/hub")
    out = parser.parse_args().out.resolve()
    write(out)
    say(f"{out}: a project for kernel-builder, with build/torch-cuda and build/torch-cpu")
    return 0


def write(out: Path) -> None:
    """Writes the project and its builds into `out`, in place of what is there."""
    shutil.rmtree(out, ignore_errors=True)
    package = {path: text for root in PACKAGES for path, text in _copied(root)}
    digest = hashlib.sha256(json.dumps(package, sort_keys=True).encode()).hexdigest()[:12]
    files = {f"torch-ext/{MODULE}/{path}": text for path, text in package.items()}
    files |= {"build.toml": BUILD, "flake.nix": FLAKE, "CARD.md": CARD, "README.md": CARD}
    files |= {"LICENSE": (ROOT / "LICENSE").read_text()}
    for backend in ("cuda", "cpu"):
        made = _built(package, f"_{MODULE}_{backend}_{digest}", backend)
        files |= {f"build/torch-{backend}/{path}": text for path, text in made.items()}
    for path, text in files.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(text)


def _built(package: dict[str, str], identifier: str, backend: str) -> dict[str, str]:
    """The files of a build, as kernel-builder makes it of a project without C++."""
    files = package | {"_ops.py": OPS.format(id=identifier), f"{MODULE}/__init__.py": COMPATIBLE.format(id=identifier)}
    digests = {
        path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for path, text in sorted(files.items())
    }
    kind = {"type": backend} | ({"archs": CAPABILITIES} if backend == "cuda" else {})
    metadata = {"name": NAME, "id": identifier, "version": VERSION, "license": "Apache-2.0", "python-depends": []}
    metadata |= {"backend": kind, "digest": {"algorithm": "sha256", "files": digests}}
    return files | {"metadata.json": json.dumps(metadata, indent=2) + "\n"}


def _copied(root: str) -> Iterator[tuple[str, str]]:
    """(path in the copy, text) of the files of a package; python_ref becomes a part of moe_kernels."""
    for path in sorted([*(ROOT / root).rglob("*.py"), *(ROOT / root).rglob("*.json")]):
        name = path.relative_to(ROOT / PACKAGES[0] if root == PACKAGES[0] else ROOT).as_posix()
        if not any(name.removesuffix(".py") == each or name.startswith(f"{each}/") for each in LEFT_OUT):
            text = path.read_text()
            text = relative(text, name.count("/")) if path.suffix == ".py" else text
            yield name, text + LAYERS if (root, name) == (PACKAGES[0], "__init__.py") else text
    if root == PACKAGES[0]:
        yield "_names.py", NAMES
        yield from ((f"backends/{name}.py", ABSENT) for name in ("cpu", "cuda"))


def relative(text: str, depth: int) -> str:
    """A module's text with relative imports of PACKAGES, and without moe_kernels/_checkout.py, which a copy has not.

    depth: the number of packages in which the module is, below the outermost one.

    Raises:
        ValueError: an import has a form that cannot be made relative.
    """
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        written = ast.unparse(node) if isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr)) else ""
        line = getattr(node, "lineno", 1) - 1
        if written == "_checkout.warn_if_hiding()":
            lines[line] = ""
        elif isinstance(node, ast.Import) and any(_ours(each.name) for each in node.names):
            ((name, alias),) = ((each.name, each.asname) for each in node.names)
            module, _, last = name.rpartition(".")
            if not (module and alias):
                raise ValueError(f"expected `import a.b as c` or `from a import b`, got {written!r}")
            lines[line] = lines[line].replace(written, f"from {_path(module, depth)} import {last} as {alias}")
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _ours(node.module or ""):
            there = f"from {_path(node.module or '', depth)} import"
            lines[line] = lines[line].replace(f"from {node.module} import", there, 1).replace(" _checkout,", "")
    return "".join(lines)


def _ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _path(module: str, depth: int) -> str:
    """The relative form of a module's name; python_ref is a package within the outermost one."""
    package, _, rest = module.partition(".")
    return "." * (depth + 1) + (rest if package == PACKAGES[0] else module)


if __name__ == "__main__":
    raise SystemExit(main())
