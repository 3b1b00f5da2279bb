# run in /tmp/vo: orbax 0.5.20, flax 0.8.5, haiku
import os, sys, shutil, pickle, jax, jax.numpy as jnp, numpy as np, collections
import orbax.checkpoint as ocp, flax, haiku as hk
from flax.training import orbax_utils, checkpoints, train_state
import optax
out=sys.argv[1]; shutil.rmtree(out, ignore_errors=True); os.makedirs(out)
print(ocp.__version__, flax.__version__)
params={"dense":{"kernel":jnp.arange(12,dtype=jnp.float32).reshape(3,4),"bias":jnp.ones(4,jnp.bfloat16)}}
state={"params":params,"step":3,"lr":0.5,"name":"hello","none":None,"np":np.arange(5),"list":[jnp.zeros(2),(jnp.ones(1),{})],"opt":optax.adam(1e-3).init(params)}
ck=ocp.PyTreeCheckpointer()
sa=orbax_utils.save_args_from_target(state)
ck.save(out+"/orbax0520_agg",state,save_args=sa)
ck.save(out+"/orbax0520_plain",state)
ckn=ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
ckn.save(out+"/orbax0520_noocdbt",state,save_args=sa)
m=ocp.CheckpointManager(out+"/orbax0520_manager", ocp.PyTreeCheckpointer(), ocp.CheckpointManagerOptions())
for s in (1,2): m.save(s,state,save_kwargs={"save_args":sa})
from flax import config
config.update("flax_use_orbax_checkpointing", False)
ts={"params":params,"step":7,"x":jnp.asarray(2+3j),"npf":np.float32(1.5),"c":1+2j,"t":(1,None,"s")}
for s in (9,100): checkpoints.save_checkpoint(out+"/flax", ts, s, keep=5)
config.update("flax_use_orbax_checkpointing", True)
checkpoints.save_checkpoint(out+"/flax_orbax", ts|{"c":0,"t":0}, 5)
from flax import serialization
serialization.MAX_CHUNK_SIZE=32
tree={"params":{"a":np.arange(60,dtype=np.float32).reshape(3,4,5),"b":jnp.arange(7,dtype=jnp.bfloat16)},"ints":{1:{"x":np.int8(4)},12:np.float64(2)}, "u": np.arange(3,dtype=np.uint64), "s":"text", "by":b"ab"}
open(out+"/chunked.msgpack","wb").write(serialization.msgpack_serialize(tree))
# haiku: dict of dicts pickled
def f(x): return hk.nets.MLP([4,2])(x)
p=hk.transform(f).init(jax.random.PRNGKey(0),jnp.ones((1,3)))
pickle.dump(p,open(out+"/haiku_jax.pkl","wb"))
pickle.dump(jax.device_get(p),open(out+"/haiku_np.pkl","wb"))
pickle.dump((params, optax.adam(1e-3).init(params), {"step":3}),open(out+"/optax_jax.pkl","wb"))
