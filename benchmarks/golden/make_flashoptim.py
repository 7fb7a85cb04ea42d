"""Makes flashoptim.json: FlashOptim's own code for JAX, without its kernels for GPUs.

With Python 3.11, from the repository's root, with a checkout at fc24600d elsewhere:

    git clone https://github.com/samacqua/flashoptim-jax ../flashoptim-jax
    pip install "jax==0.10.2" "optax==0.2.8" "numpy==2.4.6"
    python benchmarks/golden/make_flashoptim.py ../flashoptim-jax
"""

import sys

import _format
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, sys.argv[1])
import flashoptim_jax as flash

STEPS, EVERY = 400, 40
SETTINGS = {"learning_rate": 5e-4, "b1": 0.9, "b2": 0.99, "weight_decay": 0.01}


def split(dtype, bits):
    """Numbers in half precision, and what is left of them."""
    x = _format.wide(31, 64)
    kept, rest = flash.split_leaf(jnp.asarray(x), jnp.dtype(dtype), bits)
    read = flash.reconstruct_leaf(kept, rest)
    case = {"name": f"split-{dtype}-{bits}", "symbol": "split_leaf"}
    ours = {"transformation": "master_weights", "residual_dtype": str(rest.dtype)}
    case.update(settings={"dtype": dtype, "master_weight_bits": bits}, ours=ours)
    kept = np.float32(kept)
    return dict(
        case, numbers=x, params=kept, residual=np.asarray(rest), read=np.asarray(read)
    )


def quantized(name, x, write, read, group_size=128, why_not=None):
    """One array, kept in 8 bits and read again."""
    kept = write(jnp.asarray(x), group_size)
    case = {"name": name, "symbol": write.__name__}
    ours = {"transformation": "low_bit_state", "block_size": group_size}
    case["settings"] = {"group_size": group_size}
    case.update(_format.compared(ours, why_not))
    case.update(numbers=x, scales=np.float32(kept.scales), codes=np.int32(kept.values))
    return dict(case, read=np.asarray(read(kept, group_size)))


def stepped():
    """Steps of AdamW in float32 on parameters in 24 bits."""
    start = _format.coarse(11, 1)[0]["w"]
    settings = dict(SETTINGS, learning_rate=3e-4, quantize=False, fused=False)
    theirs = flash.flash_adamw(**settings)
    params, events = {"w": jnp.asarray(start, jnp.bfloat16)}, []
    state = theirs.init(params)
    for grads in _format.coarse(12, 60):
        params, state = theirs.step(params, state, grads)
        event = {"grads": grads, "params": {"w": np.float32(params["w"])}}
        events.append(dict(event, residual={"w": np.asarray(state.ecc["w"])}))
    inner = dict(SETTINGS, learning_rate=3e-4, transformation="optax.adamw")
    ours = {"transformation": "master_weights", "residual_dtype": "int8"}
    case = {"name": "adamw-24-bits", "symbol": "flash_adamw", "settings": settings}
    return dict(case, ours=dict(ours, inner=inner), params={"w": start}, events=events)


def trained(name, ours, **settings):
    """The losses of one training."""
    bowl, losses = _format.Bowl(), []
    settings = dict(SETTINGS, fused=False, **settings)
    theirs = flash.flash_adamw(**settings)
    params = {"w": jnp.asarray(bowl.start, jnp.bfloat16)}
    state, step = theirs.init(params), jax.jit(theirs.step)
    for t in range(STEPS):
        w = np.float32(params["w"])
        grads = {"w": jnp.asarray(bowl.gradient(w), jnp.bfloat16)}
        params, state = step(params, state, grads)
        if t % EVERY == EVERY - 1:
            read = flash.reconstruct_leaf(params["w"], state.ecc["w"])
            losses.append(bowl.loss(np.asarray(read)))
    case = {"name": name, "symbol": "flash_adamw", "settings": settings, "ours": ours}
    return dict(case, loss=losses)


if __name__ == "__main__":
    x = _format.wide(22, 256)
    adamw = dict(SETTINGS, transformation="optax.adamw")
    low_bit = {"transformation": "low_bit_state", "inner": adamw}
    all_bits = {"transformation": "master_weights", "residual_dtype": "int8"}
    all_bits["inner"] = low_bit
    momentum = flash.quantize_momentum, flash.dequantize_momentum
    variance = flash.quantize_variance, flash.dequantize_variance
    cases = [
        split("bfloat16", 24),
        split("bfloat16", 32),
        split("float16", 24),
        quantized("momentum", x, *momentum),
        quantized("variance", np.square(x), *variance),
        quantized("momentum-32", x, *momentum, group_size=32),
        quantized("variance-32", np.square(x), *variance, group_size=32),
        quantized(
            "tiny", x * np.float32(2**-26), *momentum, why_not="scales in float16"
        ),
        stepped(),
        trained("adamw-flash", all_bits, master_weight_bits=24),
        trained("adamw-flash-32", all_bits, master_weight_bits=24, quantize=False),
    ]
    versions = {"flashoptim-jax": "fc24600d", "jax": jax.__version__}
    _format.write(__file__, versions, cases)
