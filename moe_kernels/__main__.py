"""python -m moe_kernels info | verify | compile | train | study"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import textwrap
from collections.abc import Sequence

from moe_kernels import __version__, backends, info, verify

WIDTH = 100  # columns of the terminal for which tables are made
_LINE = "{:<18}  {:<7}  {:<8}  {:<6}  {:>5}  {:>11}  {:>9}  {}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. A wrong command line raises SystemExit(2)."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m moe_kernels", description="Kernels for mixtures of experts.")
    parser.add_argument("--version", action="version", version=f"moe_kernels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="info | verify | compile | train | study")
    commands.add_parser("info", help="this machine, what was built for it, and which backend runs which operation")
    _add_verify(commands.add_parser("verify", help="compare every kernel that can run here with its definition"))
    _add_compile(commands.add_parser("compile", help="compile the Triton kernels for a GPU that is elsewhere"))
    train = commands.add_parser("train", help="train the systems of a paper, as a recipe says, and print a table")
    if words[:1] == ["train"]:  # loads modules that info and verify do not need
        importlib.import_module("moe_kernels.papers.train").add_arguments(train, words[1:])
    study = commands.add_parser("study", help="other experiments of the papers, or on their claims")
    if words[:1] == ["study"]:
        importlib.import_module("moe_kernels.papers.studies").add_arguments(study, words[1:])
    args = parser.parse_args(words)
    if args.command == "info":
        print(info.describe())
        return 0
    if args.command == "verify":
        return _verify(parser, args)
    if args.command == "compile":
        return _compile(parser, args)
    module = "moe_kernels.papers.train" if args.command == "train" else "moe_kernels.papers.studies"
    return importlib.import_module(module).run(args)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares every kernel that can run on this machine with its definition. Prints the worst error and the "
        "allowed one: of selected or copied outputs the number of wrong elements, of computed ones the largest "
        "difference from the definition in float64 over its largest element. Allowed is twice the error of the "
        "definition in the same dtype, plus a floor: a gradient that cancels may have a large one. "
        "Exit status 1 if a kernel failed, else 2 if a backend given with --backend could run nothing. "
        "TRITON_INTERPRET=1 runs the Triton kernels on the CPU, slowly."
    )
    parser.add_argument("--op", action="append", default=[], metavar="NAME", help="default: all; may be repeated")
    parser.add_argument("--backend", action="append", default=[], metavar="NAME", help="default: all; may be repeated")
    parser.add_argument("--small", action="store_true", help="small inputs only, for interpreters and sanitizers")


def _verify(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        found = verify.verify(_names(args.op), args.backend, small=args.small)
    except ValueError as error:
        parser.error(str(error))
    header = ("operation", "backend", "dtype", "device", "cases", "worst error", "allowed", "verdict")
    print(_LINE.format(*header).rstrip())
    rows = []
    for row in found:  # as each is known: some take a minute
        rows.append(row)
        if row.verdict != "not run":
            *cells, note = verify.cells(row)
            print(_LINE.format(*cells).rstrip(), flush=True)
            if row.verdict == "FAILED" or note.startswith(verify.DISPUTED):
                print(f"  {note}", flush=True)
    failed = sum(row.verdict == "FAILED" for row in rows)
    ran = sum(row.verdict == "ok" for row in rows)
    print(f"\n{ran} ok, {failed} failed, {len(rows) - ran - failed} not run")
    print("allowed: twice the definition's own error in that dtype, plus a floor; 0 where outputs are exact")
    for (backend, reason), names in _not_run(rows).items():
        print(textwrap.fill(f"not run on {backend}: {', '.join(names)}: {reason}", WIDTH, subsequent_indent="  "))
    idle = verify.idle(args.backend, rows)
    if idle:
        print(f"verify: {idle}", file=sys.stderr)
    return 1 if failed else 2 if idle else 0


def _not_run(rows: Sequence[verify.Row]) -> dict[tuple[str, str], list[str]]:
    """(backend, reason) -> operations, with the dtype unless the backend runs no dtype."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.verdict == "not run":
            name = row.operation if row.dtype == "-" else f"{row.operation} {row.dtype}"
            found.setdefault((row.backend, row.note), []).append(name)
    return found


def _add_compile(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compiles the Triton kernels that verify launches on a GPU into Triton's folder (TRITON_CACHE_DIR, or else "
        "~/.triton/cache). Needs no GPU. Exit status 1 if a kernel cannot be compiled."
    )
    parser.add_argument("--target", required=True, metavar="NAME", help="cuda:80 for an A100, cuda:90 for an H100, ...")
    parser.add_argument("--op", action="append", default=[], metavar="NAME", help="default: all; may be repeated")
    parser.add_argument("--dtype", action="append", default=[], metavar="NAME", help="default: all; may be repeated")
    parser.add_argument("--small", action="store_true", help="kernels for small inputs only, as of verify --small")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that compile; default: one per core")


def _compile(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        precompile = importlib.import_module("moe_kernels.precompile")  # imports Triton, which may be missing
        launches = precompile.cases(args.target, _names(args.op), args.dtype, small=args.small)
        summary = precompile.fill_cache(launches, args.jobs, _show_progress if sys.stderr.isatty() else None)
    except (ModuleNotFoundError, ValueError, backends.BackendError) as error:
        parser.error(str(error))
    for failure in summary.failures:
        print(f"compile: {failure}", file=sys.stderr)
    print(f"{args.target}: {summary}")
    return 1 if summary.failures else 0


def _names(ops: Sequence[str]) -> list[str]:
    """The operations by the names that verify has for them: "plan", as in the README's table, is make_plan."""
    return list(dict.fromkeys(backends.ALIASES.get(op, op) for op in ops))


def _show_progress(done: int, total: int) -> None:
    print(f"\r{done} of {total} kernels", end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal's encoding may lack a character of the table
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, closed the pipe; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
