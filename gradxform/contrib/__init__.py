"""Methods of single papers, whose arguments may still change, as in ``optax.contrib``.

Each is a transformation like any other: it stands in chains, behind gates, in servers.
Its name in a config has no prefix.

>>> import gradxform as gx, jax.numpy as jnp, optax
>>> tx = optax.chain(gx.contrib.clip_by_zscore(warmup=2), optax.sgd(1.0))
>>> state = tx.init(jnp.zeros(2))
>>> for length in (1.0, 3.0, 12.0):  # The third is a spike: it is scaled to about 2.6.
...     updates, state = tx.update(jnp.array([0.0, length]), state)
>>> assert -2.7 < updates[1] < -2.6
>>> same = gx.from_config({"name": "clip_by_zscore", "warmup": 2})
"""

from gradxform.contrib._alignment import MomentumAlignment as MomentumAlignment
from gradxform.contrib._cautious import cautious as cautious
from gradxform.contrib._clip_by_zscore import ClipByZscoreState as ClipByZscoreState
from gradxform.contrib._clip_by_zscore import clip_by_zscore as clip_by_zscore
from gradxform.contrib._delayed_nesterov import (
    ScaleByDelayedNesterovState as ScaleByDelayedNesterovState,
)
from gradxform.contrib._delayed_nesterov import delayed_nesterov as delayed_nesterov
from gradxform.contrib._delayed_nesterov import (
    scale_by_delayed_nesterov as scale_by_delayed_nesterov,
)
from gradxform.contrib._measure_cosine import MeasureCosineState as MeasureCosineState
from gradxform.contrib._measure_cosine import measure_cosine as measure_cosine
from gradxform.contrib._momentum_look_ahead import (
    ScaleByMomentumLookAheadState as ScaleByMomentumLookAheadState,
)
from gradxform.contrib._momentum_look_ahead import (
    momentum_look_ahead as momentum_look_ahead,
)
from gradxform.contrib._momentum_look_ahead import (
    scale_by_momentum_look_ahead as scale_by_momentum_look_ahead,
)
from gradxform.contrib._momentum_look_ahead import worker_start as worker_start
from gradxform.contrib._scale_by_worker import scale_by_worker as scale_by_worker
