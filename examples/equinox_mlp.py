"""Equinox and Optax: an eqx.nn.MLP, of which the arrays are saved on one mesh, gone on with on another."""

import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine that has no eight accelerators
devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
mesh = Mesh(np.reshape(devices[:8], (2, 4)), ("data", "model"))
other = Mesh(np.reshape(devices[:6], (3, 2)), ("data", "model"))

optimizer = optax.adamw(1e-2)


class Training(eqx.Module):
    model: eqx.nn.MLP
    opt_state: optax.OptState
    key: jax.Array
    
def create():
    model = eqx.nn.MLP(12, 12, 48, depth=1, activation=jax.nn.gelu, key=jax.random.key(0))
    return Training(model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), jax.random.key(1))

import shutil
f = "/tmp/w/p7/examples/probe"
shutil.rmtree(f, ignore_errors=True)
def tell(name, call):
    try:
        r = call()
        print("OK ", name, str(r)[:1500])
        return r
    except BaseException as e:
        print("ERR", name, type(e).__name__, str(e)[:1200])
t = create()
tell("whole", lambda: jaxckpt.save(f+"/a", t))
tell("arrays", lambda: jaxckpt.save(f+"/b", eqx.filter(t, eqx.is_array)).total_bytes)
tell("paths", lambda: list(jaxckpt.open(f+"/b")))
tell("restore whole", lambda: jaxckpt.restore(f+"/b", t))
tell("restore whole non strict", lambda: jaxckpt.restore(f+"/b", t, strict=False))
a = eqx.filter_eval_shape(create)
print(a)
tell("restore abstract whole", lambda: jaxckpt.restore(f+"/b", a))
tell("restore abstract whole, non strict", lambda: jaxckpt.restore(f+"/b", a, strict=False))
tell("filtered", lambda: jaxckpt.restore(f+"/b", eqx.filter(t, eqx.is_array)))
tell("filtered abstract", lambda: jaxckpt.restore(f+"/b", eqx.filter(a, lambda l: isinstance(l, jax.ShapeDtypeStruct))))
r = tell("filtered abstract", lambda: jaxckpt.restore(f+"/b", eqx.filter(a, lambda l: isinstance(l, jax.ShapeDtypeStruct)), mesh=mesh))
print(eqx.combine(r, t))
print(eqx.tree_equal(r, eqx.filter(t, eqx.is_array)))
