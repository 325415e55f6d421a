"""The text of a source file that decides what it does: results carry hashes of it, which say when they are stale."""

from __future__ import annotations

import ast
import io
import tokenize


def python_code(text: str) -> str:
    """The lines of a Python file without comments and docstrings: changes of these leave results fresh."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            for row in range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1):
                lines[row - 1] = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(filter(None, map(str.rstrip, lines)))
