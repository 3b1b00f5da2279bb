"""Rules between the trees of two libraries: they rename, transpose, stack, join and cast leaves.

Pass them as `rename=` to `restore`, `load_numpy`, `open`, `diff` and `convert`.
"""

from __future__ import annotations

from jaxckpt._formats.huggingface import huggingface_rules as huggingface_rules
from jaxckpt._rules.rule import Rule as Rule
from jaxckpt._rules.rule_set import Rules as Rules
