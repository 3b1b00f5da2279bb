"""Rules between the trees of two libraries: they rename, transpose, stack, join and cast leaves.

Pass them as `rename=` to `restore`, `load_numpy`, `open`, `diff` and `convert`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxckpt._formats.huggingface import huggingface_rules as huggingface_rules
from jaxckpt._formats.peft import lora_rules as lora_rules
from jaxckpt._keywords import explain_missing_names as _explain_missing_names
from jaxckpt._rules.rule import Rule as Rule
from jaxckpt._rules.rule_set import Rules as Rules
from jaxckpt._rules.rule_set import stack as stack

if not TYPE_CHECKING:  # otherwise type checkers would accept every name
    __getattr__ = _explain_missing_names(__name__)
