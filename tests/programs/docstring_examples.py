"""Runs the examples in all docstrings of the package at the path that is its argument; prints how many there are."""

from __future__ import annotations

import ast
import doctest
import shutil
import sys
from pathlib import Path

shutil.rmtree("/tmp/jaxckpt-doc", ignore_errors=True)
Path("/tmp/jaxckpt-doc").mkdir()
n_failed = n_examples = 0
for path in sorted(Path(sys.argv[1]).rglob("*.py")):
    # The source, because doctest does not see the docstrings of decorated functions.
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            continue
        text = ast.get_docstring(node) or ""
        test = doctest.DocTestParser().get_doctest(text, {}, getattr(node, "name", path.stem), str(path), 0)
        outcome = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test)
        n_failed += outcome.failed
        n_examples += outcome.attempted
print(n_examples)
sys.exit(bool(n_failed))
