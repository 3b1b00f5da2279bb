"""Prints which large libraries are loaded by the modules that read a manifest, without the package's __init__."""

import importlib
import sys
import types

package = types.ModuleType("jaxckpt")
package.__path__ = [sys.argv[1]]
sys.modules["jaxckpt"] = package
for name in ("_model.manifest", "_store.load_manifest"):
    importlib.import_module(f"jaxckpt.{name}")
print(*sorted(sys.modules.keys() & {"jax", "tensorstore"}))
